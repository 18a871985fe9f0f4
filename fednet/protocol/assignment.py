"""Who gets which task: those that wait, in their order, and the worker that each goes to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fednet.protocol.table import TaskState
from fednet.protocol.tasks import TrackedTask
from fednet.protocol.workers import TASKS_PER_SLOT, ClientProcess, Roster


class Assignment:
    """The tasks that wait for a worker."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.waiting: dict[int, TrackedTask] = {}  # by client
        self._places = 0  # how many tasks were added
        self._last: dict[int, str] = {}  # by client, the worker of its last task
        # By worker, "" for all: the waiting tasks of its clients in order. Some may wait no more.
        self._queues: dict[str, deque[TrackedTask]] = {}

    def add(self, t: TrackedTask) -> None:
        """The task waits, after those that wait already; one that waited before keeps its place."""
        if not t.place:
            self._places += 1
            t.place = self._places
        self.waiting[t.spec.client] = t
        self._queues.clear()

    def remove(self, client: int) -> None:
        """The client's task waits no more."""
        self.waiting.pop(client, None)

    def hosts_others(self, worker: ClientProcess) -> None:
        """The worker may host other clients than before."""
        self._queues.pop(worker.name, None)

    def pairs(
        self, only: ClientProcess | None = None
    ) -> Iterator[tuple[TrackedTask, ClientProcess]]:
        """Yields waiting tasks and the worker that each goes to, in the order of the tasks, as long
        as workers have room. The caller hands each out before the next. only: the one worker that
        has more room now; this costs no look at the other tasks.
        """
        roster = self._roster
        waiting = self.waiting
        slots = roster.free_slots
        if not slots or not waiting:
            return
        name = "" if only is None else only.name
        queue = self._queues.get(name)
        if queue is None:
            clients = waiting if only is None else [c for c in only.ids if c in waiting]
            tasks = sorted([waiting[c] for c in clients], key=lambda t: t.place)
            queue = self._queues[name] = deque(tasks)
        passed: list[TrackedTask] = []
        while queue and roster.free_slots and (only is None or only.free):
            t = queue.popleft()
            if t.status is not TaskState.WAITING:
                continue
            # More tasks than a worker has slots are in its queue, so that those of a pack are there
            # when the pack before it ends; but never the last tasks.
            worker = self._worker_for(t, ahead=len(waiting) > slots)
            if worker is None:
                passed.append(t)
                continue
            del waiting[t.spec.client]
            self._last[t.spec.client] = worker.name
            yield t, worker
        queue.extendleft(reversed(passed))

    def _worker_for(self, t: TrackedTask, ahead: bool) -> ClientProcess | None:
        """Who gets a task, of those that host its client: not one that failed at it, nor one that
        lacks the state that it starts from, if there are others; among equally free ones the one
        that has the client's data in memory. A bound task goes to the worker of its client's last
        task, while that worker can do it. ahead: also a worker that has no slot free for it.
        """
        client = t.spec.client
        most = TASKS_PER_SLOT if ahead else 1
        hosts = list(self._roster.hosting.get(client, {}).values())
        if len(hosts) == 1 and not t.spec.bound:
            worker = hosts[0]
            return worker if len(worker.queue) < most * worker.slots else None
        last = self._roster.workers.get(self._last.get(client, ""))
        if (
            t.spec.bound
            and last is not None
            and last.name not in t.refused_by
            and client in last.ids - last.replaced
        ):
            hosts = [x for x in hosts if x is last]
        elif len(hosts) > 1:
            if t.spec.start:
                hosts = [x for x in hosts if client not in x.lacks] or hosts
            hosts = [x for x in hosts if x.name not in t.refused_by] or hosts
        room = [x for x in hosts if len(x.queue) < most * x.slots]
        if len(room) <= 1:
            return room[0] if room else None
        return min(room, key=lambda x: (len(x.queue) / x.slots, x is not last, x.name))

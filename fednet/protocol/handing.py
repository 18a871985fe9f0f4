"""Which worker is handed which task.

    a task waits  +  a worker that hosts its client has room  ->  it is handed over, in order

A worker has room while it does fewer tasks than it has slots, and for one ahead of these: but not
for the phase's last ones, which would wait there for nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence

from fednet.protocol.roster import Roster, Worker
from fednet.protocol.work import Work, WorkStatus


class Waiting:
    """The tasks of a phase that wait for a worker. order: in which they are handed out. last: the
    worker that had a client's last task.
    """

    def __init__(self, order: Sequence[Work], roster: Roster, last: Mapping[int, str]) -> None:
        self._order, self._roster, self._last = order, roster, last
        self._place = {w.job.client: k for k, w in enumerate(order)}
        self._left = sum(w.status is WorkStatus.WAITING for w in order)
        self._again = False  # whether others have room, at the next event
        # by worker: the ids it hosted, and the places of their tasks that may still wait
        self._heaps: dict[str, tuple[frozenset[int], list[int]]] = {}

    def changed(self, w: Work, was: WorkStatus) -> None:
        """A task of this phase has another status now."""
        self._left += (w.status is WorkStatus.WAITING) - (was is WorkStatus.WAITING)
        if w.status is WorkStatus.WAITING:
            self._heaps.clear()
            self._again = True

    def pairs(self, only: Worker | None) -> Iterator[tuple[Work, Worker]]:
        """Tasks and the workers for them, until no worker has room for any of them. Each is to be
        handed out before the next is asked for. only: nothing has changed since this was asked last
        but that this one has more room.
        """
        roster = self._roster
        all = only is None or self._again or roster.changed
        self._again = roster.changed = False
        slots = roster.free_slots
        yield from self._for_any() if all or only is None else self._for_one(only)
        # Tasks ahead were over for as many slots, and are not for those that are left.
        self._again = 0 < roster.free_slots < self._left <= slots

    def _for_any(self) -> Iterator[tuple[Work, Worker]]:
        left, slots = self._left, self._roster.free_slots
        if not left or not slots:
            return
        hosting: dict[int, list[Worker]] = {}
        for x in self._roster.free():
            for client in self._of(x):
                hosting.setdefault(client, []).append(x)
        for w in self._order:
            if w.status is not WorkStatus.WAITING:
                continue
            able = [
                x
                for x in hosting.get(w.job.client, ())
                if len(x.queue) <= x.slots and self._may(w, x)
            ]
            hosts = [x for x in able if len(x.queue) < x.slots]
            if not hosts and left > slots:
                hosts = able
            if hosts:
                # Among equally free ones, whoever had this client last: its data are there.
                had = self._last.get(w.job.client)
                yield w, min(hosts, key=lambda x: (len(x.queue) / x.slots, had != x.name, x.name))
                left -= 1
                if not self._roster.free_slots:
                    return

    def _for_one(self, worker: Worker) -> Iterator[tuple[Work, Worker]]:
        """No other has room for what waits. It costs no more than the logarithm of how many
        wait.
        """
        left, slots = self._left, self._roster.free_slots
        if not left or not self._roster.is_free(worker):
            return
        ids, heap = self._heaps.get(worker.name, (None, []))
        if ids is not worker.ids:  # not asked for yet, or it hosts others by now
            heap = sorted(self._place[c] for c in self._of(worker))
            self._heaps[worker.name] = worker.ids, heap
        passed: list[int] = []
        while heap and (len(worker.queue) < worker.slots or left > slots):
            place = heapq.heappop(heap)
            w = self._order[place]
            if w.status is not WorkStatus.WAITING:
                continue
            if not self._may(w, worker):
                passed.append(place)
                continue
            yield w, worker
            left -= 1
            if not self._roster.is_free(worker):
                break
        for place in passed:
            heapq.heappush(heap, place)

    def _of(self, x: Worker) -> Iterator[int]:
        """Clients of this phase that a worker hosts."""
        if len(x.ids) < len(self._place):
            return (c for c in x.ids if c in self._place)
        return (c for c in self._place if c in x.ids)

    def _may(self, w: Work, x: Worker) -> bool:
        if w.job.bound and x.name not in _bound_to(w, self._roster, self._last):
            return False
        spotless = not (w.refused_by or w.sat_by or x.stalled or x.lacks)
        return spotless or _may_try(w, x, self._roster)


def _bound_to(w: Work, roster: Roster, last: Mapping[int, str]) -> Collection[str]:
    """Workers that a bound task may go to: the one that had its client's last task, unless it is
    gone, hosts the client no longer, or could not do this one.
    """
    client = w.job.client
    had = roster.workers.get(last.get(client, ""))
    if had is None or client not in had.ids or client in had.replaced or had.name in w.refused_by:
        return roster.workers
    return (had.name,)


def _may_try(w: Work, worker: Worker, roster: Roster) -> bool:
    """A worker that failed at a task, or made no progress with one, tries again only where no other
    hosts its client.
    """
    client = w.job.client
    others = [x for x in roster.hosts(client) if x.name != w.sat_by]
    if client in worker.lacks and w.job.start and any(client not in x.lacks for x in others):
        return False
    if worker.name == w.sat_by and others:
        return False
    return not (worker.stalled or worker.name in w.refused_by) or not any(
        not x.stalled and x.name not in w.refused_by for x in others
    )

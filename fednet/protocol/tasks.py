"""The tasks of a phase: what each client is asked to do, which worker gets it, what becomes of it,
and how long the server waits. Their states are in `table`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fednet.protocol.instructions import REFUSALS, Resolved, Spend, Turn
from fednet.protocol.table import ENDED, TASK, WITH_WORKER, TaskEvent, TaskState, step
from fednet.protocol.transfers import Receiving, Sending, before_cut
from fednet.protocol.workers import Roster, Worker
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import Fault, Field, Key

TRIES = 3  # how often a task is handed out whose replies are refused
DEATHS = 5  # how often a worker may be lost while it runs one task, which may kill it
# Why a client was dropped that no longer has the state which its task starts from.
STATE_LOST = "failed: state lost: "
LEFT = "left"  # why a client that went away did not complete its task


@dataclass(frozen=True, slots=True)
class Leaves:
    """When a client goes away in the middle of its task. at: on the caller's clock. Without a time:
    after `down` parts of the task (None: all) and then `up` bytes of the reply have crossed.
    """

    at: float | None = None
    down: int | None = None
    up: int = 0


class Job(msgspec.Struct):
    """A task for one client. Nobody changes it once it is handed to the protocol.

    cost: SGD steps; the longest task goes out first. start, keep: versions of the client's state
    before and after. state: SHA-256 of the one before. enrol: how many leading fields of the form
    are the client's enrolment. judge: evaluate within the task. faults: planned faults of the first
    hand-out; lost: the one of them after which no reply will come. pace: how long the client's
    device takes, at each hand-out. bound: only the worker of the client's last task can do it,
    while that worker is there; a client whose worker cannot is lost. leaves: None if the client
    stays. round: of this task, where tasks of several rounds are under way; 0: the phase's.
    with_base(): the same task with the base model before its payload, for a worker that lacks it.
    """

    client: int
    form: Sequence[Field] = ()
    body: Body = msgspec.field(default_factory=Body)
    check: bytes = b""
    cost: int = 0
    start: str = ""
    state: str = ""
    keep: str = ""
    enrol: int = 0
    judge: bool = False
    faults: Sequence[Fault] = ()
    lost: str = ""
    bound: bool = False
    leaves: Leaves | None = None
    pace: Sequence[Fault] = ()
    round: int = 0
    with_base: Callable[[], Job] | None = None

    def cut(self, direction: str, part: int) -> int | None:
        """Returns the bytes of its payload, in whole parts, that cross before the client goes away;
        None: all.
        """
        if self.leaves is None or self.leaves.at is not None:
            return None
        parts = self.leaves.down if direction == "down" else -(-self.leaves.up // part)
        return None if parts is None else parts * part

    def short(self, size: int) -> int | None:
        """Returns the bytes of a reply of `size` that cross before its planned cut; None: no cut is
        planned.
        """
        for fault in self.faults:
            if fault.kind == self.lost == "drop_during_upload":
                return before_cut(size, fault.amount)
        return None


@dataclass(frozen=True, slots=True)
class Rules:
    """How long the server waits, in seconds; None: for ever.

    deadline: for a client's task, from its hand-out. closed, silent: for a client whose connection
    closed, or whose heartbeats stopped. join: for an id that never came, from the server's start.
    first: the phase ends after this many replies.
    """

    deadline: float | None = None
    closed: float | None = 3.0
    silent: float | None = 10.0
    join: float | None = 60.0
    first: int | None = None


class Task(msgspec.Struct, eq=False):
    """A job and its progress."""

    job: Job
    status: TaskState = TaskState.WAITING
    attempt: int = 0
    place: int = 0  # among the tasks of the phase, in the order in which they are handed out
    since: float = 0.0  # hand-out, or when it got to the head of its worker's queue
    heard: float = 0.0  # hand-out, or the last message about this task
    moved: float = 0.0  # when its reply was announced, or the last part of it came
    struck: bool = False  # its planned faults were sent with it
    refusals: int = 0
    unread: int = 0  # unreadable messages while its worker was at it
    refused_by: set[str] = set()  # workers that failed; others are tried first
    deaths: int = 0  # how often its worker was lost while it was running it
    reason: str = ""  # why it was dropped
    # Of the present attempt, if it was handed out.
    worker: str = ""
    conn: bytes = b""  # where the task went
    running: bool = False
    down: Sending | None = None
    judge_conn: bytes = b""  # where the evaluation within this task came from
    # Of its reply, if that was announced.
    reply: m.Reply | None = None
    up: Receiving | None = None
    up_conn: bytes = b""  # where it comes from

    def run(self, now: float) -> None:
        """Its worker starts with it."""
        if not self.running:
            self.running = True
            self.since = self.heard = now

    def change(self, event: TaskEvent, to: TaskState | None = None) -> None:
        """Changes the state by the table. to: which one, if the event can lead to several."""
        self.status = step(TASK, self.status, event, to)
        if self.status in (TaskState.WAITING, TaskState.DROPPED):
            self.worker, self.conn, self.running = "", b"", False
            self.down, self.judge_conn = None, b""
        if self.status in (TaskState.WAITING, TaskState.DROPPED, TaskState.HANDED):
            self.reply, self.up, self.up_conn = None, None, b""


def message_of(
    job: Job,
    key: m.Key,
    *,
    run: str = "",
    inc: int = 0,
    keep: str = "",
    deadline: float | None = None,
    faults: Sequence[m.Fault] = (),
) -> m.Task:
    """The task as it is announced to a worker. run, inc: set as it is sent."""
    return m.Task(
        run=run,
        inc=inc,
        key=key,
        form=list(job.form),
        size=job.body.size,
        check=job.check,
        start=job.start,
        state=job.state,
        keep=keep,
        enrol=job.enrol,
        judge=job.judge,
        deadline_s=deadline,
        faults=list(faults),
    )


# -- what becomes of them --------------------------------------------------------------------------
class Tasks:
    """The tasks of the phase that is open, or of the last one."""

    def __init__(self, turn: Turn, roster: Roster, rules: Rules) -> None:
        self._turn, self._roster = turn, roster
        self.rules = rules
        self.round, self.phase = 0, 0
        self.purpose: m.Purpose = "train"
        self.by_client: dict[int, Task] = {}
        self._done = 0  # tasks of this phase
        self._last: dict[int, str] = {}  # client -> the worker of its last task
        self._given: dict[str, dict[int, Task]] = {}  # by worker and client: what it had, or has
        self._leaving: list[Task] = []  # tasks whose clients go away
        self._waiting: dict[int, Task] = {}  # by client
        self._places = 0  # how many tasks were to be handed out
        # By worker: its ids, and the waiting tasks of these in order. Some may wait no more.
        self._queues: dict[str, tuple[frozenset[int], deque[Task]]] = {}

    # -- what is known -----------------------------------------------------------------------------
    def open(self) -> list[Task]:
        return [t for t in self.by_client.values() if t.status not in ENDED]

    def arrived(self) -> list[int]:
        """Returns the clients whose replies were accepted."""
        return sorted(c for c, t in self.by_client.items() if t.status is TaskState.DONE)

    def held_by(self, worker: Worker) -> list[Task]:
        """Returns what a worker was handed and has not answered in full, by client."""
        given = self._given.get(worker.name, {})
        return [
            t
            for client, t in sorted(given.items())
            if self.by_client.get(client) is t
            and t.worker == worker.name
            and t.status in WITH_WORKER
        ]

    def key(self, t: Task, purpose: m.Purpose | None = None) -> Key:
        round = t.job.round or self.round
        return Key(round, self.phase, t.attempt, t.job.client, purpose or self.purpose)

    def current(self, key: Key) -> Task | None:
        """Returns the task that a key belongs to; None for a late one, or one of another phase."""
        t = self.by_client.get(key.client)
        return t if t is not None and self.key(t, key.purpose) == key else None

    def waiting(self, offset: float = 0.0) -> list[dict[str, object]]:
        """Returns a row for each open task. offset: from the server's clock to that of `since`."""
        rows: list[dict[str, object]] = []
        now, deadline = self._turn.now, self.rules.deadline
        for t in self.open():
            client, left = t.job.client, deadline
            doing = (t.status.value, 0, 0)
            worker = self._roster.workers.get(t.worker)
            if worker is not None:
                doing = worker.doing.get(client, doing if t.running else ("queued", 0, 0))
                if t.status is TaskState.ARRIVING:
                    doing = ("uploading", *doing[1:])
                if deadline is not None and t.running:
                    left = deadline - (now - t.since)
            elif client in self._roster.hosting:  # its workers are at other tasks
                doing = ("queued", 0, 0)
            elif t.status is TaskState.WAITING:
                until, _ = self._roster.missed(client, t.since, self.rules.join)
                left = None if until is None else until - now
            rows.append(
                {
                    "client": client,
                    "host": "" if worker is None else worker.host,
                    "pid": 0 if worker is None else worker.pid,
                    "device": "" if worker is None else worker.device,
                    "phase": doing[0],
                    "step": doing[1],
                    "steps": doing[2],
                    "since": t.since + offset,
                    "deadline_s": left,
                }
            )
        return rows

    # -- a phase -----------------------------------------------------------------------------------
    def begin(
        self, round: int, phase: int, purpose: m.Purpose, jobs: Sequence[Job], rules: Rules
    ) -> None:
        """Opens a phase. What is left of the phase before is cancelled."""
        self.cancel("the phase is over")
        self.rules, self.round, self.phase, self.purpose = rules, round, phase, purpose
        self.by_client = {j.client: Task(j, since=self._turn.now) for j in jobs}
        self._done, self._given = 0, {}
        self._leaving = [t for t in self.by_client.values() if t.job.leaves is not None]
        self._wait(sorted(self.by_client.values(), key=lambda t: (-t.job.cost, t.job.client)))

    def add(self, round: int, jobs: Sequence[Job]) -> None:
        """Adds tasks to those under way, each its client's only one. round: the newest. If a client
        had a task of the same round, the new one is its next attempt.
        """
        before, self.round = self.round, round
        new = []
        for job in jobs:
            attempt, last = 0, self.by_client.get(job.client)
            if last is not None:
                if (last.job.round or before) == (job.round or round):
                    attempt = last.attempt + 1
                self._done -= last.status is TaskState.DONE
            new.append(Task(job, attempt=attempt, since=self._turn.now))
            self.by_client[job.client] = new[-1]
        self._wait(new)

    def cancel(self, reason: str) -> None:
        for t in self.open():
            self.drop(t, TaskEvent.CANCELLED, reason)

    def accept(self, key: Key) -> None:
        """The reply was checked, and counts."""
        t = self.current(key)
        if t is None or key.purpose != self.purpose or t.status is not TaskState.ARRIVED:
            return
        t.change(TaskEvent.ACCEPTED)
        self._done += 1
        worker = self._roster.workers.get(t.worker)
        if worker is not None:
            worker.lacks.discard(t.job.client)
            word = "evaluated" if key.purpose == "evaluate" else "answered for"
            worker.did = word, t.job.client, key.round
        self._turn.say(Resolved(key))
        first = self.rules.first
        if first is not None and self._done >= first:
            self.cancel(f"not among the first {first}")
        self.assign(worker)

    def reject(self, key: Key, reason: str) -> None:
        """The reply was checked, and cannot be used."""
        t = self.current(key)
        if t is not None and key.purpose != self.purpose:
            self._turn.say(Spend(t.judge_conn, "up", key, "refused"))
            self._turn.note_refused("reply", reason, t.worker, client=key.client, round=key.round)
        elif t is not None and t.status is TaskState.ARRIVED:
            self.refuse(t, reason, True)

    def refuse(self, t: Task, reason: str, again: bool, what: str = "refused") -> None:
        """Records a useless reply as wasted. The task is handed out again, a few times at most."""
        if t.up_conn:
            self._turn.say(Spend(t.up_conn, "up", self.key(t), what))
            t.up_conn = b""
        t.refusals += 1
        t.refused_by.add(t.worker)
        if (worker := self._roster.workers.get(t.worker)) is not None:
            worker.did = "failed for", t.job.client, self.key(t).round
        event = TaskEvent.FAILED
        if what == "refused":
            event = TaskEvent.REFUSED
            where = {"client": t.job.client, "round": self.key(t).round}
            self._turn.note_refused("reply", reason, t.worker, **where)
            self._call_off(t)  # its worker may still wait to be asked for the rest
        if again and t.refusals < TRIES:
            self.take_back(t, event, "given out again")
        else:
            self.drop(t, event, f"{what}: {reason}")
        self.assign()

    def unread(self, worker: Worker, reason: str) -> None:
        """A message from the worker cannot be read: noise, or a reply that the worker sends again
        whenever it is refused. After `REFUSALS` of these the task is refused.
        """
        for t in self.held_by(worker):
            if t.running:
                t.unread = (t.unread + 1) % REFUSALS
                if not t.unread:
                    unread = f"{REFUSALS} messages that cannot be read"
                    self.refuse(t, f"{unread}, the last: {reason}", True)

    def elsewhere(self, t: Task, worker: Worker, failed: m.Failed) -> None:
        """The worker lacks what the task starts from: another worker may have it. If there is none,
        the client is dropped: as lost if it lacks a state of this round only.
        """
        client, hosts = t.job.client, self._roster.hosting.get(t.job.client, {})
        t.refused_by.add(worker.name)
        if t.job.bound:
            others = any(name not in t.refused_by for name in hosts)
            reason = f"lost: {failed.reason}"
        else:
            worker.lacks.add(client)
            others = any(client not in x.lacks for x in hosts.values())
            state_lost = t.job.start and not failed.base
            reason = f"{STATE_LOST if state_lost else 'failed: '}{failed.reason}"
        if others:
            self.take_back(t, TaskEvent.LACKED, "its state is elsewhere")
        else:
            self.drop(t, TaskEvent.LACKED, reason)
        self.assign()

    # -- handing out -------------------------------------------------------------------------------
    def _wait(self, tasks: Iterable[Task]) -> None:
        """New tasks are to be handed out in this order, after those that wait already; one that is
        handed out again keeps its place.
        """
        for t in tasks:
            self._places += 1
            t.place = self._places
            self._waiting[t.job.client] = t
        self._queues.clear()
        self.assign()

    def assign(self, only: Worker | None = None) -> None:
        """Hands waiting tasks to free workers, in their order. only: the one worker that has more
        room now; this costs no look at the other tasks.
        """
        roster, waiting = self._roster, self._waiting
        slots = roster.free_slots
        if not slots or not waiting:
            return
        queue = self._in_order(waiting) if only is None else self._queue(only)
        passed: list[Task] = []
        while queue and roster.free_slots and (only is None or only.name in roster.free):
            t = queue.popleft()
            if t.status is not TaskState.WAITING:
                continue
            # A task more than a worker has slots for waits in its queue, but never the last tasks.
            worker = self._worker_for(t, ahead=len(waiting) > slots)
            if worker is None:
                passed.append(t)
            else:
                del waiting[t.job.client]
                self._hand(t, worker)
        queue.extendleft(reversed(passed))

    def _queue(self, worker: Worker) -> deque[Task]:
        """The waiting tasks of the clients that a worker hosts."""
        ids, queue = self._queues.get(worker.name, (None, deque[Task]()))
        if ids is not worker.ids:  # the first time, or it hosts other clients now
            queue = self._in_order(worker.ids)
            self._queues[worker.name] = worker.ids, queue
        return queue

    def _in_order(self, clients: Iterable[int]) -> deque[Task]:
        """The waiting tasks of these clients, in the order in which they are handed out."""
        waiting = self._waiting
        return deque(sorted([waiting[c] for c in clients if c in waiting], key=lambda t: t.place))

    def _worker_for(self, t: Task, ahead: bool) -> Worker | None:
        """Who gets a task, of those that host its client: not one that failed at it, nor one that
        lacks the state that it starts from, if there are others; among equally free ones the one
        that has the client's data in memory. A bound task goes to the worker of its client's last
        task, while that worker can do it. ahead: also a worker that has no slot free for it.
        """
        client = t.job.client
        hosts = list(self._roster.hosting.get(client, {}).values())
        last = self._roster.workers.get(self._last.get(client, ""))
        if (
            t.job.bound
            and last is not None
            and last.name not in t.refused_by
            and client in last.ids - last.replaced
        ):
            hosts = [x for x in hosts if x is last]
        elif len(hosts) > 1:
            if t.job.start:
                hosts = [x for x in hosts if client not in x.lacks] or hosts
            hosts = [x for x in hosts if x.name not in t.refused_by] or hosts
        more = 1 if ahead else 0
        room = [x for x in hosts if len(x.queue) < x.slots + more]
        return min(
            room, key=lambda x: (len(x.queue) / x.slots, x is not last, x.name), default=None
        )

    def _hand(self, t: Task, worker: Worker) -> None:
        assert worker.conn is not None
        job, turn, key = t.job, self._turn, self.key(t)
        t.change(TaskEvent.ASSIGNED)
        t.worker, t.conn = worker.name, worker.conn
        t.down = Sending(job.body, turn.part, until=job.cut("down", turn.part))
        worker.queue.append(job.client)
        worker.did = "was asked for", job.client, key.round
        self._roster.recount(worker)
        self._last[job.client] = worker.name
        self._given.setdefault(worker.name, {})[job.client] = t
        t.running = len(worker.queue) <= worker.slots
        t.since = t.heard = turn.now
        faults = [] if t.struck else list(job.faults)
        t.struck = True
        for f in faults:
            turn.note(
                "fault",
                round=key.round,
                client=job.client,
                kind=f.kind,
                amount=f.amount,
                worker=worker.name,
            )
        payload = None
        if t.down.inline:
            payload = t.down.beside()
        task = message_of(
            job, key, keep=job.keep, deadline=self.rules.deadline, faults=[*faults, *job.pace]
        )
        turn.send(worker.conn, task, payload)

    def start_next(self, worker: Worker, client: int) -> None:
        """The worker is done with `client`: the next task in its queue runs, and its deadline."""
        if client in worker.queue:
            worker.queue.remove(client)
            self._roster.recount(worker)
        worker.doing.pop(client, None)
        self.run_heads(worker)

    def run_heads(self, worker: Worker) -> None:
        """Marks the first tasks of the worker's queue as running, as many as it has slots."""
        for client in worker.queue[: worker.slots]:
            if (t := self.by_client.get(client)) is not None:
                t.run(self._turn.now)

    # -- taking back -------------------------------------------------------------------------------
    def take_back(
        self,
        t: Task,
        event: TaskEvent,
        reason: str,
        same_attempt: bool = False,
        died: bool = False,
    ) -> None:
        """Takes a task from its worker, to be handed out again. What crossed for it is wasted.
        died: its worker was lost while running it, perhaps because of it.
        """
        t.deaths += died
        if t.job.lost and t.struck:
            self.drop(t, event, f"lost: {t.job.lost}")
        elif t.deaths >= DEATHS:
            self.drop(t, event, f"failed: its worker was lost {DEATHS} times at this task")
        else:
            self._let_go(t, reason)
            t.change(event, TaskState.WAITING)
            t.attempt += not same_attempt
            self._waiting[t.job.client] = t
            self._queues.clear()

    def restart_upload(self, t: Task) -> None:
        self._turn.say(Spend(t.up_conn, "up", self.key(t), "cut short"))
        t.change(TaskEvent.RESTARTED)

    def _let_go(self, t: Task, reason: str) -> None:
        """Records what crossed as wasted, and frees the worker's slot."""
        if t.conn:
            self._turn.say(Spend(t.conn, "down", self.key(t), reason))
        if t.up_conn:
            self._turn.say(Spend(t.up_conn, "up", self.key(t), reason))
        worker = self._roster.workers.get(t.worker)
        if worker is not None:
            self.start_next(worker, t.job.client)

    def _call_off(self, t: Task) -> None:
        worker = self._roster.workers.get(t.worker)
        if worker is not None and worker.conn is not None:
            self._turn.send(worker.conn, m.Cancel(key=self.key(t)))

    def drop(self, t: Task, event: TaskEvent, reason: str) -> None:
        """The client does not take part in this phase any more."""
        if t.status in WITH_WORKER:
            self._call_off(t)
        self._let_go(t, reason)
        self._waiting.pop(t.job.client, None)
        t.change(event, TaskState.DROPPED)
        t.reason = reason
        self._turn.say(Resolved(self.key(t), reason))

    # -- workers come and go -----------------------------------------------------------------------
    def lost(self, held: list[Task]) -> None:
        """These tasks were lost with their worker. Only a running one may be the reason. Those
        behind it start to run as it is taken back, so this is asked beforehand.
        """
        for t, running in [(t, t.running) for t in held]:
            self.take_back(t, TaskEvent.LOST, "lost", died=running)

    def pause(self, worker: Worker) -> None:
        """The worker is away: uploads over a closed connection start again when it is back."""
        if worker.conn is not None:
            return
        for t in self.held_by(worker):
            if t.status is TaskState.ARRIVING:
                self.restart_upload(t)
                worker.queue.insert(0, t.job.client)
                self._roster.recount(worker)

    def give_on(self, worker: Worker) -> None:
        """The worker did not come back in time: its tasks are lost."""
        held = self.held_by(worker)
        if worker.conn is not None:
            for t in held:
                self._turn.send(worker.conn, m.Cancel(key=self.key(t)))
        self.lost(held)
        worker.queue.clear()
        self._roster.recount(worker)

    def replace(self, gone: Worker, ids: Collection[int]) -> None:
        """Other workers are ready for these clients of a worker that is away, and get its tasks."""
        gone.replaced |= gone.ids.intersection(ids)
        self.lost([t for t in self.held_by(gone) if t.job.client in gone.replaced])

    # -- how long the server waits -----------------------------------------------------------------
    def depart(self) -> None:
        """Drops the tasks of clients that went away."""
        for t in self._leaving:
            leaves = t.job.leaves
            if leaves is None or t.status in (TaskState.ARRIVED, *ENDED):
                continue
            if leaves.at is not None:
                gone = self._turn.now >= leaves.at
            elif t.up is not None:
                gone = t.up.cut
            elif t.down is not None:
                gone = t.down.cut or (leaves.down is None and leaves.up == 0 and t.down.whole)
            else:
                gone = False
            if gone:
                self.drop(t, TaskEvent.LEFT, LEFT)

    def expire(self) -> None:
        """Takes back, or drops, tasks for which the server has waited long enough."""
        self.depart()
        turn, rules = self._turn, self.rules
        for t in self.open():
            if t.status in WITH_WORKER and t.running:
                if turn.over(t.since, rules.deadline):
                    self.drop(t, TaskEvent.DEADLINE, "deadline")
                elif t.job.lost and turn.over(t.heard, rules.closed):
                    # A planned fault: the worker goes on with its other clients.
                    self.drop(t, TaskEvent.SILENCED, f"lost: {t.job.lost}")
            elif t.status is TaskState.WAITING and t.job.client not in self._roster.hosting:
                until, why = self._roster.missed(t.job.client, t.since, rules.join)
                if until is not None and turn.now >= until:
                    self.drop(t, TaskEvent.ABSENT, why)

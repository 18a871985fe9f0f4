"""The tasks of a phase: what is asked of each client, to whom it is handed, what becomes of it, and
how long it is waited for. Their states are in `table`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fednet.protocol.instructions import REFUSALS, Refusals, Resolved, Spend, Turn
from fednet.protocol.table import ENDED, TASK, WITH_WORKER, TaskEvent, TaskState, step
from fednet.protocol.transfers import Receiving, Sending, before_cut
from fednet.protocol.workers import Roster, Worker
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import Fault, Field, Key

TRIES = 3  # how often a task is given out after replies that had to be refused
# how often a task is given out whose worker is lost, so that one that kills its workers ends
LOSSES = 20
DEATHS = 5  # how often a worker may be lost while it is at one task
# What is said of a task's progress cannot be checked. Whatever is said, a task may take so many
# times `stalled`; and, once half of the phase is done, no more than `SLOWER` times the slowest of
# these by their cost, but `CALM` times `stalled` at least.
CLAIMS = 64
SLOWER = 20
CALM = 4
FLOOR = 8192  # bytes a second: an upload may be so slow for as long as it lasts
# Why a client was dropped that no longer has the state which its task starts from.
STATE_LOST = "failed: state lost: "
LEFT = "left"  # why a client that was there no more did not complete its task


@dataclass(frozen=True, slots=True)
class Leaves:
    """When a client is gone although its task is not done. at: on the caller's clock; else, where
    that does not tell, by what has crossed: `down` parts of its task, None: all of them, and then
    `up` bytes of its reply.
    """

    at: float | None = None
    down: int | None = None
    up: int = 0


class Job(msgspec.Struct, frozen=True):
    """A task for one client. cost: SGD steps, for longest-first; start, keep: client state
    versions; state: the SHA-256 of the one it starts from; enrol: how many leading fields of the
    form are the client's enrolment; judge: evaluate within the task; faults: to be acted out at the
    first hand-out; lost: the one of them after which no reply will come. bound: only the
    worker that had the client's last task can do it, as long as that is here; where it cannot, the
    client is lost, not wrong. leaves: None where the client is there for as long as it takes; pace:
    how long its device takes, at each hand-out. round: of this task, where tasks of several rounds
    are under way at a time; 0: the phase's. with_base(): the same task
    with the model that training starts from before its payload, for a worker that lacks that model;
    None where this task has it, or needs none.
    """

    client: int
    form: Sequence[Field]
    body: Body
    check: bytes
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
        """Bytes of its payload, in whole parts, that cross before the client is gone; None: all."""
        if self.leaves is None or self.leaves.at is not None:
            return None
        parts = self.leaves.down if direction == "down" else -(-self.leaves.up // part)
        return None if parts is None else parts * part

    def short(self, size: int) -> int | None:
        """Bytes of a reply of that size that cross before the cut that is planned for it; None:
        none is.
        """
        shares = [f.amount for f in self.faults if f.kind == self.lost == "drop_during_upload"]
        return before_cut(size, shares[0]) if shares else None


@dataclass(frozen=True, slots=True)
class Rules:
    """How long is waited for whom, in seconds; None: for ever.

    deadline: for a client's task, from its hand-out. closed, silent: how long a client may be away
    after its connection closed or its heartbeat fell silent. stalled: how long a task may make no
    progress, although its worker is heard of, where another worker hosts the same client; what is
    only said of progress renews it no more than `CLAIMS` times, wherever the client is. join: how
    long, after the server's start, an id may take to come at all. first: the phase closes on this
    many replies.
    """

    deadline: float | None = None
    closed: float | None = 3.0
    silent: float | None = 10.0
    join: float | None = 60.0
    first: int | None = None
    stalled: float | None = 300.0


_HANDED = {"worker", "conn", "running", "down", "judge_conn"}
_REPLY = {"reply", "up", "up_conn", "asked", "waited"}
# Which fields of a task mean something in each state, beside those that hold for all its attempts.
FIELDS: dict[TaskState, set[str]] = {
    TaskState.WAITING: set(),
    TaskState.HANDED: _HANDED,
    TaskState.ARRIVING: _HANDED | _REPLY,
    TaskState.ARRIVED: _HANDED | _REPLY,
    TaskState.DONE: _HANDED | _REPLY | {"took"},
    TaskState.DROPPED: {"reason"},
}


@dataclass(slots=True)
class Task:
    """A job and how far it is. Its status is changed by `change` alone."""

    job: Job
    status: TaskState = TaskState.WAITING
    attempt: int = 0
    since: float = 0.0  # hand-out, or when it got to the head of its worker's queue
    heard: float = 0.0  # hand-out, or the last that was heard of this task
    moved: float = 0.0  # hand-out, or its last progress: another step or phase, another part
    struck: bool = False  # its planned faults went out with it
    refusals: int = 0
    unread: int = 0  # messages that could not be read while its worker was at it
    # Workers that failed at it: others are asked first.
    refused_by: set[str] = field(default_factory=set)
    sat_by: str = ""  # the worker that it was taken from because it made no progress there
    losses: int = 0
    deaths: int = 0  # of these, while a worker was at it
    # -- of a task that was handed out
    worker: str = ""
    conn: bytes = b""  # where the task went
    running: bool = False
    down: Sending | None = None
    judge_conn: bytes = b""  # where the evaluation within this task came from, if it has come
    # -- of a task whose reply was announced
    reply: m.Reply | None = None
    up: Receiving | None = None
    up_conn: bytes = b""  # where it comes from
    asked: float = 0.0  # since when parts are granted that have not come
    waited: float = 0.0  # for such parts, in all
    # -- of a task that is over
    took: float = 0.0  # from its turn to its reply
    reason: str = ""  # dropped

    def runs(self, now: float) -> None:
        """Its worker is at it."""
        if not self.running:
            self.running = True
            self.since = self.heard = self.moved = now


_FRESH = {f.name: f.default for f in dataclasses.fields(Task)}
# What each state has not.
_LACKS = {
    state: tuple(sorted(set().union(*FIELDS.values()) - fields)) for state, fields in FIELDS.items()
}


def change(task: Task, event: TaskEvent, to: TaskState | None = None) -> None:
    """Changes a task's state by the table, and clears what it does not have there. to: where the
    event can lead to several states.
    """
    task.status = step(TASK, task.status, event, to)
    for name in _LACKS[task.status]:
        setattr(task, name, _FRESH[name])


class TasksByState:
    """The works of a phase by their states."""

    def __init__(self, waiting: Iterable[Task]) -> None:
        self._by: dict[TaskState, dict[int, Task]] = {
            status: {} for status in TaskState
        }  # and client
        self._by[TaskState.WAITING] = {w.job.client: w for w in waiting}

    def with_state(self, status: TaskState) -> Collection[Task]:
        """The tasks in that state, in the order in which they entered it."""
        return self._by[status].values()

    def enter(self, work: Task, before: Task | None) -> None:
        """Another work of a client, in place of the one before."""
        if before is not None:
            del self._by[before.status][before.job.client]
        self._by[work.status][work.job.client] = work

    def change(self, work: Task, event: TaskEvent, to: TaskState | None) -> None:
        was, client = work.status, work.job.client
        change(work, event, to)
        del self._by[was][client]
        self._by[work.status][client] = work


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


# -- to whom they are handed ----------------------------------------------------------------------


class Waiting:
    """The tasks of a phase that wait for a worker. order: in which they are handed out. last: the
    worker that had a client's last task.
    """

    def __init__(self, order: Sequence[Task], roster: Roster, last: Mapping[int, str]) -> None:
        self._order, self._roster, self._last = order, roster, last
        self._place = {w.job.client: k for k, w in enumerate(order)}
        self._left = sum(w.status is TaskState.WAITING for w in order)
        self._again = False  # whether others have room, at the next event
        # by worker: the ids it hosted, and the places of their tasks that may still wait
        self._heaps: dict[str, tuple[frozenset[int], list[int]]] = {}

    def changed(self, w: Task, was: TaskState) -> None:
        """A task of this phase has another status now."""
        self._left += (w.status is TaskState.WAITING) - (was is TaskState.WAITING)
        if w.status is TaskState.WAITING:
            self._heaps.clear()
            self._again = True

    def pairs(self, only: Worker | None) -> Iterator[tuple[Task, Worker]]:
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

    def _for_any(self) -> Iterator[tuple[Task, Worker]]:
        left, slots = self._left, self._roster.free_slots
        if not left or not slots:
            return
        hosting: dict[int, list[Worker]] = {}
        for x in self._roster.free():
            for client in self._of(x):
                hosting.setdefault(client, []).append(x)
        for w in self._order:
            if w.status is not TaskState.WAITING:
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

    def _for_one(self, worker: Worker) -> Iterator[tuple[Task, Worker]]:
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
            if w.status is not TaskState.WAITING:
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

    def _may(self, w: Task, x: Worker) -> bool:
        if w.job.bound and x.name not in _bound_to(w, self._roster, self._last):
            return False
        spotless = not (w.refused_by or w.sat_by or x.stalled or x.lacks)
        return spotless or _may_try(w, x, self._roster)


def _bound_to(w: Task, roster: Roster, last: Mapping[int, str]) -> Collection[str]:
    """Workers that a bound task may go to: the one that had its client's last task, unless it is
    gone, hosts the client no longer, or could not do this one.
    """
    client = w.job.client
    had = roster.workers.get(last.get(client, ""))
    if had is None or client not in had.ids or client in had.replaced or had.name in w.refused_by:
        return roster.workers
    return (had.name,)


def _may_try(w: Task, worker: Worker, roster: Roster) -> bool:
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


# -- what becomes of them -------------------------------------------------------------------------


class Tasks:
    """The phase that is open, or the last one."""

    def __init__(self, turn: Turn, roster: Roster, refusals: Refusals, rules: Rules) -> None:
        self._turn, self._roster, self._refusals = turn, roster, refusals
        self.rules = rules
        self.round, self.phase = 0, 0
        self.purpose: m.Purpose = "train"
        self.work: dict[int, Task] = {}
        self._last: dict[int, str] = {}  # client -> the worker that had its last task
        self._given: dict[str, dict[int, Task]] = {}  # by worker and client: what it had, or has
        self._waiting = Waiting((), roster, self._last)
        self._states = TasksByState(())

    # -- what is known -----------------------------------------------------------------------------
    def with_state(self, status: TaskState) -> Collection[Task]:
        """The phase's tasks in that state, in the order in which they entered it."""
        return self._states.with_state(status)

    def change(self, w: Task, event: TaskEvent, to: TaskState | None = None) -> None:
        """Changes the state of a task of this phase."""
        was = w.status
        self._states.change(w, event, to)
        self._waiting.changed(w, was)

    def open(self) -> list[Task]:
        return [w for w in self.work.values() if w.status not in ENDED]

    def held_by(self, worker: Worker) -> list[Task]:
        """What a worker was handed and has not answered in full, by client."""
        given = self._given.get(worker.name, {})
        return [
            w
            for client, w in sorted(given.items())
            if self.work.get(client) is w and w.worker == worker.name and w.status in WITH_WORKER
        ]

    def key(self, w: Task, purpose: m.Purpose | None = None) -> Key:
        round = w.job.round or self.round
        return Key(round, self.phase, w.attempt, w.job.client, purpose or self.purpose)

    def current(self, key: Key) -> Task | None:
        """The work that a key belongs to, or None for what is late or of another phase."""
        w = self.work.get(key.client)
        return w if w is not None and self.key(w, key.purpose) == key else None

    # -- a phase -----------------------------------------------------------------------------------
    def begin(
        self,
        round: int,
        phase: int,
        purpose: m.Purpose,
        jobs: Sequence[Job],
        rules: Rules,
    ) -> None:
        """What is left of the phase before is cancelled."""
        self.cancel("the phase is over")
        self.rules, self.round, self.phase, self.purpose = rules, round, phase, purpose
        self.work = {j.client: Task(j, since=self._turn.now) for j in jobs}
        self._given = {}
        order = sorted(self.work.values(), key=lambda w: (-w.job.cost, w.job.client))
        self._waiting = Waiting(order, self._roster, self._last)
        self._states = TasksByState(order)
        self.assign()

    def add(self, round: int, jobs: Sequence[Job]) -> None:
        """More tasks beside those under way, each its client's only one. round: the newest. Where
        a client had a task of the same round, the new one is its next attempt.
        """
        before, self.round = self.round, round
        for job in jobs:
            last = self.work.get(job.client)
            again = last is not None and (last.job.round or before) == (job.round or round)
            attempt = last.attempt + 1 if last is not None and again else 0
            work = Task(job, attempt=attempt, since=self._turn.now)
            self._states.enter(work, last)
            self.work[job.client] = work
        order = sorted(self.open(), key=lambda w: w.since)
        self._waiting = Waiting(order, self._roster, self._last)
        self.assign()

    def cancel(self, reason: str) -> None:
        for w in self.open():
            self.drop(w, TaskEvent.CANCELLED, reason)

    def accept(self, key: Key) -> None:
        """The reply was whole and sound."""
        w = self.current(key)
        if w is None or key.purpose != self.purpose or w.status is not TaskState.ARRIVED:
            return
        self.change(w, TaskEvent.ACCEPTED)
        w.took = self._turn.now - w.since
        worker = self._roster.workers.get(w.worker)
        able = worker is not None and (worker.stalled or w.job.client in worker.lacks)
        if worker is not None:
            worker.stalled = False
            worker.lacks.discard(w.job.client)
        self._turn.say(Resolved(self.key(w)))
        first = self.rules.first
        if first is not None and len(self.with_state(TaskState.DONE)) >= first:
            self.cancel(f"not among the first {first}")
        self.assign(None if able else worker)

    def reject(self, key: Key, reason: str, again: bool) -> None:
        """The reply was not what was declared."""
        w = self.current(key)
        if w is not None and key.purpose != self.purpose:
            self._turn.say(Spend(w.judge_conn, "up", key, "refused"))
            self._refusals.note("reply", reason, w.worker, client=key.client, round=key.round)
        elif w is not None and w.status is TaskState.ARRIVED:
            self.refuse(w, reason, again)

    def refuse(self, w: Task, reason: str, again: bool, what: str = "refused") -> None:
        """A reply that cannot be used is billed; the task goes out anew, a few times at most."""
        if w.up_conn:
            self._turn.say(Spend(w.up_conn, "up", self.key(w), what))
            w.up_conn = b""
        w.refusals += 1
        w.refused_by.add(w.worker)
        if what == "refused":
            where = {"client": w.job.client, "round": self.key(w).round}
            self._refusals.note("reply", reason, w.worker, **where)
            worker = self._roster.workers.get(w.worker)
            if worker is not None and worker.conn is not None:
                # It may still wait to be asked for the rest.
                self._turn.call_off(worker.conn, self.key(w))
        event = TaskEvent.REFUSED if what == "refused" else TaskEvent.FAILED
        if again and w.refusals < TRIES:
            self.take_back(w, event, "given out again")
        else:
            self.drop(w, event, f"{what}: {reason}")
        self.assign()

    def unread(self, worker: Worker, reason: str) -> None:
        """Something came that cannot be read from a worker that has tasks: line noise, or a reply
        that is sent again whenever it is refused. After REFUSALS of these the task is refused.
        """
        for w in self.held_by(worker):
            if w.running:
                w.unread = (w.unread + 1) % REFUSALS
                if not w.unread:
                    unread = f"{REFUSALS} messages that cannot be read"
                    self.refuse(w, f"{unread}, the last: {reason}", True)

    def elsewhere(self, w: Task, worker: Worker, failed: m.Failed) -> None:
        """The worker lacks what the task starts from: the task goes to a worker that may have it.
        Where there is none the client is dropped: as lost, where it lacks something of this round
        alone; as one whose state is lost, where the task names a state.
        """
        bound, client, hosts = w.job.bound, w.job.client, self._roster.hosts(w.job.client)
        w.refused_by.add(worker.name)
        worker.lacks |= set() if bound else {client}
        if any(x.name not in w.refused_by if bound else client not in x.lacks for x in hosts):
            self.take_back(w, TaskEvent.LACKED, "its state is elsewhere")
        elif bound:
            self.drop(w, TaskEvent.LACKED, f"lost: {failed.reason}")
        elif w.job.start and not failed.base:
            self.drop(w, TaskEvent.LACKED, f"{STATE_LOST}{failed.reason}")
        else:
            self.drop(w, TaskEvent.LACKED, f"failed: {failed.reason}")
        self.assign()

    # -- handing out -------------------------------------------------------------------------------
    def assign(self, only: Worker | None = None) -> None:
        """Waiting tasks to free workers. only: nothing changed but that this one has more room."""
        for w, worker in self._waiting.pairs(only):
            self._hand(w, worker)

    def _hand(self, w: Task, worker: Worker) -> None:
        assert worker.conn is not None
        job, turn = w.job, self._turn
        self.change(w, TaskEvent.ASSIGNED)
        w.worker, w.conn = worker.name, worker.conn
        w.down = Sending(job.body, turn.part, until=job.cut("down", turn.part))
        worker.queue.append(job.client)
        self._roster.recount(worker)
        self._last[job.client] = worker.name
        self._given.setdefault(worker.name, {})[job.client] = w
        w.running = len(worker.queue) <= worker.slots
        w.since = w.heard = w.moved = turn.now
        faults, w.struck = [] if w.struck else list(job.faults), True
        where = {"round": self.key(w).round, "client": job.client}
        for f in faults:
            turn.note("fault", **where, kind=f.kind, amount=f.amount, worker=worker.name)
        if w.down.inline:
            w.down.sent = w.down.parts
        task = message_of(
            job,
            self.key(w),
            keep=job.keep,
            deadline=self.rules.deadline,
            faults=[*faults, *job.pace],
        )
        turn.send(worker.conn, task, job.body.whole() if w.down.inline and job.body.size else None)

    def progress(self, worker: Worker, client: int, doing: tuple[str, int, int]) -> None:
        """What a worker says that it does for a client: phase, step, steps."""
        if client in worker.queue and client in self.work:
            w, now = self.work[client], self._turn.now
            w.heard, w.moved = now, w.moved if worker.doing.get(client) == doing else now
        worker.doing[client] = doing

    def start_next(self, worker: Worker, client: int) -> None:
        """`client` is off the worker's hands: the next in its queue is running, and its deadline
        with it.
        """
        if client in worker.queue:
            worker.queue.remove(client)
            self._roster.recount(worker)
        worker.doing.pop(client, None)
        self.run_heads(worker)

    def run_heads(self, worker: Worker) -> None:
        """Marks as running the first tasks of the worker's queue, as many as it has slots."""
        for other in worker.queue[: worker.slots]:
            if (w := self.work.get(other)) is not None:
                w.runs(self._turn.now)

    # -- taking back -------------------------------------------------------------------------------
    def take_back(
        self,
        w: Task,
        event: TaskEvent,
        reason: str,
        lost: bool = False,
        same_attempt: bool = False,
        died: bool = False,
    ) -> None:
        """The task is to be handed out again; what crossed for it so far was of no use. died: its
        worker was lost while it was at this very task, which may be why.
        """
        if w.job.lost and w.struck:
            return self.drop(w, event, f"lost: {w.job.lost}")
        w.losses += lost
        w.deaths += died
        if w.deaths >= DEATHS:
            return self.drop(w, event, f"failed: its worker was lost {DEATHS} times at this task")
        if w.losses >= LOSSES:
            return self.drop(w, event, "lost")
        self._let_go(w, reason)
        self.change(w, event, TaskState.WAITING)
        if not same_attempt:
            w.attempt += 1

    def restart_upload(self, w: Task) -> None:
        if w.status is TaskState.ARRIVING:
            self._turn.say(Spend(w.up_conn, "up", self.key(w), "cut short"))
            self.change(w, TaskEvent.RESTARTED)

    def _let_go(self, w: Task, reason: str) -> None:
        """Spends what crossed, and frees the worker's slot."""
        if w.conn:
            self._turn.say(Spend(w.conn, "down", self.key(w), reason))
        if w.up_conn:
            self._turn.say(Spend(w.up_conn, "up", self.key(w), reason))
        worker = self._roster.workers.get(w.worker)
        if worker is not None:
            self.start_next(worker, w.job.client)

    def drop(self, w: Task, event: TaskEvent, reason: str) -> None:
        worker = self._roster.workers.get(w.worker)
        if w.status in WITH_WORKER and worker is not None and worker.conn is not None:
            self._turn.call_off(worker.conn, self.key(w))
        self._let_go(w, reason)
        self.change(w, event, TaskState.DROPPED)
        w.reason = reason
        self._turn.say(Resolved(self.key(w), reason))

    # -- workers come and go -----------------------------------------------------------------------
    def lost(self, held: list[Task]) -> None:
        """These tasks went with their worker. Only what it was at may be why; and what is behind
        that in its queue is at the head once that is taken back, so this is asked beforehand.
        """
        for w, running in [(w, w.running) for w in held]:
            self.take_back(w, TaskEvent.LOST, "lost", lost=running, died=running)

    def pause(self, worker: Worker) -> None:
        """The worker is away: uploads over a connection that is gone begin anew when it is back."""
        if worker.conn is not None:
            return
        for w in self.held_by(worker):
            if w.status is TaskState.ARRIVING:
                self.restart_upload(w)
                worker.queue.insert(0, w.job.client)
                self._roster.recount(worker)

    def give_on(self, worker: Worker) -> None:
        """The worker did not come back in time: its tasks go to others that host the same ids, or
        are counted out.
        """
        held = self.held_by(worker)
        for w in held if worker.conn is not None else ():
            self._turn.call_off(worker.conn or b"", self.key(w))
        self.lost(held)
        worker.queue.clear()
        self._roster.recount(worker)

    def replace(self, gone: Worker, ids: Collection[int]) -> None:
        """Others are ready that host these clients of a worker that is away: its tasks of them are
        theirs.
        """
        gone.replaced |= gone.ids.intersection(ids)
        self.lost([w for w in self.held_by(gone) if w.job.client in gone.replaced])

    def leave_out(self, worker: Worker, client: int, why: str) -> None:
        """The worker may not have this client's task any more; it waits for another that hosts the
        client.
        """
        w = self.work.get(client)
        if w is not None and w.worker == worker.name and w.status in WITH_WORKER:
            self.take_back(w, TaskEvent.REVOKED, why)


# -- how long is waited for them ------------------------------------------------------------------


class Patience:
    def __init__(self, turn: Turn, roster: Roster, tasks: Tasks) -> None:
        self._turn, self._roster, self._tasks = turn, roster, tasks
        self._of: dict[int, Task] = {}
        self._leaving: list[Task] = []

    def depart(self) -> None:
        """Drops the tasks of clients that are gone by now: what crossed of them was spent."""
        if self._of is not self._tasks.work:  # a phase was begun: of most, nobody leaves
            self._of = self._tasks.work
            self._leaving = [w for w in self._of.values() if w.job.leaves is not None]
        for w in self._leaving:
            if w.status not in (TaskState.ARRIVED, *ENDED) and self._gone(w):
                self._tasks.drop(w, TaskEvent.LEFT, LEFT)

    def _gone(self, w: Task) -> bool:
        leaves = w.job.leaves
        assert leaves is not None
        if leaves.at is not None:
            return self._turn.now >= leaves.at
        if w.up is not None:
            return w.up.cut
        if w.down is None:
            return False
        return w.down.cut or (leaves.down is None and leaves.up == 0 and w.down.whole)

    def expire(self) -> None:
        """Takes back, or drops, what has been waited for long enough."""
        self.depart()
        present, turn, rules = self._roster.present(), self._turn, self._tasks.rules
        # Twice as long each time, so that one that is slow everywhere gets done.
        stuck = {
            w.worker
            for w in self._tasks.open()
            if w.running
            and rules.stalled is not None
            and turn.over(w.moved, rules.stalled * 2**w.losses)
        }
        for name in sorted(stuck):
            worker = self._roster.workers.get(name)
            if worker is not None and worker.gone_at is None:
                self._unstall(worker)
        pace = self._pace()
        for w in self._tasks.open():
            if w.status in WITH_WORKER:
                if w.running and turn.over(w.since, rules.deadline):
                    self._tasks.drop(w, TaskEvent.DEADLINE, "deadline")
                elif w.running and self._too_slow(w, pace):
                    self._give_up(w)
                elif w.job.lost and w.running and turn.over(w.heard, rules.closed):
                    # Planned: the worker lives on, for its other clients.
                    self._tasks.drop(w, TaskEvent.SILENCED, f"lost: {w.job.lost}")
            elif w.status is TaskState.WAITING and w.job.client not in present:
                missed = self._roster.missed(w.job.client, w.since, rules.join, turn.now)
                if missed:
                    self._tasks.drop(w, TaskEvent.ABSENT, missed)

    def _pace(self) -> float | None:
        """Seconds a unit of cost that the slowest task took, once half of them are done."""
        work = self._tasks.work.values()
        done = [w for w in work if w.status is TaskState.DONE]
        if not done or 2 * len(done) < len(work):
            return None
        return max(w.took / max(1, w.job.cost) for w in done)

    def _too_slow(self, w: Task, pace: float | None) -> bool:
        """Whether a task takes longer than what is only said of its progress can excuse."""
        stalled, now = self._tasks.rules.stalled, self._turn.now
        if stalled is None:
            return False
        if w.up is not None:
            due = now - max(w.moved, w.asked) if w.up.ahead else 0.0
            return w.waited + due > CALM * stalled + w.up.got * w.up.part / FLOOR
        most = CLAIMS * stalled
        if pace is not None:
            most = min(most, max(CALM * stalled, SLOWER * pace * max(1, w.job.cost)))
        return now - w.since > most

    def _give_up(self, w: Task) -> None:
        """The worker said for too long that it was at it."""
        worker = self._roster.workers[w.worker]
        worker.stalled, w.sat_by = True, worker.name
        self._turn.note("stalled", worker=worker.name, clients=[w.job.client])
        if len(self._roster.hosts(w.job.client)) > 1:
            self._turn.call_off(worker.conn or b"", self._tasks.key(w))
            self._tasks.take_back(w, TaskEvent.STALLED, "stalled", lost=True)
        else:
            self._tasks.drop(
                w,
                TaskEvent.STALLED,
                "stalled: its worker reported progress for longer than the server accepts",
            )

    def _unstall(self, worker: Worker) -> None:
        """A worker that is heard of and makes no progress may be one that takes tasks to keep them:
        what it has goes to others that host the same clients. Where there is no other it is waited
        for, as long as `deadline` lets it.
        """
        worker.stalled = True
        given = [
            w for w in self._tasks.held_by(worker) if len(self._roster.hosts(w.job.client)) > 1
        ]
        for w in given:
            w.sat_by = worker.name
            self._turn.call_off(worker.conn or b"", self._tasks.key(w))
            self._tasks.take_back(w, TaskEvent.STALLED, "stalled", lost=True)
        if given:
            clients = sorted(w.job.client for w in given)
            self._turn.note("stalled", worker=worker.name, clients=clients)

    def waiting(self, offset: float) -> list[dict[str, object]]:
        """A row for each task whose part in the phase is not over. offset: of the clock that
        `since` is to be read on.
        """
        rows: list[dict[str, object]] = []
        rules, here = self._tasks.rules, self._roster.present()
        deadline = rules.deadline
        for w in self._tasks.open():
            worker = self._roster.workers.get(w.worker)
            # Handed to nobody yet: those who host it are at other tasks, or none is there.
            doing = ("queued" if w.job.client in here else w.status.value, 0, 0)
            if worker is not None:
                queued = ("queued" if not w.running else w.status.value, 0, 0)
                doing = worker.doing.get(w.job.client, queued)
            # Its deadline begins once its worker is free for it.
            left = deadline
            if deadline is not None and w.running:
                left = deadline - (self._turn.now - w.since)
            if w.status is TaskState.WAITING and w.job.client not in here:
                until = self._roster.waits_until(w.job.client, w.since, rules.join)
                left = None if until is None else until - self._turn.now
            rows.append(
                {
                    "client": w.job.client,
                    "host": worker.host if worker else "",
                    "pid": worker.pid if worker else 0,
                    "device": worker.device if worker else "",
                    "phase": doing[0] if w.status is not TaskState.ARRIVING else "uploading",
                    "step": doing[1],
                    "steps": doing[2],
                    "since": w.since + offset,
                    "deadline_s": left,
                }
            )
        return rows

"""The tasks of a phase: to whom each is handed, and what becomes of it (see `work`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fednet.protocol.handing import Waiting
from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import (
    DEATHS,
    LOSSES,
    REFUSALS,
    STATE_LOST,
    TRIES,
    Job,
    Resolved,
    Rules,
    Settle,
)
from fednet.protocol.turn import Refusals, Turn
from fednet.protocol.window import Sending
from fednet.protocol.work import ENDED, WITH_WORKER, Work, WorkStates, WorkStatus, message_of
from fednet.wire import messages as m
from fednet.wire.messages import Key


class Tasks:
    """The phase that is open, or the last one."""

    def __init__(self, turn: Turn, roster: Roster, refusals: Refusals, rules: Rules) -> None:
        self._turn, self._roster, self._refusals = turn, roster, refusals
        self.rules = rules
        self.round, self.phase = 0, 0
        self.purpose: m.Purpose = "train"
        self.work: dict[int, Work] = {}
        self._last: dict[int, str] = {}  # client -> the worker that had its last task
        self._given: dict[str, dict[int, Work]] = {}  # by worker and client: what it had, or has
        self._waiting = Waiting((), roster, self._last)
        self._states = WorkStates(())

    # -- what is known -----------------------------------------------------------------------------
    def that_are(self, status: WorkStatus) -> Collection[Work]:
        """The phase's tasks in that state, in the order in which they entered it."""
        return self._states.that_are(status)

    def put(self, w: Work, status: WorkStatus) -> None:
        """Puts a task of this phase into another state."""
        was = w.status
        self._states.put(w, status)
        self._waiting.changed(w, was)

    def open(self) -> list[Work]:
        return [w for w in self.work.values() if w.status not in ENDED]

    def held_by(self, worker: Worker) -> list[Work]:
        """What a worker was handed and has not answered in full, by client."""
        given = self._given.get(worker.name, {})
        return [
            w
            for client, w in sorted(given.items())
            if self.work.get(client) is w and w.worker == worker.name and w.status in WITH_WORKER
        ]

    def key(self, w: Work, purpose: m.Purpose | None = None) -> Key:
        round = w.job.round or self.round
        return Key(round, self.phase, w.attempt, w.job.client, purpose or self.purpose)

    def current(self, key: Key) -> Work | None:
        """The work that a key belongs to, or None for what is late or of another phase."""
        w = self.work.get(key.client)
        return w if w is not None and self.key(w, key.purpose) == key else None

    def awaits(self, conn: bytes, direction: str, key: Key) -> bool:
        """Whether it is still to be told if that payload, which went over `conn`, was of use."""
        w = self.current(key)
        if w is None or key.purpose != self.purpose or not (w.undecided or w.status not in ENDED):
            return False
        return conn == (w.conn if direction == "down" else w.up_conn)

    def undecided(self, key: Key) -> bool:
        """Whether that task's reply was accepted in a phase at whose end it is told of use."""
        w = self.current(key)
        return w is not None and key.purpose == self.purpose and w.undecided

    # -- a phase -----------------------------------------------------------------------------------
    def begin(
        self,
        round: int,
        phase: int,
        purpose: m.Purpose,
        jobs: Sequence[Job],
        rules: Rules,
        attempts: Mapping[int, int],
    ) -> None:
        """What is left of the phase before is called off without a word to the caller, which has
        gone on.
        """
        self.cancel("the phase is over")
        self.decide({w.job.client: False for w in self.work.values() if w.undecided}, {})
        self._turn.unresolve()
        self.rules, self.round, self.phase, self.purpose = rules, round, phase, purpose
        self.work = {
            j.client: Work(j, attempt=attempts.get(j.client, 0), since=self._turn.now) for j in jobs
        }
        self._given = {}
        order = sorted(self.work.values(), key=lambda w: (-w.job.cost, w.job.client))
        self._waiting = Waiting(order, self._roster, self._last)
        self._states = WorkStates(order)
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
            work = Work(job, attempt=attempt, since=self._turn.now)
            self._states.enter(work, last)
            self.work[job.client] = work
        order = sorted(self.open(), key=lambda w: w.since)
        self._waiting = Waiting(order, self._roster, self._last)
        self.assign()

    def cancel(self, reason: str) -> None:
        for w in self.open():
            self.drop(w, reason)

    def accept(self, key: Key) -> None:
        """The reply was whole and sound."""
        w = self.current(key)
        if w is not None and key.purpose != self.purpose:
            self._turn.say(Settle(w.judge_conn, "up", key, True))
            return
        if w is None or w.status is not WorkStatus.ARRIVED:
            return
        self.put(w, WorkStatus.DONE)
        w.undecided, w.took = self.rules.defer, self._turn.now - w.since
        worker = self._roster.workers.get(w.worker)
        able = worker is not None and (worker.stalled or w.job.client in worker.lacks)
        if worker is not None:
            worker.stalled = False
            worker.lacks.discard(w.job.client)
        if not w.undecided:
            self._settle(w, True)
        self._turn.say(Resolved(w.job.client, w.attempt))
        first = self.rules.first
        if first is not None and len(self.that_are(WorkStatus.DONE)) >= first:
            self.cancel(f"not among the first {first}")
        self.assign(None if able else worker)

    def reject(self, key: Key, reason: str, again: bool) -> None:
        """The reply was not what was declared."""
        w = self.current(key)
        if w is not None and key.purpose != self.purpose:
            self._turn.say(Settle(w.judge_conn, "up", key, False, "refused"))
            self._refusals.note("reply", reason, w.worker, client=key.client, round=key.round)
        elif w is not None and w.status is WorkStatus.ARRIVED:
            self.refuse(w, reason, again)

    def decide(self, useful: Mapping[int, bool], staleness: Mapping[int, int]) -> None:
        """Settles the bytes of a deferred phase."""
        for client, good in useful.items():
            if (w := self.work.get(client)) is not None and w.undecided:
                w.undecided = False
                self._settle(w, good, staleness.get(client))

    def _settle(self, w: Work, useful: bool, staleness: int | None = None) -> None:
        """What crossed for a task whose reply has come."""
        key, why = self.key(w), "" if useful else "left out"
        self._turn.say(
            Settle(w.conn, "down", key, useful, why, arrived=True),
            Settle(w.up_conn, "up", key, useful, why, staleness, arrived=True),
        )

    def refuse(self, w: Work, reason: str, again: bool, what: str = "refused") -> None:
        """A reply that cannot be used is billed; the task goes out anew, a few times at most."""
        if w.up_conn:
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, what))
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
        if again and w.refusals < TRIES:
            self.take_back(w, "given out again")
        else:
            self.drop(w, f"{what}: {reason}")
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

    def elsewhere(self, w: Work, worker: Worker, failed: m.Failed) -> None:
        """The worker lacks what the task starts from: the task goes to a worker that may have it.
        Where there is none the client is dropped: as lost, where it lacks something of this round
        alone; as one whose state is lost, where the task names a state.
        """
        bound, client, hosts = w.job.bound, w.job.client, self._roster.hosts(w.job.client)
        w.refused_by.add(worker.name)
        worker.lacks |= set() if bound else {client}
        if any(x.name not in w.refused_by if bound else client not in x.lacks for x in hosts):
            self.take_back(w, "its state is elsewhere")
        elif bound:
            self.drop(w, f"lost: {failed.reason}")
        elif w.job.start and not failed.base:
            self.drop(w, f"{STATE_LOST}{failed.reason}")
        else:
            self.drop(w, f"failed: {failed.reason}")
        self.assign()

    # -- handing out -------------------------------------------------------------------------------
    def assign(self, only: Worker | None = None) -> None:
        """Waiting tasks to free workers. only: nothing changed but that this one has more room."""
        for w, worker in self._waiting.pairs(only):
            self._hand(w, worker)

    def _hand(self, w: Work, worker: Worker) -> None:
        assert worker.conn is not None
        job, turn = w.job, self._turn
        self.put(w, WorkStatus.HANDED)
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
        w: Work,
        reason: str,
        lost: bool = False,
        same_attempt: bool = False,
        died: bool = False,
    ) -> None:
        """The task is to be handed out again; what crossed for it so far was of no use. died: its
        worker was lost while it was at this very task, which may be why.
        """
        if w.job.lost and w.struck:
            return self.drop(w, f"lost: {w.job.lost}")
        w.losses += lost
        w.deaths += died
        if w.deaths >= DEATHS:
            return self.drop(w, f"failed: its worker was lost {DEATHS} times at this task")
        if w.losses >= LOSSES:
            return self.drop(w, "lost")
        self._let_go(w, reason)
        self.put(w, WorkStatus.WAITING)
        if not same_attempt:
            w.attempt += 1

    def restart_upload(self, w: Work) -> None:
        if w.status is WorkStatus.ARRIVING:
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, "cut short"))
            self.put(w, WorkStatus.HANDED)

    def _let_go(self, w: Work, reason: str) -> None:
        """Settles what crossed as of no use, and frees the worker's slot."""
        if w.conn:
            self._turn.say(Settle(w.conn, "down", self.key(w), False, reason))
        if w.up_conn:
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, reason))
        worker = self._roster.workers.get(w.worker)
        if worker is not None:
            self.start_next(worker, w.job.client)

    def drop(self, w: Work, reason: str) -> None:
        worker = self._roster.workers.get(w.worker)
        if w.status in WITH_WORKER and worker is not None and worker.conn is not None:
            self._turn.call_off(worker.conn, self.key(w))
        self._let_go(w, reason)
        self.put(w, WorkStatus.DROPPED)
        w.reason = reason
        self._turn.say(Resolved(w.job.client, w.attempt, reason))

    # -- workers come and go -----------------------------------------------------------------------
    def lost(self, held: list[Work]) -> None:
        """These tasks went with their worker. Only what it was at may be why; and what is behind
        that in its queue is at the head once that is taken back, so this is asked beforehand.
        """
        for w, running in [(w, w.running) for w in held]:
            self.take_back(w, "lost", lost=running, died=running)

    def pause(self, worker: Worker) -> None:
        """The worker is away: uploads over a connection that is gone begin anew when it is back."""
        if worker.conn is not None:
            return
        for w in self.held_by(worker):
            if w.status is WorkStatus.ARRIVING:
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

    def leave_out(self, worker: Worker, client: int) -> None:
        """The worker may not have this client's task any more; it waits for another that hosts the
        client.
        """
        w = self.work.get(client)
        if w is not None and w.worker == worker.name and w.status in WITH_WORKER:
            self.take_back(w, "its key was revoked")

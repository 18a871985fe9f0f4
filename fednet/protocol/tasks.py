"""The jobs of a phase: to whom each is handed, and what becomes of it.

    waiting ── handed to a free worker ──> handed ── reply announced ──> arriving ──> arrived
       ^                                     │                              │
       └── worker lost, or reply refused ────┴──────────────────────────────┘
    arrived ── accept ──> done             arrived ── reject ──> waiting | dropped
    any but done ── deadline, lost for good, cancelled ──> dropped

These are the values of `Work.status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from fednet.protocol.refusals import Refusals
from fednet.protocol.roster import Roster, Worker
from fednet.protocol.rules import (
    CALM,
    CLAIMS,
    DEATHS,
    FLOOR,
    LOSSES,
    SLOWER,
    TOLD,
    TRIES,
    Job,
    Note,
    Resolved,
    Rules,
    Settle,
)
from fednet.protocol.turn import Turn
from fednet.wire import messages as m
from fednet.wire.messages import Key

ENDED = ("done", "dropped")
WITH_WORKER = ("handed", "arriving")


@dataclass(slots=True)
class Work:
    """A job and how far it is."""

    job: Job
    status: str = "waiting"
    attempt: int = 0
    worker: str = ""
    conn: bytes = b""  # where the task went
    up_conn: bytes = b""  # where its reply comes from
    since: float = 0.0  # hand-out, or when it got to the head of its worker's queue
    running: bool = False
    sent_parts: int = 0
    reply: m.Reply | None = None
    got: int = 0
    granted: int = 0
    judge_conn: bytes = b""  # where the evaluation within this task came from, if it has come
    refusals: int = 0
    unread: int = 0  # messages that could not be read while its worker was at it
    # Workers that failed at it: others are asked first.
    refused_by: set[str] = field(default_factory=set)
    sat_by: str = ""  # the worker that it was taken from because it made no progress there
    losses: int = 0
    deaths: int = 0  # of these, while a worker was at it
    asked: float = 0.0  # since when parts are granted that have not come
    waited: float = 0.0  # for such parts, in all
    took: float = 0.0  # from its turn to its reply
    undecided: bool = False  # done, in a phase whose usefulness is decided at its end
    reason: str = ""
    heard: float = 0.0  # hand-out, or the last that was heard of this task
    moved: float = 0.0  # hand-out, or its last progress: another step or phase, another part
    struck: bool = False  # its planned faults went out with it


class Tasks:
    """The phase that is open, or the last one."""

    def __init__(self, turn: Turn, roster: Roster, refusals: Refusals, rules: Rules) -> None:
        self._turn, self._roster, self._refusals = turn, roster, refusals
        self.rules = rules
        self.round, self.phase = 0, 0
        self.purpose: m.Purpose = "train"
        self.work: dict[int, Work] = {}
        self._order: list[Work] = []  # in which tasks are handed out: longest first
        self._last: dict[int, str] = {}  # client -> the worker that had its last task

    # -- what is known -----------------------------------------------------------------------------
    def open(self) -> list[Work]:
        return [w for w in self.work.values() if w.status not in ENDED]

    def held_by(self, worker: Worker) -> list[Work]:
        """What a worker was handed and has not answered in full."""
        return [w for w in self.open() if w.worker == worker.name and w.status in WITH_WORKER]

    def key(self, w: Work, purpose: m.Purpose | None = None) -> Key:
        return Key(self.round, self.phase, w.attempt, w.job.client, purpose or self.purpose)

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
        """What is left of the phase before is called off without a word to the caller, who has gone
        on.
        """
        self.cancel("the phase is over")
        self.decide({w.job.client: False for w in self.work.values() if w.undecided})
        self._turn.unresolve()
        self.rules = rules
        self.round, self.phase, self.purpose = round, phase, purpose
        self.work = {
            j.client: Work(j, attempt=attempts.get(j.client, 0), since=self._turn.now) for j in jobs
        }
        self._order = sorted(self.work.values(), key=lambda w: (-w.job.cost, w.job.client))
        self.assign()
        self.expire()

    def cancel(self, reason: str) -> None:
        for w in self.open():
            self._drop(w, reason)

    def accept(self, key: Key) -> None:
        """The reply was whole and sound."""
        w = self.current(key)
        if w is not None and key.purpose != self.purpose:
            self._turn.say(Settle(w.judge_conn, "up", key, True))
            return
        if w is None or w.status != "arrived":
            return
        w.status, w.undecided, w.took = "done", self.rules.defer, self._turn.now - w.since
        if w.worker in self._roster.workers:
            self._roster.workers[w.worker].stalled = False
            self._roster.workers[w.worker].lacks.discard(w.job.client)
        if not w.undecided:
            self._settle(w, True)
        self._turn.say(Resolved(w.job.client, w.attempt))
        first = self.rules.first
        if first is not None and sum(1 for x in self.work.values() if x.status == "done") >= first:
            self.cancel(f"not among the first {first}")
        self.assign()

    def reject(self, key: Key, reason: str, again: bool) -> None:
        """The reply was not what was declared."""
        w = self.current(key)
        if w is not None and key.purpose != self.purpose:
            self._turn.say(Settle(w.judge_conn, "up", key, False, "refused"))
            self._refusals.note("reply", reason, w.worker, client=key.client, round=key.round)
        elif w is not None and w.status == "arrived":
            self.refuse(w, reason, again)

    def decide(self, useful: Mapping[int, bool]) -> None:
        """Settles the bytes of a deferred phase."""
        for client, good in useful.items():
            w = self.work.get(client)
            if w is not None and w.undecided:
                w.undecided = False
                self._settle(w, good)

    def _settle(self, w: Work, useful: bool) -> None:
        self._turn.say(
            Settle(w.conn, "down", self.key(w), useful),
            Settle(w.up_conn, "up", self.key(w), useful),
        )

    def refuse(self, w: Work, reason: str, again: bool, what: str = "refused") -> None:
        """A reply that cannot be used: it is billed, and the task goes out anew, a few times at
        most.
        """
        if w.up_conn:
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, what))
            w.up_conn = b""
        w.refusals += 1
        w.refused_by.add(w.worker)
        if what == "refused":
            self._refusals.note("reply", reason, w.worker, client=w.job.client, round=self.round)
            worker = self._roster.workers.get(w.worker)
            if worker is not None and worker.conn is not None:
                # It may still wait to be asked for the rest.
                self._turn.call_off(worker.conn, self.key(w))
        if again and w.refusals < TRIES:
            self.take_back(w, "given out again")
        else:
            self._drop(w, f"{what}: {reason}")
        self.assign()

    def unread(self, worker: Worker, reason: str) -> None:
        """Something came that cannot be read from a worker that has tasks: line noise, or a reply
        that is sent again whenever it is refused. After TOLD of these the task at work is refused.
        """
        for w in self.held_by(worker):
            if w.running:
                w.unread += 1
                if w.unread >= TOLD:
                    w.unread = 0
                    self.refuse(w, f"{TOLD} messages that cannot be read, the last: {reason}", True)

    def elsewhere(self, w: Work, worker: Worker, reason: str) -> None:
        """The worker has not the state that the task starts from: it goes to one that may have it.
        Without one, the client failed.
        """
        worker.lacks.add(w.job.client)
        w.refused_by.add(worker.name)
        if any(w.job.client not in x.lacks for x in self._roster.hosts(w.job.client)):
            self.take_back(w, "its state is elsewhere")
        else:
            self._drop(w, f"failed: {reason}")
        self.assign()

    # -- handing out -------------------------------------------------------------------------------
    def assign(self) -> None:
        """Waiting tasks to free workers, longest first; one task ahead, but never the phase's last
        ones.
        """
        free = [
            x
            for x in self._roster.workers.values()
            if x.ready and x.gone_at is None and len(x.queue) <= x.slots
        ]
        waiting = [w for w in self._order if w.status == "waiting"] if free else []
        left, slots = len(waiting), sum(x.slots for x in free)
        for w in waiting:
            if not free:
                break  # as after most replies: one worker has room, for one task
            able = [
                x
                for x in free
                if w.job.client in x.ids
                and (not (w.refused_by or w.sat_by or x.stalled or x.lacks) or self._may_try(w, x))
            ]
            hosts = [x for x in able if len(x.queue) < x.slots]
            if not hosts and left > slots:
                hosts = [x for x in able if len(x.queue) <= x.slots]
            if hosts:
                # Among equally free ones, whoever had this client last: its data are there already.
                self._hand(
                    w,
                    min(
                        hosts,
                        key=lambda x: (
                            len(x.queue) / x.slots,
                            self._last.get(w.job.client) != x.name,
                            x.name,
                        ),
                    ),
                )
                left -= 1
                free = [x for x in free if len(x.queue) <= x.slots]

    def _may_try(self, w: Work, worker: Worker) -> bool:
        """A worker that failed at a task, or sat on one, tries again only where no other hosts its
        client.
        """
        others = [x for x in self._roster.hosts(w.job.client) if x.name != w.sat_by]
        client = w.job.client
        if client in worker.lacks and w.job.start and any(client not in x.lacks for x in others):
            return False
        if worker.name == w.sat_by and others:
            return False
        return not (worker.stalled or worker.name in w.refused_by) or not any(
            not x.stalled and x.name not in w.refused_by for x in others
        )

    def _hand(self, w: Work, worker: Worker) -> None:
        assert worker.conn is not None
        job, turn = w.job, self._turn
        w.status, w.worker, w.conn, w.up_conn, w.judge_conn, w.reply = (
            "handed",
            worker.name,
            worker.conn,
            b"",
            b"",
            None,
        )
        worker.queue.append(job.client)
        self._last[job.client] = worker.name
        w.running = len(worker.queue) <= worker.slots
        w.since = w.heard = w.moved = turn.now
        faults, w.struck = [] if w.struck else list(job.faults), True
        for fault in faults:
            turn.say(
                Note(
                    "fault",
                    {
                        "round": self.round,
                        "client": job.client,
                        "kind": fault.kind,
                        "amount": fault.amount,
                        "worker": worker.name,
                    },
                )
            )
        inline = job.body.size <= self._turn.part
        w.sent_parts = job.body.parts(self._turn.part) if inline else 0
        task = m.Task(
            run=turn.run,
            inc=turn.incarnation,
            key=self.key(w),
            form=list(job.form),
            size=job.body.size,
            check=job.check,
            start=job.start,
            state=job.state,
            keep=job.keep,
            enrol=job.enrol,
            judge=job.judge,
            deadline_s=self.rules.deadline,
            faults=faults,
        )
        turn.send(worker.conn, task, job.body.whole() if inline and job.body.size else None)

    def start_next(self, worker: Worker, client: int) -> None:
        """`client` is off the worker's hands: the next in its queue is running, and its deadline
        with it.
        """
        if client in worker.queue:
            worker.queue.remove(client)
        worker.doing.pop(client, None)
        self.run_heads(worker)

    def run_heads(self, worker: Worker) -> None:
        """As many of its queue as it has slots are running."""
        for other in worker.queue[: worker.slots]:
            w = self.work.get(other)
            if w is not None and not w.running:
                w.running = True
                w.since = w.heard = w.moved = self._turn.now

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
            return self._drop(w, f"lost: {w.job.lost}")
        w.losses += lost
        w.deaths += died
        if w.deaths >= DEATHS:
            return self._drop(w, f"failed: its worker was lost {DEATHS} times at this task")
        if w.losses >= LOSSES:
            return self._drop(w, "lost")
        self._let_go(w, reason)
        w.status, w.worker, w.conn, w.up_conn, w.reply, w.running = (
            "waiting",
            "",
            b"",
            b"",
            None,
            False,
        )
        if not same_attempt:
            w.attempt += 1

    def _restart_upload(self, w: Work) -> None:
        if w.status == "arriving":
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, "cut short"))
            w.status, w.reply, w.up_conn = "handed", None, b""

    def _let_go(self, w: Work, reason: str) -> None:
        """Settles what crossed as of no use, and frees the worker's slot."""
        if w.conn:
            self._turn.say(Settle(w.conn, "down", self.key(w), False, reason))
        if w.up_conn:
            self._turn.say(Settle(w.up_conn, "up", self.key(w), False, reason))
        worker = self._roster.workers.get(w.worker)
        if worker is not None:
            self.start_next(worker, w.job.client)

    def _drop(self, w: Work, reason: str) -> None:
        worker = self._roster.workers.get(w.worker)
        if w.status in WITH_WORKER and worker is not None and worker.conn is not None:
            self._turn.call_off(worker.conn, self.key(w))
        self._let_go(w, reason)
        w.status, w.reason = "dropped", reason
        self._turn.say(Resolved(w.job.client, w.attempt, reason))

    # -- workers come and go -----------------------------------------------------------------------
    def pick_up(self, worker: Worker, holding: set[Key], ours: bool) -> None:
        """A worker is back: what it still holds goes on, what it lost on the way is handed out
        anew. ours: this server handed out what it holds, and can tell what is not wanted any more;
        of an earlier one's tasks it may ask again.
        """
        kept: set[Key] = set()
        for w in self.held_by(worker):
            if w.job.client not in worker.ids:
                self.take_back(w, "lost", lost=True)
            elif self.key(w) not in holding:
                self.take_back(w, "lost", lost=True, same_attempt=True)
            else:
                kept.add(self.key(w, "train"))
                self._restart_upload(w)  # it announces its reply anew
                if w.job.client not in worker.queue:
                    worker.queue.append(w.job.client)
        for key in sorted(holding) if ours else ():
            if msgspec.structs.replace(key, purpose="train") not in kept:
                self._turn.call_off(worker.conn or b"", key)

    def supersede(self, worker: Worker) -> None:
        """A process started anew is ready: it need not wait until its forerunner is given up."""
        for gone in [x for x in self._roster.workers.values() if x.conn is None]:
            self._lost([w for w in self.held_by(gone) if w.job.client in worker.ids])
        self.assign()

    def _lost(self, held: list[Work]) -> None:
        """These tasks went with their worker. Only what it was at may be why; and what is behind
        that in its queue is at the head once that is taken back, so this is asked beforehand.
        """
        for w, running in [(w, w.running) for w in held]:
            self.take_back(w, "lost", lost=running, died=running)

    def pause(self, worker: Worker) -> None:
        """The worker is away: uploads over a connection that is gone begin anew when it is back."""
        for w in self.open():
            if w.worker == worker.name and w.status == "arriving" and worker.conn is None:
                self._restart_upload(w)
                worker.queue.insert(0, w.job.client)

    def give_on(self, worker: Worker) -> None:
        """The worker did not come back in time: its tasks go to others that host the same ids, or
        are counted out.
        """
        held = self.held_by(worker)
        for w in held if worker.conn is not None else ():
            self._turn.call_off(worker.conn or b"", self.key(w))
        self._lost(held)
        worker.queue.clear()

    def leave_out(self, worker: Worker, client: int) -> None:
        """The worker may not have this client's task any more; it waits for another that hosts the
        client.
        """
        w = self.work.get(client)
        if w is not None and w.worker == worker.name and w.status in WITH_WORKER:
            self.take_back(w, "its key was revoked")

    # -- time --------------------------------------------------------------------------------------
    def expire(self) -> None:
        """Deadlines, tasks without progress, and tasks that nobody is there to take."""
        present, turn, rules = self._roster.present(), self._turn, self.rules
        # Twice as long each time, so that one that is slow everywhere gets done.
        stuck = {
            w.worker
            for w in self.open()
            if w.running
            and rules.stalled is not None
            and turn.over(w.moved, rules.stalled * 2**w.losses)
        }
        for name in sorted(stuck):
            worker = self._roster.workers.get(name)
            if worker is not None and worker.gone_at is None:
                self._unstall(worker)
        pace = self._pace()
        for w in self.open():
            if w.status in WITH_WORKER:
                if w.running and turn.over(w.since, rules.deadline):
                    self._drop(w, "deadline")
                elif w.running and self._too_slow(w, pace):
                    self._give_up(w)
                elif w.job.lost and w.running and turn.over(w.heard, rules.closed):
                    # Planned: the worker lives on, for its other clients.
                    self._drop(w, f"lost: {w.job.lost}")
            elif w.status == "waiting" and w.job.client not in present:
                missed = self._roster.missed(w.job.client, w.since, rules.join, turn.now)
                if missed:
                    self._drop(w, missed)

    def _pace(self) -> float | None:
        """Seconds a unit of cost that the slowest task took, once half of them are done."""
        done = [w for w in self.work.values() if w.status == "done"]
        if not done or 2 * len(done) < len(self.work):
            return None
        return max(w.took / max(1, w.job.cost) for w in done)

    def _too_slow(self, w: Work, pace: float | None) -> bool:
        """Whether a task takes longer than what is only said of its progress can excuse."""
        stalled, now = self.rules.stalled, self._turn.now
        if stalled is None:
            return False
        if w.status == "arriving":
            due = now - max(w.moved, w.asked) if w.granted > w.got else 0.0
            return w.waited + due > CALM * stalled + w.got * self._turn.part / FLOOR
        most = CLAIMS * stalled
        if pace is not None:
            most = min(most, max(CALM * stalled, SLOWER * pace * max(1, w.job.cost)))
        return now - w.since > most

    def _give_up(self, w: Work) -> None:
        """The worker said that it was at it for too long."""
        worker = self._roster.workers[w.worker]
        worker.stalled, w.sat_by = True, worker.name
        self._turn.say(Note("stalled", {"worker": worker.name, "clients": [w.job.client]}))
        if len(self._roster.hosts(w.job.client)) > 1:
            self._turn.call_off(worker.conn or b"", self.key(w))
            self.take_back(w, "stalled", lost=True)
        else:
            self._drop(w, "stalled: its worker said that it went on, for longer than is believed")

    def _unstall(self, worker: Worker) -> None:
        """A worker that is heard of and makes no progress may be one that takes tasks to keep them:
        what it has goes to others that host the same clients. Where there is no other it is waited
        for, as long as `deadline` lets it.
        """
        worker.stalled = True
        given = [w for w in self.held_by(worker) if len(self._roster.hosts(w.job.client)) > 1]
        for w in given:
            w.sat_by = worker.name
            self._turn.call_off(worker.conn or b"", self.key(w))
            self.take_back(w, "stalled", lost=True)
        if given:
            self._turn.say(
                Note(
                    "stalled",
                    {"worker": worker.name, "clients": sorted(w.job.client for w in given)},
                )
            )

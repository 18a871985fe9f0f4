"""One task of a phase: the states that it passes through, and what is known of it in each.

waiting ── handed to a free worker ──> handed ── reply announced ──> arriving ──> arrived
   ^                                     │  ^── connection lost ─────────┤           │
   └── worker lost, or reply refused ────┴───────────────────────────────┴───────────┤
                                                                          accept ──> done
any but done ── deadline, lost for good, cancelled ──> dropped
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fednet.protocol.rules import Job
from fednet.protocol.window import Receiving, Sending
from fednet.wire import messages as m


class WorkStatus(enum.Enum):
    WAITING = "waiting"
    HANDED = "handed"
    ARRIVING = "arriving"
    ARRIVED = "arrived"
    DONE = "done"
    DROPPED = "dropped"

    __hash__ = object.__hash__  # there is one of each; enum's own is slow


ENDED = (WorkStatus.DONE, WorkStatus.DROPPED)
WITH_WORKER = (WorkStatus.HANDED, WorkStatus.ARRIVING)
_HANDED = {"worker", "conn", "running", "down", "judge_conn"}
_REPLY = {"reply", "up", "up_conn", "asked", "waited"}
# What a work may become, and which of its fields mean something then, beside those that hold
# for all of its attempts.
TABLE: dict[WorkStatus, tuple[set[WorkStatus], set[str]]] = {
    WorkStatus.WAITING: ({WorkStatus.HANDED, WorkStatus.DROPPED}, set()),
    WorkStatus.HANDED: ({WorkStatus.WAITING, WorkStatus.ARRIVING, WorkStatus.DROPPED}, _HANDED),
    WorkStatus.ARRIVING: (
        {WorkStatus.WAITING, WorkStatus.HANDED, WorkStatus.ARRIVED, WorkStatus.DROPPED},
        _HANDED | _REPLY,
    ),
    WorkStatus.ARRIVED: (
        {WorkStatus.WAITING, WorkStatus.DONE, WorkStatus.DROPPED},
        _HANDED | _REPLY,
    ),
    WorkStatus.DONE: (set(), _HANDED | _REPLY | {"took", "undecided"}),
    WorkStatus.DROPPED: (set(), {"reason"}),
}


@dataclass(slots=True)
class Work:
    """A job and how far it is. Its status is changed by `to` alone."""

    job: Job
    status: WorkStatus = WorkStatus.WAITING
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
    undecided: bool = False  # done, in a phase whose usefulness is decided at its end
    reason: str = ""  # dropped

    def runs(self, now: float) -> None:
        """Its worker is at it."""
        if not self.running:
            self.running = True
            self.since = self.heard = self.moved = now


_FRESH = {f.name: f.default for f in dataclasses.fields(Work)}
# What each state has not.
_LACKS = {
    status: tuple(sorted(set().union(*(has for _, has in TABLE.values())) - has))
    for status, (_, has) in TABLE.items()
}


def to(work: Work, status: WorkStatus) -> None:
    """Puts a work into another state, and clears what it does not have there."""
    if status not in TABLE[work.status][0]:
        raise ValueError(f"a task that is {work.status.value} cannot become {status.value}")
    work.status = status
    for name in _LACKS[status]:
        setattr(work, name, _FRESH[name])


class WorkStates:
    """The works of a phase by their states."""

    def __init__(self, waiting: Iterable[Work]) -> None:
        self._by: dict[WorkStatus, dict[int, Work]] = {
            status: {} for status in WorkStatus
        }  # and client
        self._by[WorkStatus.WAITING] = {w.job.client: w for w in waiting}

    def that_are(self, status: WorkStatus) -> Collection[Work]:
        """The tasks in that state, in the order in which they entered it."""
        return self._by[status].values()

    def enter(self, work: Work, before: Work | None) -> None:
        """Another work of a client, in place of the one before."""
        if before is not None:
            del self._by[before.status][before.job.client]
        self._by[work.status][work.job.client] = work

    def put(self, work: Work, status: WorkStatus) -> None:
        was, client = work.status, work.job.client
        to(work, status)
        del self._by[was][client]
        self._by[status][client] = work


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

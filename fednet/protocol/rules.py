"""What the server's side of the protocol is told: the work, the rules of a phase, and what it
answers with.

Events and the time go in, instructions come out; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from fednet.plain import JsonDict
from fednet.protocol.window import before_cut
from fednet.wire.codec import Body
from fednet.wire.ledger import Direction
from fednet.wire.messages import Fault, Field, Key, Message

BUDGET = 64  # parts granted to all senders together
# a grant of which no part has come for so long does not count: a few who send nothing must not use
# up the budget of all
UNUSED_S = 2.0
SLOTS = 64  # tasks that one process is taken to work on at once, whatever it says
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
STRIKES = 256  # messages of a connection that belong to nothing, before it is hung up on
REFUSALS = 16  # that a connection is answered with


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
    many replies. defer: usefulness is decided by the caller at the phase's end.
    """

    deadline: float | None = None
    closed: float | None = 3.0
    silent: float | None = 10.0
    join: float | None = 60.0
    first: int | None = None
    defer: bool = False
    stalled: float | None = 300.0


# -- instructions: several a message, so of the kind of class that is made soonest -----------------


class Send(msgspec.Struct, frozen=True):
    conn: bytes
    message: Message
    body: memoryview | None = None


class Stray(msgspec.Struct, frozen=True):
    """The message just received belongs to nothing that is under way: it is billed, and not used.
    Comes first.
    """

    reason: str


class Store(msgspec.Struct, frozen=True):
    """Bytes of a reply's payload of `size` bytes, in order: to be appended at `offset`."""

    key: Key
    offset: int
    data: memoryview
    size: int


class Arrived(msgspec.Struct, frozen=True):
    """A reply is whole. The caller checks it and answers with `accept` or `reject`."""

    key: Key
    form: Sequence[Field]
    size: int
    check: bytes
    state: str
    kept: bool
    seconds: float
    worker: str
    split: Sequence[float] = ()
    taken_s: float = 0.0  # since its worker was free for it
    reported: Mapping[str, float] = {}


class Resolved(msgspec.Struct, frozen=True):
    """A client's part in this phase is over. reason: "" if its reply counts, else why it does
    not.
    """

    client: int
    attempt: int
    reason: str = ""


class Settle(msgspec.Struct, frozen=True):
    """A payload's bytes are known to have been useful or not."""

    conn: bytes
    direction: Direction
    key: Key
    useful: bool
    reason: str = ""
    staleness: int | None = None  # of a reply
    arrived: bool = False  # the task was answered, so that nothing of it was lost

    @property
    def more(self) -> JsonDict:
        """What its rows say beside."""
        said: JsonDict = {"reason": self.reason} if self.reason else {}
        said |= {} if self.staleness is None else {"staleness": self.staleness}
        return {**said, "lost": None} if self.arrived else said


class Note(msgspec.Struct, frozen=True):
    """Something for the run's events."""

    event: str
    fields: JsonDict = {}


class Forget(msgspec.Struct, frozen=True):
    """The connection is of no further use: its queue may be dropped, or the connection itself be
    ended.
    """

    conn: bytes
    hang_up: bool = False


Instruction = Send | Stray | Store | Arrived | Resolved | Settle | Note | Forget

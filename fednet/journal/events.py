"""What can happen to the bytes and the replies of a run.

An account is what a row of `wire.jsonl` grows from: the bytes of one message, of a payload in
parts, or of a connection's heartbeats. Its name is its connection, direction and type; then the key
of the task that it belongs to, 0 for an account of many messages, or a number that no other account
of this process has.
"""

from __future__ import annotations

import msgspec

from fednet.plain import JsonDict
from fednet.wire.messages import OTHER, Direction, Key, Reply

Name = tuple[bytes, Direction, str, Key | int]
UnderWay = list[tuple[int, int]]  # (round, client) of tasks that may still be answered


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The bytes of a row that is not written yet: more may be added, or it is not known whether
    they were useful. Messages that are alike have one account between them until something happens
    to one of them alone, which takes another then; so it says nothing of their tasks.
    """

    direction: Direction
    type: str
    kinds: dict[str, int] = {}
    """Nobody changes them."""
    key: Key | None = None
    """Of the task that it belongs to, where its name has none."""
    counted: bool = False
    """Its messages are alike, and the row has their number."""
    envelope: int = 0
    raw_bytes: int = 0
    """Of payload before compression."""
    count: int = 0
    incarnation: int = 0
    """Of the process that opened it."""
    final: bool = False
    """Of the evaluation after the last round."""
    cut: bool = False
    """Its connection ended before it was known whether its bytes were useful: if they were not,
    they may not have arrived.
    """
    written: bool = False
    """Its row is written, as useful."""

    @property
    def nbytes(self) -> int:
        """All its bytes."""
        return sum(self.kinds.values()) + self.envelope

    @property
    def way(self) -> Direction:
        """The way of the payload that it belongs to: a pull goes the other way."""
        return OTHER[self.direction] if self.type == "pull" else self.direction


class Tally(msgspec.Struct, array_like=True):
    """Sums over rows. spent: all bytes by direction; useful: payload bytes of the method's own
    messages, by direction and kind (evaluations are no part of a method's cost).
    """

    spent: dict[str, int] = msgspec.field(default_factory=lambda: {"up": 0, "down": 0})
    useful: dict[str, dict[str, int]] = msgspec.field(
        default_factory=lambda: {"up": {}, "down": {}}
    )


class Base(msgspec.Struct, array_like=True, tag_field="event", gc=False):
    """Of all events. In the file an event is a list: the number of its type, then its fields in
    their order, as those of an account are. A new field goes to the end, with a default. The
    garbage collector passes events over: they are many, and refer to nothing that refers to them.
    """


# -- bytes -----------------------------------------------------------------------------------------
class Crossed(Base, tag=14):
    """Messages cross that are alike: the bytes of each go to the account of its name, which is
    opened if need be.
    """

    names: list[Name]
    type: str
    """Of the row."""
    envelope: int
    """All bytes of one but those of payload."""
    kinds: dict[str, int] = {}
    """Bytes of payload of one. Nobody changes them."""
    raw: int = 0
    """Bytes of payload of one before compression."""
    key: Key | None = None
    """Of the task that a message belongs to, where its name has none."""
    counted: bool = False
    """See `Account`."""
    final: bool = False
    """See `Account`."""


class Undone(Base, tag=2):
    """A message that had crossed did not leave, since its connection was gone."""

    name: Name
    envelope: int
    kinds: dict[str, int] = {}
    raw: int = 0


class Cut(Base, tag=3):
    """A connection ended. Of what was sent over it in the direction `out`, that which turns out to
    be wasted may not have arrived.
    """

    conn: bytes
    out: Direction


class AccountsClosed(Base, tag=15):
    """Nothing more comes to these accounts, which belong to no accepted reply. reason: why their
    bytes are wasted, "" where they are useful; round, worker: in the rows, in place of their own.
    """

    names: list[Name]
    useful: bool = False
    reason: str = ""
    round: int | None = None
    worker: str | None = None


class CountsClosed(Base, tag=13):
    """Nothing more comes to these accounts of many messages. Those of one direction and type are
    one row, of that round.
    """

    names: list[Name]
    round: int


# -- replies ---------------------------------------------------------------------------------------
class Accepted(Base, tag=5):
    """A reply was checked. What crossed for it, and for its task, waits for the verdict."""

    message: Reply
    """As the client sent it, but for values of `reported` that are not finite."""
    down: bytes | None
    """The connection over which the task went."""
    up: bytes
    """The connection over which the reply came."""
    task: tuple[bytes, str] = (b"", "")
    """The digest of the task's payload, and the version of the client's state that it started from.
    """
    worker: JsonDict = {}
    """Where the reply was made."""
    taken_s: float = 0.0
    """From the hand-out of the task to the whole reply."""
    stored: bool = True
    """Whether the payload is on disk, so that the next server can use it."""
    inline: int = 0
    """So many bytes of payload are in the journal's file."""
    at: int = 0
    """They are there from this byte on."""


class Revoked(Base, tag=6):
    """An accepted reply cannot be used, or its file is written over: it is asked for again."""

    key: Key


class Verdict(Base, tag=7):
    """Which accepted replies were useful is known. replies: (key, why it was wasted, staleness),
    without a reason where it was useful.
    """

    replies: list[tuple[Key, str, int | None]]


class Over(Base, tag=8):
    """The rounds up to this one are recorded: their bytes are taken into the record. What an
    earlier server sent for them and nobody answered is wasted now.
    """

    round: int
    under_way: UnderWay = []


class Forgotten(Base, tag=9):
    """The replies to rounds up to this one are not needed any more."""

    round: int
    under_way: UnderWay = []


# -- processes -------------------------------------------------------------------------------------
class Started(Base, tag=10):
    """A server process begins. round, under_way, totals: of the checkpoint that it goes on from:
    rounds done, tasks that may still be answered, and bytes by direction that are in the records of
    rounds. round None: there is no checkpoint.
    """

    incarnation: int
    round: int | None = None
    under_way: UnderWay = []
    totals: dict[str, int] = {}


class Welcomed(Base, tag=11):
    """A client process is with the server process of that number from now on."""

    incarnation: int


class Snapshot(Base, tag=12):
    """The book after all events before: a file begins with this. Its fields are those of a `Book`.
    generation: of the file, which is one more each time that it is written anew. rows: bytes of
    `wire.jsonl` that the events before gave.
    """

    generation: int = 1
    rows: int = 0
    incarnation: int = 0
    open: list[tuple[Name, Account]] = []
    waiting: list[tuple[Key, tuple[Account, ...]]] = []
    inherited: list[Key] = []
    useful: list[tuple[Key, tuple[Account, ...]]] = []
    accepted: list[Accepted] = []
    totals: dict[str, int] = {}
    crossed: dict[str, int] = {}
    unrecorded: list[tuple[int, Tally]] = []


Event = (
    Crossed
    | Undone
    | Cut
    | AccountsClosed
    | CountsClosed
    | Accepted
    | Revoked
    | Verdict
    | Over
    | Forgotten
    | Started
    | Welcomed
    | Snapshot
)

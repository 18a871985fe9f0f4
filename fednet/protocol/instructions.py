"""What the server's side of the protocol answers an event with, and one event's turn, which
collects that.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from fednet.plain import JsonDict
from fednet.protocol.workers import Worker
from fednet.wire import messages as m
from fednet.wire.codec import Content
from fednet.wire.ledger import Direction
from fednet.wire.messages import Key, Message

REFUSALS = 16  # that a connection is answered with


# -- instructions: several a message, so of the kind of class that is made soonest -----------------


class Send(msgspec.Struct, frozen=True):
    conn: bytes
    message: Message
    body: Content | None = None


class Stray(msgspec.Struct, frozen=True):
    """The message just received belongs to nothing that is under way: it is billed, and not used.
    Comes first.
    """

    reason: str


class Store(msgspec.Struct, frozen=True):
    """Bytes of a reply's payload of `size` bytes, in order: to be appended at `offset`."""

    key: Key
    offset: int
    data: Content
    size: int


class Arrived(msgspec.Struct, frozen=True):
    """All of a reply's payload is here. The caller checks it, and calls `accept` or `reject`.

    taken_s: seconds since its worker started with the task. up: the connection that the reply came
    over. down: the connection that its task went over; None: an evaluation within a task.
    """

    reply: m.Reply
    worker: str
    taken_s: float = 0.0
    up: bytes = b""
    down: bytes | None = None


class Resolved(msgspec.Struct, frozen=True):
    """A client's task is over. reason: "" if its reply counts, else why it does not."""

    key: Key
    reason: str = ""


class Spend(msgspec.Struct, frozen=True):
    """What crossed of a payload was not useful, for that reason."""

    conn: bytes
    direction: Direction
    key: Key
    reason: str


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


Instruction = Send | Stray | Store | Arrived | Resolved | Spend | Note | Forget


class Turn:
    """What one event leads to, and what is said to peers that send what cannot be used.

    now: of the event that is being dealt with, on the caller's clock. part: bytes of a payload's
    parts, but the last. by_conn: the workers, by connection. refused: how many messages were
    refused. strikes: by connection, messages in this phase that belong to nothing.
    """

    def __init__(
        self, run: str, incarnation: int, now: float, part: int, by_conn: Mapping[bytes, Worker]
    ) -> None:
        self.run, self.incarnation, self.now, self.part = run, incarnation, now, part
        self._by_conn = by_conn
        self.refused = 0
        self.strikes: dict[bytes, int] = {}
        self._out: list[Instruction] = []

    def over(self, since: float, patience: float | None) -> bool:
        """Whether so many seconds have passed since; None: never."""
        return patience is not None and self.now - since >= patience

    def say(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    def note(self, event: str, /, **fields: object) -> None:
        """Something for the run's events."""
        self._out.append(Note(event, fields))

    def send(self, conn: bytes, message: m.Message, body: Content | None = None) -> None:
        """The message is marked as this run's, and this incarnation's of its server."""
        marked = msgspec.structs.replace(message, run=self.run, inc=self.incarnation)
        self._out.append(Send(conn, marked, body))

    def note_refused(self, what: str, reason: str, worker: str, **more: object) -> None:
        self.refused += 1
        self.note("refused", what=what, **more, reason=m.clean(reason), worker=worker)

    def refuse(
        self,
        conn: bytes,
        reason: str,
        what: str = "frame",
        final: bool = False,
        unread: bool = False,
    ) -> None:
        """Counts a refusal; the sender is told of the first ones."""
        worker = self._by_conn.get(conn)
        self.note_refused(what, reason, "" if worker is None else worker.name)
        if self.strikes.get(conn, 0) < REFUSALS:
            self.send(conn, m.Refuse(reason=m.clean(reason), final=final, unread=unread))

    def strike(self, conn: bytes) -> None:
        """Counts a message that belongs to nothing."""
        self.strikes[conn] = self.strikes.get(conn, 0) + 1

    def take(self, stray: str = "") -> list[Instruction]:
        """The turn is over. stray: why the message belongs to nothing that is under way."""
        out, self._out = self._out, []
        return [Stray(stray), *out] if stray else out

"""One event's turn at the server's side: when it is, and what is to be done about it; and what is
said to a peer that sends what cannot be used. All parts of that side share these.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fednet.protocol.rules import (
    REFUSALS,
    STRIKES,
    Forget,
    Instruction,
    Note,
    Resolved,
    Send,
    Stray,
)
from fednet.wire import messages as m
from fednet.wire.messages import Key


class Turn:
    """now: of the event that is being dealt with, on the caller's clock. part: bytes of a payload's
    parts, but the last.
    """

    def __init__(self, run: str, incarnation: int, now: float, part: int) -> None:
        self.run, self.incarnation, self.now, self.part = run, incarnation, now, part
        self._out: list[Instruction] = []

    def over(self, since: float, patience: float | None) -> bool:
        """Whether so many seconds have passed since; None: never."""
        return patience is not None and self.now - since >= patience

    def say(self, *instructions: Instruction) -> None:
        self._out.extend(instructions)

    def note(self, event: str, /, **fields: object) -> None:
        """Something for the run's events."""
        self.say(Note(event, fields))

    def send(self, conn: bytes, message: m.Message, body: memoryview | None = None) -> None:
        """The message is marked as this run's, and this incarnation's of its server."""
        marked = msgspec.structs.replace(message, run=self.run, inc=self.incarnation)
        self.say(Send(conn, marked, body))

    def call_off(self, conn: bytes, key: Key) -> None:
        """Tells a worker that this task, or its reply, is not wanted any more."""
        self.send(conn, m.Cancel(key=key))

    def stray(self, reason: str) -> None:
        """The message belongs to nothing that is under way."""
        self._out.insert(0, Stray(reason))

    def unresolve(self) -> None:
        """Drops what was to be said of clients' parts: the caller has gone on to the next phase."""
        self._out = [i for i in self._out if not isinstance(i, Resolved)]

    def take(self) -> list[Instruction]:
        """The turn is over."""
        out, self._out = self._out, []
        return out


class Refusals:
    """count: of all. worker_of(conn): the name of the worker behind a connection, or ""."""

    def __init__(self, turn: Turn, worker_of: Callable[[bytes], str]) -> None:
        self._turn, self._worker_of = turn, worker_of
        self.count = 0
        self.strikes: dict[
            bytes, int
        ] = {}  # by connection: messages in this phase that belong to nothing

    def note(self, what: str, reason: str, worker: str, **more: object) -> None:
        """Counts a refusal."""
        self.count += 1
        said = {"what": what, **more, "reason": m.clean(reason), "worker": worker}
        self._turn.note("refused", **said)

    def tell(
        self,
        conn: bytes,
        reason: str,
        what: str = "frame",
        final: bool = False,
        unread: bool = False,
    ) -> None:
        """Counts a refusal; the sender is told of the first ones."""
        self.note(what, reason, self._worker_of(conn))
        if self.strikes.get(conn, 0) < REFUSALS:
            refuse = m.Refuse(reason=m.clean(reason), final=final, unread=unread)
            self._turn.send(conn, refuse)

    def strike(self, conn: bytes) -> None:
        """A message that belongs to nothing: after many, the connection is hung up on."""
        self.strikes[conn] = self.strikes.get(conn, 0) + 1
        if self.strikes[conn] == STRIKES:
            reason = f"{STRIKES} messages that belong to nothing"
            self._turn.note("hung_up", reason=reason, worker=self._worker_of(conn))
            self._turn.say(Forget(conn, hang_up=True))

"""One event's turn at the server's side: when it is, and what is to be done about it. All parts of
that side share it.
"""

from __future__ import annotations

from fednet.protocol.rules import Instruction, Resolved, Send, Stray
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

    def send(self, conn: bytes, message: m.Message, body: memoryview | None = None) -> None:
        self.say(Send(conn, message, body))

    def call_off(self, conn: bytes, key: Key) -> None:
        """Tells a worker that this task, or its reply, is not wanted any more."""
        self.send(conn, m.Cancel(run=self.run, inc=self.incarnation, key=key))

    def stray(self, reason: str) -> None:
        """The message belongs to nothing that is under way."""
        self._out.insert(0, Stray(reason))

    def unresolve(self) -> None:
        """Who was to be told what became of a client's part has gone on."""
        self._out = [i for i in self._out if not isinstance(i, Resolved)]

    def take(self) -> list[Instruction]:
        """The turn is over."""
        out, self._out = self._out, []
        return out

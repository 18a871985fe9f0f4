"""A payload that crosses in parts, at its two ends: the receiver grants, the sender sends what was
granted, and both know how far it is. And a part that takes long, which is no silence.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fednet.errors import RemoteProtocolError
from fednet.wire.body import Body
from fednet.wire.messages import WINDOW


class Receiving(msgspec.Struct):
    """A payload that comes in parts."""

    size: int
    """Bytes of the payload."""
    part: int
    """Bytes of each of its parts, but the last."""
    got: int = 0
    """Parts that came."""
    granted: int = 0
    """Parts that were asked for."""
    until: int | None = None
    """Bytes after which nothing more is asked for, because the sender is then gone."""

    @property
    def ahead(self) -> int:
        """Parts that were granted and have not come."""
        return self.granted - self.got

    @property
    def whole(self) -> bool:
        return self.got * self.part >= self.size

    @property
    def cut(self) -> bool:
        """Whether all has come that comes before the sender is gone."""
        return self.until is not None and self.got * self.part >= self.until and not self.whole

    def grant(self, most: int = WINDOW) -> tuple[int, int] | None:
        """(the first, how many) of the parts to ask for now; None while enough are on their way."""
        wanted = self.size if self.until is None else min(self.size, self.until)
        count = min(WINDOW - self.ahead, -(-wanted // self.part) - self.granted, most)
        if count <= 0 or self.ahead > WINDOW // 2:
            return None
        first = self.granted
        self.granted = self.granted + count
        return first, count

    def take(self, index: int, body: Body | None) -> int | None:
        """Where in the payload a part that came belongs; None for one that has come already. Raises
        RemoteProtocolError for one that was not awaited: nothing has changed then.
        """
        if index < self.got:
            return None
        length = 0 if body is None else body.size
        start = self.got * self.part
        expected = min(self.part, self.size - start)
        in_turn = body is not None and self.got == index < self.granted
        if not in_turn or length != expected:
            raise RemoteProtocolError(
                f"part {index} of {length} bytes, expected part {self.got} of {expected}"
            )
        self.got += 1
        return start


class Silence(msgspec.Struct):
    """Tells a peer that is silent from one whose message has not come whole yet: over a slow link a
    part takes minutes, and signs of life wait behind it.
    """

    heard: float = -1.0
    """When its last message had come as its bytes were last counted."""
    count: int = 0
    """Bytes that had come of it then."""

    def last_sign(
        self, heard: float, now: float, most: float, bytes_read: Callable[[], int]
    ) -> float | None:
        """Returns when a peer last gave a sign of life: `heard`, when its last message came, or now
        where that is long ago and bytes of a message came since. None where nothing has come for
        more than `most` seconds: no message, and no byte in the second half of the time.
        bytes_read(): of its connection.
        """
        if now - heard <= most / 2:
            return heard
        if self.heard != heard:
            self.heard = heard
            self.count = bytes_read()
        if now - heard <= most:
            return heard
        return now if bytes_read() > self.count else None


class Sending(msgspec.Struct):
    """A payload that is sent in parts. sent: so many of them. until: bytes after which nothing more
    is sent, because the receiver is gone.
    """

    body: Body
    part: int
    sent: int = 0
    until: int | None = None

    @property
    def whole(self) -> bool:
        return self.sent * self.part >= self.body.size and not (
            self.until is not None and self.until < self.body.size
        )

    @property
    def cut(self) -> bool:
        return self.until is not None and self.sent * self.part >= self.until

    def beside(self) -> Body | None:
        """What crosses beside the announcement of a short payload; None for an empty one."""
        if not self.body.size:
            return None
        self.sent = 1
        if self.until is None:
            return self.body
        return self.body.slice(0, self.until)

    def pulled(self, first: int, count: int) -> list[tuple[int, Body]] | None:
        """(index, bytes) of each part that the receiver asks for; None if it had these already.
        Raises RemoteProtocolError for what it may not ask for.
        """
        if first + count <= self.sent:
            return None
        parts = self.body.parts(self.part)
        if first != self.sent or first + count > parts or count > WINDOW:
            raise RemoteProtocolError(
                f"pull of parts {first} to {first + count - 1}; {self.sent} of {parts} were sent"
            )
        self.sent += count
        end = self.body.size if self.until is None else self.until
        found = []
        for index in range(first, self.sent):
            data = self.body.slice(index * self.part, min((index + 1) * self.part, end))
            if data.size:
                found.append((index, data))
        return found

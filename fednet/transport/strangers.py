"""Which connections to hang up on that have not proved anything yet: those in their handshake with
CURVE, and those that have not brought one whole message without it.

libzmq gives a peer the memory of the frame that it announces, up to `MAXMSGSIZE`, before it has
proved any key: measured, a thousand such peers of a server with CURVE took a gigabyte of it in
their handshakes. So what all of them together have sent is bounded. An honest peer is done with its
handshake and its join in moments: the oldest go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

LOOK_S = 0.02
"""How often to look while there are any: there is no event for bytes that are no message yet."""

MAX_STRANGERS = 2048
"""Connections of that kind, at a time; fewer where the process may not open so many descriptors."""

MAX_FIRST_BYTES = 384 * 2**10
"""Of one: handshake and join. A join is one header, see `wire.messages.MAX_HEADER`, with a frame of
CURVE around it."""

MAX_ALL_BYTES = 32 * 2**20
"""Of all of them."""

Link = TypeVar("Link")


def unwelcome(
    strangers: Iterable[tuple[Link, int]], most: int = MAX_STRANGERS
) -> Iterator[tuple[Link, str]]:
    """strangers: (connection, bytes it has sent), the oldest first. Yields those to be hung up on,
    and why.
    """
    left = []
    for link, sent in strangers:
        if sent > MAX_FIRST_BYTES:
            yield link, f"more than {MAX_FIRST_BYTES} bytes before a first message"
        else:
            left.append((link, sent))
    total, many = sum(sent for _, sent in left), len(left)
    for link, sent in left:
        if many <= most and total <= MAX_ALL_BYTES:
            return
        yield (
            link,
            f"more than {most} connections, or {MAX_ALL_BYTES} bytes, that are no message yet",
        )
        many, total = many - 1, total - sent

"""What a transport is: it moves frames between one server and its clients, and tells when a
connection comes or goes.

A message is one or two frames: a small header, and perhaps a body. Both ends are driven by one
thread that calls `poll` and `send`; only `wake` may be called from another. Nothing here blocks but
`poll`, for as long as it is told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

Frame = bytes | memoryview
Frames = Sequence[Frame]

MAX_FRAMES = 2
"""Frames a message may have."""

MAX_FRAME_BYTES = 2**22 + 2**16
"""Bytes a frame may have: a part of 4 MiB, with room for what encryption or a header adds."""

LOOKS = 80
"""A look at all connections, or all clients, takes no more than one part in so many of the time."""


def pause(every_s: float, began: float) -> float:
    """Seconds to the next such look, after one that began at that `time.thread_time()`: the more
    there are to look at, the more seldom it is taken. What it waited for, such as a disk, is no
    looking.
    """
    return max(every_s, LOOKS * (time.thread_time() - began))


def reached_at(address: str, host: str) -> str:
    """Where a server is reached that listens at `address`, on the machine `host`."""
    for anywhere in ("0.0.0.0", "[::]"):
        address = address.replace(f"//{anywhere}:", f"//{host}:")
    return address


class Received(msgspec.Struct, frozen=True):
    """A whole message, with frames that are the receiver's to keep, not to write to.

    user: the peer's CURVE public key (Z85), where one was proved.
    """

    conn: bytes
    frames: tuple[Frame, ...]
    user: str | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A client: the connection stands, now or again. A server: just before the first message of
    `conn`.
    """

    conn: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection behind `conn` is gone, and what was still queued for it with it; `conn` does
    not come back.

    Messages that had arrived come before it. Should one still follow, which the threads behind a
    socket cannot quite exclude, a second `Closed` follows that.

    received: bytes that came in over the connection, as the kernel counted them; None where it does
    not say. why: the reason, where this side ended it: "key expired", "key revoked".
    """

    conn: bytes
    received: int | None = field(default=None, compare=False)
    why: str = field(default="", compare=False)


Event = Received | Opened | Closed


class ServerTransport(Protocol):
    @property
    def address(self) -> str:
        """The address that was bound: `tcp://127.0.0.1:41233` where port 0 was asked for."""
        ...

    def poll(self, timeout_s: float | None) -> list[Event]:
        """All that is ready; waits up to `timeout_s` (None: for ever) for a first event. Empty
        after it, or a wake.
        """
        ...

    def send(self, conn: bytes, frames: Frames) -> bool:
        """Queue a message; never blocks. False if `conn` is unknown or gone. The frames must not
        change afterwards.
        """
        ...

    def wake(self) -> None:
        """Make `poll`, running or next, return. From any thread."""
        ...

    def hang_up(self, conn: bytes) -> None:
        """End the connection, as the network might: what is queued or on its way is lost, and
        `Closed` follows.
        """
        ...

    def peer(self, conn: bytes) -> str:
        """The address at the other end, HOST:PORT."""
        ...

    def bytes_read(self, conn: bytes) -> int:
        """Bytes that have been read of the connection so far, with those of a message that is not
        whole yet; 0 where no kernel is involved.
        """
        ...

    def vouch(self, conn: bytes) -> None:
        """The client behind `conn` has joined: if there are too many connections, others are hung
        up on.
        """
        ...

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        """(sent, received) bytes of every connection so far, as the kernel counted them: by `conn`,
        or by a serial number from 1 before its first message; under 0 the sum of those that have
        ended before `close`. Empty if no kernel is involved.
        """
        ...

    def close(self, linger_s: float = 1.0) -> None:
        """Close, giving what is queued `linger_s` to leave. A second call does nothing."""
        ...


class ClientTransport(Protocol):
    """Events carry `conn=b""`: there is one server."""

    @property
    def address(self) -> str:
        """Where the server is."""
        ...

    @property
    def trouble(self) -> str:
        """Why no connection stands, as far as that is known; else ""."""
        ...

    def poll(self, timeout_s: float | None) -> list[Event]: ...

    def send(self, frames: Frames) -> bool:
        """Queue a message; False, and nothing is kept, while there is no connection."""
        ...

    def wake(self) -> None: ...

    def reconnect(self, address: str | None = None) -> None:
        """Leave the connection, if one stands (`Closed` follows), and connect again: to `address`,
        or where it was.
        """
        ...

    def bytes_read(self) -> int:
        """Of the connection that there is, see `ServerTransport.bytes_read`."""
        ...

    def traffic(self) -> dict[bytes | int, tuple[int, int]]: ...

    def close(self, linger_s: float = 1.0) -> None: ...

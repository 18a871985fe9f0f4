"""What ZMTP 3.1 adds to a message on TCP, to the byte.

Measured against the kernel's own count of each connection; the tests do so again with whatever
libzmq is installed.
"""

from __future__ import annotations

import functools
from typing import Literal

CURVE_FRAME_BYTES = 33
"""The MESSAGE command around an encrypted frame: its name (8), a nonce (8), a tag (16), the flags
(1)."""

GREETING_BYTES = 64
READY_BYTES = 2 + 6 + 22 + 13
"""Header, "\\x05READY", Socket-Type (DEALER and ROUTER are of one length), an empty Identity."""

HELLO_BYTES = 2 + 200
WELCOME_BYTES = 2 + 168
INITIATE_BYTES = 9 + 9 + 96 + 8 + 16 + 128 + 22 + 13
"""Header, "\\x08INITIATE", cookie, nonce, tag, vouch with the client's key, and the properties as
in READY."""

CURVE_READY_BYTES = 2 + 6 + 8 + 16 + 22 + 13


@functools.lru_cache(1024)  # the messages of a round have few sizes
def framing(*sizes: int, curve: bool = False) -> int:
    """All bytes that frames of these sizes take on TCP: each itself, a byte of flags and its
    length, one byte up to 255, eight above.
    """
    total = 0
    for size in sizes:
        inner = size + CURVE_FRAME_BYTES if curve else size
        total += inner + 2 if inner <= 255 else inner + 9
    return total


def connection_bytes(curve: bool, role: Literal["server", "client"]) -> tuple[int, int]:
    """(sent, received) by `role` before the first message of a connection: greeting and
    handshake.
    """
    if curve:
        client = GREETING_BYTES + HELLO_BYTES + INITIATE_BYTES
        server = GREETING_BYTES + WELCOME_BYTES + CURVE_READY_BYTES
    else:
        client = server = GREETING_BYTES + READY_BYTES
    return (client, server) if role == "client" else (server, client)

"""The kernel's view of a connection that libzmq owns: its byte counts, and a way to end it.

libzmq tells the descriptor of a connection but offers neither. A duplicate of the descriptor gives
both, and outlives libzmq's own long enough to read the last counts. It also keeps the connection
open, so it is closed as soon as libzmq reports the end of its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

# struct tcp_info of linux/tcp.h, in native order; fields are only ever added at the end.
_ACKED_AND_RECEIVED = struct.Struct("=QQ")
_ACKED_AT = 120
_SENT_AND_RETRANSMITTED = struct.Struct("=QQ")
_SENT_AT = 200
_PEER_HAS_ENDED = frozenset({6, 8, 9, 11})
"""TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING: a FIN has come in, which the kernel numbers, and
counts, like a byte."""


class Tap:
    """A second handle on the connection with descriptor `fd`. Raises OSError if that is no open
    socket.
    """

    def __init__(self, fd: int) -> None:
        duplicate = os.dup(fd)
        try:
            self._socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self._last: tuple[int, int] | None = None

    def peer(self) -> str:
        try:
            name = self._socket.getpeername()
        except OSError:
            return "unknown"
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "local"

    def bytes(self) -> tuple[int, int] | None:
        """(sent, received) so far, each byte counted once however often it was sent; None if it is
        not TCP on Linux.
        """
        with contextlib.suppress(OSError, AttributeError, struct.error):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            acked, received = _ACKED_AND_RECEIVED.unpack_from(info, _ACKED_AT)
            if len(info) >= _SENT_AT + _SENT_AND_RETRANSMITTED.size:
                # Not `acked`: it lags by a delayed acknowledgement, and counts the SYN on the side
                # that connects.
                sent, again = _SENT_AND_RETRANSMITTED.unpack_from(info, _SENT_AT)
                acked = sent - again
            self._last = (acked, received - (info[0] in _PEER_HAS_ENDED))
        return self._last

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> tuple[int, int] | None:
        """Let go of the connection; returns its last counts."""
        last = self.bytes()
        self._socket.close()
        return last

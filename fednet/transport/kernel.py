"""The kernel's view of a connection that libzmq owns: its byte counts, and a way to end it.

libzmq tells the descriptor of a connection but offers neither. The descriptor is looked at where it
is, as long as it is that connection's; a duplicate, for connections that are worth a second
descriptor, outlives libzmq's own long enough to read the last counts. It also keeps the connection
open, so it is closed as soon as libzmq reports the end of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import sys
import termios

SILENT_S = 60
"""For how long a peer that says nothing is kept waiting by the kernel alone."""

# struct tcp_info of linux/tcp.h, in native order; fields are only ever added at the end.
_STATE_RECEIVED_SENT_RETRANSMITTED = struct.Struct("=B127xQ64xQQ")
_PEER_HAS_ENDED = frozenset({6, 8, 9, 11})
"""TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING: a FIN has come in, which the kernel numbers, and
counts, like a byte."""

_ESTABLISHED = 1
_CLOSED = 7


def await_words(listening: int) -> None:
    """A connection to the socket with that descriptor is one only once its peer has said something,
    as every peer of ours does at once: who says nothing takes no descriptor, for so long.
    """
    borrowed = socket.socket(fileno=listening)
    try:
        borrowed.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_S)
    finally:
        borrowed.detach()


class KernelSocket:
    """What the kernel knows of the TCP connection with descriptor `fd`. Raises OSError if that is
    no open socket.

    Until `keep`, the descriptor is libzmq's: it may be closed, and another file's, at any time.
    """

    def __init__(self, fd: int) -> None:
        self.kept = True
        self.over = False  # the peer had ended it, as of the last look at its counts
        self._fin = False  # ... by a FIN
        self._last: tuple[int, int] | None = None
        self._inode = os.fstat(fd).st_ino  # a socket's own, whatever descriptors it has
        self._socket = socket.socket(fileno=fd)
        self.kept = False

    def __del__(self) -> None:
        if not self.kept:
            self._socket.detach()  # else its end would close libzmq's descriptor

    def keep(self) -> None:
        """Takes a descriptor of its own. Raises OSError where there is none left."""
        duplicate = os.dup(self._socket.fileno())
        if os.fstat(duplicate).st_ino != self._inode:
            os.close(duplicate)
            raise OSError("the connection has ended")
        self._socket.detach()
        self._socket = socket.socket(fileno=duplicate)
        self.kept = True

    def peer(self) -> str:
        try:
            name = self._socket.getpeername()
        except OSError:
            return "unknown"
        return f"{name[0]}:{name[1]}"

    def bytes(self) -> tuple[int, int] | None:
        """(sent, received) so far, each byte counted once however often it was sent; None if it
        ended before the first look, or the kernel does not count these (Linux before 4.19).
        """
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            # Not the bytes that were acknowledged: they lag by a delayed acknowledgement, and count
            # the SYN on the side that connects.
            state, received, sent, again = _STATE_RECEIVED_SENT_RETRANSMITTED.unpack_from(info)
            if state != _ESTABLISHED:
                if state == _CLOSED and not self._fin:
                    # A connection that a reset has closed had seen a FIN before where Linux keeps
                    # EPIPE for it (tcp_reset), in place of ECONNRESET; what libzmq has taken is not
                    # told.
                    error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    self._fin = error == errno.EPIPE
                self._fin = self._fin or state in _PEER_HAS_ENDED
                self.over = self._fin or state == _CLOSED
            self._last = (sent - again, received - self._fin)
        except (OSError, struct.error):
            pass  # it has ended: the last counts are kept
        return self._last

    def bytes_read(self) -> int:
        """Returns the bytes that have come and do not wait in the kernel any more: a libzmq that
        reads no further takes none. 0 where the kernel does not count.
        """
        counts = self.bytes()
        if counts is None:
            return 0
        try:
            waiting = fcntl.ioctl(self._socket, termios.FIONREAD, bytes(4))
        except OSError:  # it has ended
            return counts[1]
        return counts[1] - int.from_bytes(waiting, sys.byteorder)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended by itself
            if self._still():
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> tuple[int, int] | None:
        """Let go of the connection; returns its last counts, as far as they are known."""
        if self.kept:
            last = self.bytes()
            self._socket.close()
            return last
        with contextlib.suppress(OSError):
            if self._still():
                self.bytes()
        self._socket.detach()
        return self._last

    def _still(self) -> bool:
        """Whether the descriptor is still this connection's."""
        return self.kept or os.fstat(self._socket.fileno()).st_ino == self._inode

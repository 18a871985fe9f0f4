"""A client's attempts to connect: what becomes of them, and by which family of addresses the next
one is.
"""

from __future__ import annotations

import time

import zmq

from fednet.transport.zeromq.sockets import is_named

RETRY_MS, RETRY_MAX_MS = 100, 2000  # between two attempts: the first time, and at most


class Attempts:
    """What has become of attempts to connect to `address`, by what libzmq tells of each. It names
    no cause: one that was begun and closed was turned down, and of one that never began the host's
    name had led nowhere.

    libzmq looks a name up for the one or the other family and takes the first address: after an
    attempt in vain the next one, with a socket of its own, is with the other. (A name without IPv6
    has its IPv4 address for both.)
    """

    def __init__(self, address: str) -> None:
        self.six, self.pause_ms = "[" in address, RETRY_MS  # of the next socket
        self.switch_at: float | None = None  # when it takes the place of this one
        self._named = is_named(address)
        self._verdict = ""  # on the last one
        self._begun = self._closed = False

    def begin(self) -> None:
        """There is a new socket."""
        if self.switch_at is not None and time.monotonic() >= self.switch_at:
            self.six = not self.six
        self.switch_at, self._begun, self._closed = None, False, False

    def tells(self, event: int, value: int) -> bool:
        """Whether the event was an attempt's. value: of a retry, in how many milliseconds it is."""
        if event == zmq.EVENT_CONNECT_DELAYED:
            self._begun = True
        elif event == zmq.EVENT_CLOSED:
            self._closed = True
        elif event == zmq.EVENT_CONNECT_RETRIED:
            if self._closed:
                self._verdict = "nothing listens there, or the way there is closed"
            elif not self._begun:
                self._verdict = "no such host is known here"
            if self._verdict and self._named and self.switch_at is None:
                self.pause_ms = min(2 * value, RETRY_MAX_MS)
                self.switch_at = time.monotonic() + value / 1000
            self._begun = self._closed = False
        elif event == zmq.EVENT_CONNECTED:
            self._begun, self._verdict = True, ""  # the handshake's answer is still to come
            self.switch_at, self.pause_ms = None, RETRY_MS
            return False
        else:
            return False
        return True

    @property
    def trouble(self) -> str:
        return "no answer so far" if self._begun and not self._closed else self._verdict

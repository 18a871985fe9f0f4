"""A client's end of ZeroMQ: a DEALER.

libzmq keeps what a DEALER sent to a connection that ended and delivers it to the next; `IMMEDIATE`
forbids that, but also throws away what had arrived and was not read yet, such as a server's last
message: here each connection has a DEALER of its own.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
import time
from collections import deque

import zmq

from fednet.errors import ConfigError
from fednet.transport.base import Closed, Event, Frames, Opened, Received
from fednet.transport.kernel import KernelSocket
from fednet.transport.keys import KeyPair
from fednet.transport.zeromq.sockets import (
    Refused,
    Waker,
    check_address,
    close_all,
    common_options,
    monitor_events,
    monitor_of,
    ms,
    owned_frame,
    receive,
    send,
    why,
)

log = logging.getLogger(__name__)

RETRY_MS = 100  # between the first two attempts
RETRY_MAX_MS = 2000  # at most, between two attempts

REFUSED_RETRY_S = 2.0
"""After a failed handshake libzmq may give up; we try again this much later: the key may be allowed
by then."""

FAILED: dict[int, str] = {  # events, and the reason for each; "": libzmq gives none
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not allow this key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the handshake failed: only one of the two uses keys "
    "(--keys), or no fednet server listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "",
}

TELL_ENDED = 3
"""A server that has another key than we were given ends each connection in its handshake, and gives
no reason. One that merely ended does so once."""


class ZmqClient:
    """A DEALER that connects to `address`, and again whenever the connection ends, every 0.1 s up
    to 2 s. A host's name is looked up as an IPv4 address.

    With `keys`, CURVE; `keys.server` must be known. Raises ConfigError if the address is none, or
    the server's key is missing.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: KeyPair | None = None,
        on_refused: Refused | None = None,
    ) -> None:
        if keys is not None and keys.server is None:
            raise ConfigError(
                f"the server's public key is needed to connect to {address}: it is in "
                f"server.json, "
                f"and `fednet keys server` printed it."
            )
        check_address(address)
        self.address = address
        self._keys = keys
        self._on_refused = on_refused
        self._waker = Waker()
        self._context = zmq.Context()
        self._sockets = itertools.count(1)
        self._past: dict[bytes | int, tuple[int, int]] = {}
        self._serial = itertools.count(1)
        self._kernel: tuple[int, KernelSocket] | None = None  # the connection and its serial
        self._queue: deque[Frames] = deque()
        self._open = False
        self._refusal = ""  # why the server refused the last handshake
        self._received: int | None = None  # bytes of the connection that ended last
        self._left = False  # `reconnect` left a standing connection, not reported yet
        self._retry_at: float | None = None
        self._ended_early = 0  # connections in a row that ended in their handshake
        self._closed = False
        try:
            self._connect()
        except ConfigError:
            self.close(0)
            raise

    def poll(self, timeout_s: float | None) -> list[Event]:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        while True:
            left = wait = until - time.monotonic()
            if self._left:
                wait = 0.0
            elif self._retry_at is not None:
                wait = min(left, self._retry_at - time.monotonic())
            self._poller.modify(self._dealer, zmq.POLLIN | (zmq.POLLOUT if self._queue else 0))
            ready = dict(self._poller.poll(ms(wait)))
            if self._left:
                self._left = False
                events.append(Closed(b"", self._received))
            if self._retry_at is not None and time.monotonic() >= self._retry_at:
                self._connect_again()
            else:
                changes = self._read_monitor() if self._monitor in ready else []
                if changes and isinstance(changes[0], Opened):
                    events.append(changes[0])
                if self._dealer in ready or changes:
                    self._read_messages(events)
                if changes and isinstance(changes[-1], Closed):
                    events.append(changes[-1])
                    self._connect_again()
                self._flush()
            woken = self._waker.fd in ready and self._waker.clear()
            if events or woken or left <= 0:
                return events

    def send(self, frames: Frames) -> bool:
        if not self._open:
            return False
        self._queue.append(frames)
        self._flush()
        return True

    def wake(self) -> None:
        self._waker.wake()

    @property
    def trouble(self) -> str:
        """Why there is no connection; it is tried, for a second at most."""
        if self._open:
            return ""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except socket.gaierror:
            return "the host name is unknown"
        except ConnectionRefusedError:
            return "nothing is listening there, or a firewall blocks it"
        except OSError:
            pass
        return self._refusal or "no answer so far"

    def reconnect(self, address: str | None = None) -> None:
        self._left = self._left or self._open
        self.address = address or self.address
        self._ended_early = 0
        self._refusal = ""
        self._connect_again()

    def bytes_read(self) -> int:
        return 0 if self._kernel is None else self._kernel[1].bytes_read()

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        now = dict(self._past)
        if self._kernel is not None:
            serial, kernel = self._kernel
            counts = kernel.bytes()
            if counts is not None:
                now[serial] = counts
        return now

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + linger_s
        while self._open and self._queue and time.monotonic() < until:
            self._dealer.poll(ms(until - time.monotonic()), zmq.POLLOUT)
            self._flush()
            self._read_monitor()
        close_all(self._context, self._dealer, [self._monitor], max(0.0, until - time.monotonic()))
        self._read_last_counts()
        self._waker.close()

    # -- connecting --------------------------------------------------------------------------------
    def _connect(self) -> None:
        """A new socket, with nothing of the connection before. libzmq tries until it is
        connected.
        """
        dealer = self._context.socket(zmq.DEALER)
        common_options(dealer, "[" in self.address)
        dealer.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RETRY_MAX_MS)
        if self._keys is not None:
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
            dealer.curve_serverkey = (self._keys.server or "").encode()
        self._dealer = dealer
        self._monitor = monitor_of(self._context, dealer, next(self._sockets))
        self._poller = zmq.Poller()
        for source in (self._monitor, self._waker.fd, dealer):
            self._poller.register(source, zmq.POLLIN)
        self._open = False
        self._retry_at = None
        try:
            dealer.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {self.address!r}: {why(error)}.") from None

    def _connect_again(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)
        self._read_last_counts()
        self._queue.clear()
        self._connect()

    def _read_last_counts(self) -> None:
        self._received = None
        if self._kernel is not None:
            serial, kernel = self._kernel
            counts = kernel.close()
            if counts is not None:
                self._past[serial] = counts
                self._received = counts[1]
            self._kernel = None

    # -- reading and writing -----------------------------------------------------------------------
    def _read_messages(self, events: list[Event]) -> None:
        while True:  # a server sends what was asked for: there is no flood to break off
            try:
                body = receive(self._dealer)
            except zmq.Again:
                return
            events.append(Received(b"", tuple(map(owned_frame, body))))

    def _read_monitor(self) -> list[Event]:
        """Whether the connection of this socket was opened and closed. Nothing is read after its
        end: libzmq might have begun another since.
        """
        changes: list[Event] = []
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_CONNECTED:
                self._read_last_counts()
                serial = next(self._serial)
                try:
                    kernel = KernelSocket(value)
                    kernel.keep()
                    self._kernel = serial, kernel
                except OSError:
                    log.debug("connection %d ended at once", serial)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._open = True
                self._retry_at = None
                self._ended_early = 0
                self._refusal = ""
                changes.append(Opened(b""))
            elif event == zmq.EVENT_DISCONNECTED:
                self._read_last_counts()
                if self._open:
                    self._open = False
                    changes.append(Closed(b"", self._received))
                    break
            elif event in FAILED:
                self._retry_at = time.monotonic() + REFUSED_RETRY_S
                reason = FAILED[event]
                if reason:
                    self._refuse(reason)
                    continue
                self._ended_early += 1
                if self._ended_early == TELL_ENDED:
                    # Where just one has CURVE, either side may be the first to notice.
                    self._refuse(
                        "the server ends each connection in its handshake: this client trusts "
                        "another server's key, or only one of the two uses keys (--keys), or no "
                        "fednet server listens there, or something on the way ends the connections"
                    )
        return changes

    def _flush(self) -> None:
        while self._queue:
            try:
                send(self._dealer, self._queue[0])
            except zmq.Again:
                return
            self._queue.popleft()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        level = logging.WARNING if self._on_refused is None else logging.INFO
        log.log(level, "refused: %s (%s)", reason, self.address)
        if self._on_refused is not None:
            self._on_refused(reason, self.address)

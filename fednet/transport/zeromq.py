"""Frames over ZeroMQ: a ROUTER at the server, a DEALER at each client. The only file that imports zmq.

What libzmq leaves out is made up for here. It reports closed connections by descriptor and messages by routing id:
the descriptor that each message carries joins the two. It drops what is for an unknown peer, and with
`ROUTER_MANDATORY` blocks on a full one: messages wait in queues of our own. It keeps what a DEALER sent to a
connection that ended and delivers it to the next; `IMMEDIATE` forbids that, but also throws away what had arrived and
was not read yet, such as a server's last words: here each connection has a DEALER of its own. Its heartbeats are
bytes that no ledger sees: they stay off.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.z85

from fednet.errors import ConfigError
from fednet.transport import strangers
from fednet.transport.base import MAX_FRAME_BYTES, MAX_FRAMES, Closed, Event, Frame, Frames, Opened, Received
from fednet.transport.framing import framing
from fednet.transport.kernel import Tap
from fednet.transport.keys import KeyPair, Keyring

log = logging.getLogger(__name__)

Refused = Callable[[str, str], None]
"""Told the reason for which a connection or message was refused, and the peer's address where known."""

SEND_MESSAGES, RECEIVE_MESSAGES = 64, 16
"""High-water marks, in whole messages, of each connection. Beyond them our own queue, or TCP, holds the rest."""

MAX_UNFINISHED_BYTES = 64 * 2**20
"""libzmq keeps the frames of a message until its last one has come, however many: `MAXMSGSIZE` and high-water marks
do not bound it. Whoever has sent so much more than its finished messages amount to is hung up on; what TCP and libzmq
hold of honest ones is far less. Without this one stranger can fill the memory of a server that has no CURVE."""

WATCH_S = 0.25
"""How often a server looks for such. There is no event for it: nothing arrives."""

TELL, TELL_S = 20, 10.0
"""At most so many refusals are told in so many seconds; `refusals` counts all. Else strangers could fill the disk with
lines about themselves."""

COPY_BELOW_BYTES = 65536
"""A frame received smaller than this is copied out: cheaper than keeping libzmq's buffer alive."""

BATCH = 512
"""Messages read in one `poll`, so that a flood cannot keep it from returning."""

BLOCKED_RETRY_S = 0.01
"""libzmq has no event for "this one peer of a ROUTER is writable again". Only while a peer does not read, `poll` wakes
this often to try."""

REFUSED_RETRY_S = 2.0
"""After a failed handshake libzmq may give up; we try again this much later: the key may be allowed by then."""

TELL_ENDED = 3
"""A server that has another key than we were given ends each connection in its handshake, and gives no reason. One that
merely ended does so once."""

_MONITORED = (zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
              | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
              | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_MONITOR_EVENT = struct.Struct("=Hi")
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


def new_curve_pair() -> tuple[str, str]:
    """A new (public, secret) pair, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class ZmqServer:
    """A ROUTER bound to `address`: tcp://127.0.0.1:5555, tcp://*:0 for any free port, ipc://PATH.

    With a `keyring`, CURVE: a key that it does not allow never completes the handshake, and `Received.user` is the key
    that was proved. Raises ConfigError if the address cannot be bound. `refusals` counts what was refused, by reason.
    """

    def __init__(self, address: str, *, keyring: Keyring | None = None, max_connections: int = 4096,
                 max_unfinished_bytes: int = MAX_UNFINISHED_BYTES, on_refused: Refused | None = None) -> None:
        self.refusals: Counter[str] = Counter()
        self._told, self._told_at = 0, -TELL_S
        self._keyring = keyring
        self._keyring_version = 0 if keyring is None else keyring.version
        self._max_connections = max_connections
        self._max_unfinished = max_unfinished_bytes
        self._watch_at = self._look_at = 0.0
        self._on_refused = on_refused
        self._context = zmq.Context()
        self._zap: zmq.Socket[bytes] | None = None
        router = self._context.socket(zmq.ROUTER)
        try:
            _common_options(router, address)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.BACKLOG, 1024)
            if keyring is not None:
                # Bound before the ROUTER is: a connection that found no handler would be let in unasked.
                self._zap = self._context.socket(zmq.REP)
                self._zap.bind(_ZAP_ADDRESS)
                router.setsockopt(zmq.ZAP_DOMAIN, b"fednet")
                router.curve_server = 1
                router.curve_secretkey = keyring.pair.secret.encode()
            self._monitor = _monitor(self._context, router)
            router.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {address!r}: {_why(error)}.") from None
        self._router = router
        self.address = router.get_string(zmq.LAST_ENDPOINT)
        self._waker = _Waker()
        self._poller = zmq.Poller()
        for source in (router, self._monitor, self._waker.fd, *([self._zap] if self._zap else [])):
            self._poller.register(source, zmq.POLLIN)
        self._serial = itertools.count(1)
        self._links: dict[int, _Link] = {}  # by descriptor: connections that stand
        self._strangers: dict[int, _Link] = {}  # by serial: of these, the ones that have not spoken
        self._conns: dict[bytes, _Link] = {}  # by routing id: connections that have spoken
        self._ended: list[_Link] = []  # the network closed them; what they had sent may still be unread
        self._blocked: dict[bytes, _Link] = {}  # those whose peer does not read fast enough
        self._past: dict[bytes | int, tuple[int, int]] = {}
        self._closed = False

    def poll(self, timeout_s: float | None) -> list[Event]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        while True:
            left = _left(until)
            last = left == 0
            if self._ended:
                left = 0.0  # there may be words of theirs to read, and their ends to tell
            elif self._links:
                soon = BLOCKED_RETRY_S if self._blocked else strangers.LOOK_S if self._strangers else WATCH_S
                left = soon if left is None else min(left, soon)
            ready = {source for source, _ in self._poller.poll(_ms(left))}
            self._pump(ready, events)
            woken = self._waker.fd in ready and self._waker.clear()
            if events or woken or last:
                return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        link = self._conns.get(conn)
        if link is None or not 1 <= len(frames) <= MAX_FRAMES:
            return False
        if not link.queue:
            sent = self._try(conn, frames)
            if sent is not None:
                return sent
            self._blocked[conn] = link
        link.queue.append(frames)
        return True

    def wake(self) -> None:
        self._waker.wake()

    def drop(self, conn: bytes, hang_up: bool = False) -> None:
        """libzmq cannot close one peer of a socket, nor take back what it has; `hang_up` goes by the kernel."""
        self._blocked.pop(conn, None)
        link = self._conns.get(conn)
        if link is not None:
            link.queue.clear()
            if hang_up and link.tap is not None:
                link.tap.hang_up()

    def peer(self, conn: bytes) -> str:
        """The address at the other end of `conn`, for logs."""
        link = self._conns.get(conn)
        return link.tap.peer() if link is not None and link.tap is not None else "unknown"

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        now = dict(self._past)
        for link in (*self._links.values(), *self._ended):
            counts = link.tap.bytes() if link.tap is not None else None
            if counts is not None:
                now[link.conn or link.serial] = counts
        return now

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + linger_s
        while self._blocked and time.monotonic() < until:
            self._retry()
            self._router.poll(_ms(BLOCKED_RETRY_S))
        _close(self._context, self._router, [self._monitor, *([self._zap] if self._zap else [])],
               max(0.0, until - time.monotonic()))
        for link in (*self._links.values(), *self._ended):
            self._let_go(link)
        self._links.clear()
        self._conns.clear()
        self._ended.clear()
        self._blocked.clear()
        self._waker.close()

    def _pump(self, ready: set[Any], events: list[Event]) -> None:
        """Everything that can be done now, without waiting."""
        if self._zap in ready:
            self._serve_zap()
        self._hang_up_on_revoked()
        if self._monitor in ready:
            self._read_monitor()
        ended = len(self._ended)
        if (self._router in ready or ended) and self._read_messages(events):
            # All that these had sent before they ended has been read now.
            for link in self._ended[:ended]:
                self._end(link, events)
            del self._ended[:ended]
        if self._blocked:
            self._retry()
        if time.monotonic() >= self._watch_at:
            self._watch_at = time.monotonic() + WATCH_S
            self._hang_up_on_endless()
        if self._strangers and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + strangers.LOOK_S
            self._hang_up_on_strangers()

    def _read_messages(self, events: list[Event]) -> bool:
        """Whether all that was there was read."""
        for _ in range(BATCH):
            try:
                conn_frame, *body = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            conn = conn_frame.bytes
            if not 1 <= len(body) <= MAX_FRAMES:
                self._refuse("frames", f"a message of {len(body)} frames, where 1 to {MAX_FRAMES} are allowed", conn)
            elif len(conn) != 5 or conn[0] != 0:
                # libzmq's own are a zero byte and a running number. Whoever brings one might bring another's.
                self._refuse("identity", "a routing id of the peer's own choice", conn)
            else:
                user = _user(body[0]) if self._keyring is not None else None
                stands = conn in self._conns
                if not stands:
                    fd = _descriptor(body[0])
                    if fd is None:
                        self._refuse("version", "a peer of a ZMTP before 3, whose connection cannot be told", conn)
                        continue
                    stands = self._meet(conn, user, fd, events)
                events.append(Received(conn, tuple(map(_frame, body)), user))
                if not stands:
                    events.append(Closed(conn))
            if conn in self._conns:
                curve = self._keyring is not None
                self._conns[conn].received += sum(framing(len(frame), curve=curve) for frame in body)
        return False

    def _meet(self, conn: bytes, user: str | None, fd: int, events: list[Event]) -> bool:
        """Join a routing id seen for the first time to its connection; whether that still stands.

        The kernel gives a closed descriptor to the next connection, so `fd` may have had another owner or have got a
        new one. libzmq reports the end of a connection before it closes the descriptor, and routing ids count upwards:
        the two decide.
        """
        self._read_monitor()
        events.append(Opened(conn))
        link = self._links.get(fd)
        if link is None:
            return False
        if link.conn is not None:
            if not _newer(conn, link.conn):
                return False
            # An older connection's last words were taken for this one's.
            self._conns.pop(link.conn, None)
            self._blocked.pop(link.conn, None)
            events.append(Closed(link.conn))
        link.conn, link.user = conn, user
        self._conns[conn] = link
        self._strangers.pop(link.serial, None)
        return True

    def _read_monitor(self) -> None:
        fresh = []
        for event, value in _monitor_events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                if value in self._links:
                    self._ended.append(self._links.pop(value))
                self._links[value] = met = _Link(next(self._serial))
                self._strangers[met.serial] = met
                fresh.append(value)
            elif event == zmq.EVENT_DISCONNECTED:
                if value in self._links:
                    self._ended.append(self._links.pop(value))
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse("handshake", "a handshake failed: the peer speaks no ZMTP, or only one of the two has "
                             "CURVE, or the peer was given another server's key", None)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refuse("handshake", "a connection ended in its handshake", None)
        for fd in fresh:
            link = self._links.get(fd)
            if link is None:
                continue  # gone already, and its descriptor perhaps someone else's
            try:
                link.tap = Tap(fd)
            except OSError:
                continue
            if len(self._links) > self._max_connections:
                self._refuse("connections", f"more than {self._max_connections} connections", None, link.tap.peer())
                link.tap.hang_up()

    def _serve_zap(self) -> None:
        """Answer who may connect (ZAP, rfc.zeromq.org/spec/27). A connection waits for this in its handshake."""
        while self._zap is not None:
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _version, request_id, _domain, address, _identity, mechanism, *credentials = request
            user = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
            assert self._keyring is not None
            if user and self._keyring.allows(user.decode()):
                self._zap.send_multipart([b"1.0", request_id, b"200", b"OK", user, b""])
            else:
                self._refuse("key", f"the key {user.decode()} is not allowed", None, address.decode())
                self._zap.send_multipart([b"1.0", request_id, b"400", b"key not allowed", b"", b""])

    def _hang_up_on_revoked(self) -> None:
        if self._keyring is None:
            return
        self._keyring.refresh()
        if self._keyring.version == self._keyring_version:
            return
        self._keyring_version = self._keyring.version
        for conn, link in self._conns.items():
            if link.user is not None and not self._keyring.allows(link.user):
                self._refuse("key", f"the key {link.user} was revoked", conn)
                self.drop(conn, hang_up=True)

    def _hang_up_on_strangers(self) -> None:
        seen = []
        for link in self._strangers.values():
            counts = link.tap.bytes() if link.tap is not None else None
            seen.append((link, counts[1] if counts is not None else 0))
        for link, reason in strangers.unwelcome(seen):
            del self._strangers[link.serial]
            if link.tap is not None:
                self._refuse("stranger", reason, None, link.tap.peer())
                link.tap.hang_up()

    def _hang_up_on_endless(self) -> None:
        for link in self._links.values():
            if link.received != link.received_then:
                # It has finished one since, so it is not amid an endless one; and to ask the kernel about a busy
                # connection can take a millisecond.
                link.received_then = link.received
                continue
            counts = link.tap.bytes() if link.tap is not None else None
            if counts is not None and link.tap is not None and counts[1] - link.received > self._max_unfinished:
                self._refuse("endless", f"more than {self._max_unfinished} bytes of no finished message", None,
                             link.tap.peer())
                link.tap.hang_up()

    def _try(self, conn: bytes, frames: Frames) -> bool | None:
        """True: handed to libzmq. False: the peer is gone. None: it has as much as it may have unread."""
        try:
            self._router.send_multipart([conn, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def _retry(self) -> None:
        for conn, link in list(self._blocked.items()):
            while link.queue:
                sent = self._try(conn, link.queue[0])
                if sent is None:
                    break
                if sent:
                    link.queue.popleft()
                else:
                    link.queue.clear()
            if not link.queue:
                del self._blocked[conn]

    def _end(self, link: _Link, events: list[Event]) -> None:
        if link.conn is not None and self._conns.get(link.conn) is link:
            del self._conns[link.conn]
            self._blocked.pop(link.conn, None)
            events.append(Closed(link.conn))
        self._let_go(link)

    def _let_go(self, link: _Link) -> None:
        self._strangers.pop(link.serial, None)
        counts = link.tap.close() if link.tap is not None else None
        link.tap = None
        if counts is not None:
            self._past[link.conn or link.serial] = counts

    def _refuse(self, what: str, reason: str, conn: bytes | None, address: str = "unknown") -> None:
        self.refusals[what] += 1
        now = time.monotonic()
        if now - self._told_at > TELL_S:
            self._told_at, self._told = now, 0
        self._told += 1
        if self._told > TELL:
            return
        if conn is not None:
            address = self.peer(conn)
        log.warning("refused: %s (from %s)", reason, address)
        if self._on_refused is not None:
            self._on_refused(reason, address)


class ZmqClient:
    """A DEALER that connects to `address`, and again whenever the connection ends, every 0.1 s up to 2 s.

    With `keys`, CURVE; `keys.server` must be known. Raises ConfigError if the address is none, or that key is missing.
    """

    def __init__(self, address: str, *, keys: KeyPair | None = None, on_refused: Refused | None = None) -> None:
        if keys is not None and keys.server is None:
            raise ConfigError(f"the server's public key is needed to connect to {address}: it stands in server.json, "
                              f"and `fednet keys server` printed it.")
        self.address = address
        self._keys = keys
        self._on_refused = on_refused
        self._waker = _Waker()
        self._context = zmq.Context()
        self._sockets = itertools.count(1)
        self._past: dict[bytes | int, tuple[int, int]] = {}
        self._serial = itertools.count(1)
        self._links: dict[int, _Link] = {}
        self._queue: deque[Frames] = deque()
        self._open = False
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
        until = None if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        while True:
            left = _left(until)
            last = left == 0
            if self._left:
                left = 0.0
            elif self._retry_at is not None:
                retry = max(0.0, self._retry_at - time.monotonic())
                left = retry if left is None else min(left, retry)
            self._poller.modify(self._dealer, zmq.POLLIN | (zmq.POLLOUT if self._queue else 0))
            ready = {source for source, _ in self._poller.poll(_ms(left))}
            self._pump(ready, events)
            woken = self._waker.fd in ready and self._waker.clear()
            if events or woken or last:
                return events

    def send(self, frames: Frames) -> bool:
        if not self._open or not 1 <= len(frames) <= MAX_FRAMES:
            return False
        if self._queue or not self._try(frames):
            self._queue.append(frames)
        return True

    def wake(self) -> None:
        self._waker.wake()

    def reconnect(self, address: str | None = None) -> None:
        self._left = self._left or self._open
        self._disconnect()
        self.address, self._ended_early = address or self.address, 0
        self._connect()

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        now = dict(self._past)
        for link in self._links.values():
            counts = link.tap.bytes() if link.tap is not None else None
            if counts is not None:
                now[link.serial] = counts
        return now

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + linger_s
        while self._open and self._queue and time.monotonic() < until:
            self._dealer.poll(_ms(until - time.monotonic()), zmq.POLLOUT)
            self._flush()
            self._read_monitor([])
        _close(self._context, self._dealer, [self._monitor], max(0.0, until - time.monotonic()))
        self._let_go()
        self._waker.close()

    def _connect(self) -> None:
        """A new socket: nothing of the connection before is in it. libzmq tries until it is connected."""
        dealer = self._context.socket(zmq.DEALER)
        _common_options(dealer, self.address)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if self._keys is not None:
            dealer.curve_publickey = self._keys.public.encode()
            dealer.curve_secretkey = self._keys.secret.encode()
            dealer.curve_serverkey = (self._keys.server or "").encode()
        self._dealer = dealer
        self._monitor = _monitor(self._context, dealer, next(self._sockets))
        self._poller = zmq.Poller()
        for source in (self._monitor, self._waker.fd):
            self._poller.register(source, zmq.POLLIN)
        self._poller.register(dealer, zmq.POLLIN)
        self._open, self._retry_at = False, None
        try:
            dealer.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {self.address!r}: {_why(error)}.") from None

    def _disconnect(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)
        self._let_go()
        self._queue.clear()

    def _pump(self, ready: set[Any], events: list[Event]) -> None:
        if self._left:
            self._left = False
            events.append(Closed(b""))
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._disconnect()
            self._connect()
            return
        changes: list[Event] = []
        if self._monitor in ready:
            self._read_monitor(changes)
        ended = bool(changes) and isinstance(changes[-1], Closed)
        if changes and isinstance(changes[0], Opened):
            events.append(changes[0])
        if self._dealer in ready or changes:
            self._read_messages(events)
        if ended:
            events.append(Closed(b""))
            self._disconnect()
            self._connect()
        elif self._queue:
            self._flush()

    def _read_messages(self, events: list[Event]) -> None:
        while True:  # a server sends what was asked for: there is no flood to break off
            try:
                body = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if 1 <= len(body) <= MAX_FRAMES:
                events.append(Received(b"", tuple(map(_frame, body))))
            else:
                self._refuse(f"a message of {len(body)} frames, where 1 to {MAX_FRAMES} are allowed")

    def _read_monitor(self, changes: list[Event]) -> None:
        """What has become of this socket's connection, as far as its end: libzmq might have begun another since."""
        for event, value in _monitor_events(self._monitor):
            if event == zmq.EVENT_CONNECTED:
                link = self._links[value] = _Link(next(self._serial))
                try:
                    link.tap = Tap(value)
                except OSError:
                    log.debug("connection %d ended at once", link.serial)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._open, self._retry_at, self._ended_early = True, None, 0
                changes.append(Opened(b""))
            elif event == zmq.EVENT_DISCONNECTED:
                self._let_go()
                if self._open:
                    self._open = False
                    changes.append(Closed(b""))
                    return
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._retry_at = time.monotonic() + REFUSED_RETRY_S
                self._refuse("the server does not allow this key")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._retry_at = time.monotonic() + REFUSED_RETRY_S
                self._refuse("the handshake failed: only one of the two has CURVE, or the server speaks no ZMTP")
            else:
                self._retry_at = time.monotonic() + REFUSED_RETRY_S
                self._ended_early += 1
                if self._ended_early == TELL_ENDED:
                    # Where just one has CURVE, either side may be the first to notice.
                    self._refuse("the server ends each connection in its handshake: its key is not the one given here, or "
                                 "only one of the two has CURVE, or it speaks no ZMTP, or something on the way ends them")

    def _flush(self) -> None:
        while self._queue and self._try(self._queue[0]):
            self._queue.popleft()

    def _try(self, frames: Frames) -> bool:
        try:
            self._dealer.send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def _let_go(self) -> None:
        for link in self._links.values():
            counts = link.tap.close() if link.tap is not None else None
            if counts is not None:
                self._past[link.serial] = counts
        self._links.clear()

    def _refuse(self, reason: str) -> None:
        log.log(logging.WARNING if self._on_refused is None else logging.INFO, "refused: %s (%s)", reason, self.address)
        if self._on_refused is not None:
            self._on_refused(reason, self.address)


class _Link:
    """One TCP connection, from when the kernel has it."""

    __slots__ = ("conn", "queue", "received", "received_then", "serial", "tap", "user")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.conn: bytes | None = None  # known from its first message
        self.user: str | None = None
        self.tap: Tap | None = None
        self.received = self.received_then = 0  # bytes of its finished messages; as of the last look
        self.queue: deque[Frames] = deque()


class _Waker:
    """A pipe that any thread, or a signal handler, can make readable."""

    def __init__(self) -> None:
        self.fd, self._in = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._in, False)

    def wake(self) -> None:
        try:
            os.write(self._in, b"\0")
        except OSError as error:  # full: it will wake anyway. Closed: there is nobody to wake
            if error.errno not in (errno.EAGAIN, errno.EBADF):
                raise

    def clear(self) -> bool:
        """Whether it had been woken."""
        try:
            return bool(os.read(self.fd, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self.fd)
        end, self._in = self._in, -1  # a late `wake` must not write into a descriptor that someone else got
        os.close(end)


def _common_options(socket: zmq.Socket[bytes], address: str) -> None:
    for option, value in {
        zmq.LINGER: 0,  # until `close` says otherwise: an error on the way must not hang the process
        zmq.SNDHWM: SEND_MESSAGES,
        zmq.RCVHWM: RECEIVE_MESSAGES,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.IPV6: int("[" in address),  # tcp://[::1]:5555; else * would become [::]
        zmq.HEARTBEAT_IVL: 0,
        zmq.HANDSHAKE_IVL: 30_000,
        zmq.TCP_KEEPALIVE: 1,  # for the NAT on the way, and a peer that vanished without a word
        zmq.TCP_KEEPALIVE_IDLE: 60,
        zmq.TCP_KEEPALIVE_INTVL: 15,
        zmq.TCP_KEEPALIVE_CNT: 4,
    }.items():
        socket.setsockopt(option, value)


def _monitor(context: zmq.Context[Any], socket: zmq.Socket[bytes], number: int = 0) -> zmq.Socket[bytes]:
    address = f"inproc://monitor-{number}"
    socket.monitor(address, _MONITORED)
    events = context.socket(zmq.PAIR)
    events.setsockopt(zmq.LINGER, 0)
    events.connect(address)
    return events


def _monitor_events(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """(event, value) of what has happened since; the value of a connection's event is its descriptor."""
    events: list[tuple[int, int]] = []
    while True:
        try:
            event, value = _MONITOR_EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
        except zmq.Again:
            return events
        events.append((event, value))


def _close(context: zmq.Context[Any], socket: zmq.Socket[bytes], others: list[zmq.Socket[bytes]],
           linger_s: float) -> None:
    socket.disable_monitor()
    for other in others:
        other.close(linger=0)
    socket.close(linger=int(linger_s * 1000))
    context.term()  # returns when what was queued has left, or the linger is over


def _frame(frame: zmq.Frame) -> Frame:
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer


def _descriptor(frame: zmq.Frame) -> int | None:
    """None where the peer's ZMTP knows no metadata: version 1, which libzmq also takes noise for, and 2."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _user(frame: zmq.Frame) -> str | None:
    try:
        found = frame.get("User-Id")
    except zmq.ZMQError:
        return None
    return found if isinstance(found, str) else None


def _newer(conn: bytes, other: bytes) -> bool:
    """Whether routing id `conn` was given after `other`: both count upwards modulo 2^32."""
    ahead = int.from_bytes(conn[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < ahead % 2**32 < 2**31


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _ms(seconds: float | None) -> int | None:
    """Rounded up: a wait that ends a fraction early would spin through the rest."""
    return None if seconds is None else math.ceil(seconds * 1000)


def _why(error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use by another process; choose another, or port 0 for any free one"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address; tcp://*:PORT listens on all it has"
    if error.errno in (errno.EINVAL, zmq.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO):
        return "expected tcp://HOST:PORT, tcp://*:0 (server) or ipc://PATH"
    return str(error.strerror or error).lower()

"""The server's end of ZeroMQ: a ROUTER, who may connect to it, and its connections.

What libzmq leaves out is added here. It reports closed connections by descriptor and messages by
routing id: the descriptor that each message carries joins the two. It drops what is for an unknown
peer, and with `ROUTER_MANDATORY` blocks on a full one: messages wait in queues of our own. It
bounds neither the connections nor what a peer sends before its first message, nor how long a
message becomes: the server hangs up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import zmq
import zmq.utils.z85

from fednet import descriptors, proc
from fednet.errors import ConfigError
from fednet.transport.base import MAX_FRAMES, Closed, Event, Frames, Opened, Received, pause
from fednet.transport.framing import framing
from fednet.transport.kernel import KernelSocket, await_words
from fednet.transport.keys import Keyring
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
    receive_from,
    send,
    why,
)

log = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = 64 * 2**20
"""libzmq keeps the frames of a message until its last one has come, however many: `MAXMSGSIZE` and
high-water marks do not bound it. A peer that has sent so much more than its finished messages is
hung up on; what TCP and libzmq hold of honest ones is far less. Without this one stranger can fill
the memory of a server that has no CURVE."""

BATCH = 512
"""Messages read in one `poll`, so that a flood cannot keep it from returning."""

BLOCKED_RETRY_S = 0.01
"""libzmq has no event for "this one peer of a ROUTER is writable again". Only while a peer does not
read, `poll` wakes this often to try."""

RESERVED = 256
"""Descriptors kept for files; a quarter of all where there are fewer than four times as many."""

LOOK_S = 0.02
"""How often the bytes of strangers are counted: libzmq has no event before a first message."""

WATCH_S = 0.25
"""How often all connections are checked for messages that never end."""

STALLED_S = 2.0
"""For how long a peer's end may be known to the kernel alone. libzmq 4.3.5 reads no further once a
message could not be decrypted, and never reports the end of that connection; of any other it does
at once."""

MAX_STRANGERS = 2048
"""Strangers at a time; fewer where the process may not open so many descriptors."""

MAX_FIRST_BYTES = 384 * 2**10
"""Bytes of one stranger: handshake and join. A join is one header, see `wire.messages.MAX_HEADER`,
with a frame of CURVE around it."""

MAX_ALL_BYTES = 32 * 2**20
"""Bytes of all strangers. libzmq gives a peer the memory of the frame that it announces, up to
`MAXMSGSIZE`, before it has proved any key: measured, a thousand peers of a server with CURVE took a
gigabyte in their handshakes."""

_ACCESS_ADDRESS = "inproc://zeromq.zap.01"

Peer = TypeVar("Peer")


# -- connections -----------------------------------------------------------------------------------
class Connection:
    """One TCP connection, from when the kernel has it."""

    def __init__(self, serial: int, fd: int) -> None:
        self.serial = serial
        self.fd = fd
        self.conn: bytes | None = None  # known from its first message
        self.user: str | None = None  # the key that it proved
        self.why = ""  # the reason for which this side ended it
        self.owner: str | None = None  # the key or address that it counts for
        self.kernel: KernelSocket | None = None
        self.received = self.received_then = 0  # bytes of finished messages; as of the last look
        self.over_at: float | None = None  # since when its peer is seen to have ended it
        self.queue: deque[Frames] = deque()

    def came(self) -> int:
        """Bytes received so far, as the kernel says; 0 where it does not."""
        counts = self.kernel.bytes() if self.kernel is not None else None
        return counts[1] if counts is not None else 0

    def peer(self) -> str:
        return self.kernel.peer() if self.kernel is not None else "unknown"

    def hang_up(self) -> None:
        if self.kernel is not None:
            self.kernel.hang_up()


def unwelcome(
    strangers: Iterable[tuple[Peer, int]], most: int = MAX_STRANGERS
) -> Iterator[tuple[Peer, str]]:
    """strangers: (connection, bytes it has sent), the oldest first. Yields those to hang up on, and
    why. An honest peer is done with its handshake and its join in moments: the oldest go first.
    """
    left = []
    for link, sent in strangers:
        if sent > MAX_FIRST_BYTES:
            yield link, f"more than {MAX_FIRST_BYTES} bytes before it joined"
        else:
            left.append((link, sent))
    total = sum(sent for _, sent in left)
    many = len(left)
    for link, sent in left:
        if many <= most and total <= MAX_ALL_BYTES:
            return
        yield (
            link,
            f"more than {most} connections, or {MAX_ALL_BYTES} bytes, before they joined",
        )
        many = many - 1
        total = total - sent


# -- the transport ---------------------------------------------------------------------------------
class ZmqServer:
    """A ROUTER bound to `address`: tcp://127.0.0.1:5555, or tcp://*:0 for any free port.

    With a `keyring`, CURVE: a key that it does not allow never completes the handshake, and
    `Received.user` is the key that was proved. max_each: connections of one key or, without CURVE,
    of one address; None: no limit. later: nobody can connect before `listen`; the port is this
    process's from now on. Raises ConfigError if the address cannot be bound.

    A connection is a stranger until `vouch`: until its client has joined. If there are more
    connections than the process may open descriptors, less a reserve, the oldest strangers are
    hung up on.
    """

    def __init__(
        self,
        address: str,
        *,
        keyring: Keyring | None = None,
        max_each: int | None = None,
        on_refused: Refused | None = None,
        later: bool = False,
    ) -> None:
        check_address(address)
        self.keyring = keyring
        self.on_refused = on_refused
        self._closed = False
        limit = descriptors.limit()
        self._room = max(2, limit - proc.descriptors() - min(RESERVED, limit // 4))
        self._max_each = max_each
        self._serial = itertools.count(1)
        self._by_descriptor: dict[int, Connection] = {}  # the open connections
        self._by_routing_id: dict[bytes, Connection] = {}  # those from which a message came
        self._strangers: dict[int, Connection] = {}  # by serial
        self._owned: dict[str, dict[int, Connection]] = {}  # by owner and serial
        self._ended: list[Connection] = []  # what they had sent may still be unread
        self._leaving: set[int] = set()  # serials of closed connections that libzmq still has
        self._blocked: dict[bytes, Connection] = {}  # those whose peer does not read fast enough
        self._kept = 0  # those with a second descriptor
        self._past: dict[bytes | int, tuple[int, int]] = {}
        self._look_at = self._watch_at = 0.0
        self._context = zmq.Context()
        # Where libzmq asks, in each handshake with CURVE, whether that key may connect: ZAP,
        # rfc.zeromq.org/spec/27. Made before the ROUTER is bound: a connection that found no
        # handler would be let in unasked. None where anyone may connect.
        self._access: zmq.Socket[bytes] | None = None
        self._allowed = keyring.version if keyring is not None else 0  # when last looked at
        router = self._context.socket(zmq.ROUTER)
        try:
            common_options(router, "[" in address)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.BACKLOG, 1024)
            if keyring is not None:
                self._access = self._context.socket(zmq.REP)
                self._access.bind(_ACCESS_ADDRESS)
                router.setsockopt(zmq.ZAP_DOMAIN, b"fednet")
                router.curve_server = 1
                router.curve_secretkey = keyring.pair.secret.encode()
            self._monitor = monitor_of(self._context, router)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {address!r}: {why(error)}.") from None
        self._router = router
        self.address = address
        self._held: socket.socket | None = None
        self._waker = Waker()
        self._poller = zmq.Poller()
        for source in (router, self._monitor, self._waker.fd):
            self._poller.register(source, zmq.POLLIN)
        if self._access is not None:
            self._poller.register(self._access, zmq.POLLIN)
        if not later:
            self.listen()
            return
        # Reserves the port: no other process can take it, and no client can connect to it yet.
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        if host == "*":  # every address of this machine, in the form that `reached_at` knows
            host = "0.0.0.0"
        name = host.strip("[]")
        held = socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((name, int(port.replace("*", "0"))))  # 0: any port that is free
        except socket.gaierror:  # an interface, whose name only libzmq knows
            held.close()
            return
        except OSError as error:
            held.close()
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {address!r}: {why(error)}.") from None
        self._held = held
        self.address = f"tcp://{host}:{held.getsockname()[1]}"

    def listen(self) -> None:
        """From now on others can connect. Raises ConfigError if the address cannot be bound."""
        try:
            self._router.bind(self.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {self.address!r}: {why(error)}.") from None
        finally:
            if self._held is not None:
                self._held.close()
                self._held = None
        self.address = self._router.get_string(zmq.LAST_ENDPOINT)
        self._read_monitor()

    def poll(self, timeout_s: float | None) -> list[Event]:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        events: list[Event] = []
        while True:
            wait = left = until - time.monotonic()
            if self._ended:
                wait = 0.0  # there may be messages of theirs to read, and their ends to report
            elif self._blocked:
                wait = min(left, BLOCKED_RETRY_S)
            elif self._by_descriptor:
                due = min(self._look_at, self._watch_at) if self._strangers else self._watch_at
                wait = min(left, due - time.monotonic())
            ready = dict(self._poller.poll(ms(wait)))
            if self.keyring is not None:
                self._check_keys(self.keyring, self._access in ready)
            if self._monitor in ready:
                self._read_monitor()
            count = len(self._ended)
            if (self._router in ready or count) and self._read_messages(events):
                # All that these had sent before they ended has been read now.
                for link in self._ended[:count]:
                    self._end(link, events)
                del self._ended[:count]
            for conn, link in list(self._blocked.items()):
                self._flush(conn, link)
            now = time.monotonic()
            if now >= self._watch_at or (self._strangers and now >= self._look_at):
                self._look(now)
            woken = self._waker.fd in ready and self._waker.clear()
            if events or woken or left <= 0:
                return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        link = self._by_routing_id.get(conn)
        if link is None:
            return False
        link.queue.append(frames)
        return len(link.queue) > 1 or self._flush(conn, link)

    def wake(self) -> None:
        self._waker.wake()

    def hang_up(self, conn: bytes) -> None:
        """By the kernel: libzmq cannot close one peer of a socket, nor take back what it has."""
        self._blocked.pop(conn, None)
        link = self._by_routing_id.get(conn)
        if link is not None:
            link.queue.clear()
            link.hang_up()

    def vouch(self, conn: bytes) -> None:
        link = self._by_routing_id.get(conn)
        if link is not None:
            self._strangers.pop(link.serial, None)

    def peer(self, conn: bytes) -> str:
        """The address at the other end of `conn`, for logs."""
        link = self._by_routing_id.get(conn)
        return link.peer() if link is not None else "unknown"

    def bytes_read(self, conn: bytes) -> int:
        link = self._by_routing_id.get(conn)
        return link.kernel.bytes_read() if link is not None and link.kernel is not None else 0

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        now = dict(self._past)
        for link in (*self._by_descriptor.values(), *self._ended):
            counts = link.kernel.bytes() if link.kernel is not None else None
            if counts is not None:
                now[link.conn or link.serial] = counts
        return now

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        self.on_refused = None  # it refers to parts of the server, which this object may outlive
        if self._held is not None:
            self._held.close()
        until = time.monotonic() + linger_s
        while self._blocked and time.monotonic() < until:
            for conn, link in list(self._blocked.items()):
                self._flush(conn, link)
            time.sleep(BLOCKED_RETRY_S)
        others = [self._monitor] if self._access is None else [self._monitor, self._access]
        close_all(self._context, self._router, others, max(0.0, until - time.monotonic()))
        for link in (*self._by_descriptor.values(), *self._ended):
            self._end(link, [])
        for held in (
            self._by_descriptor,
            self._by_routing_id,
            self._strangers,
            self._owned,
            self._blocked,
        ):
            held.clear()
        self._ended.clear()
        self._waker.close()

    # -- messages ----------------------------------------------------------------------------------
    def _read_messages(self, events: list[Event]) -> bool:
        """Reads up to `BATCH` messages, as events. Returns whether none is left."""
        conns = self._by_routing_id
        curve = self._access is not None
        for _ in range(BATCH):
            try:
                conn, body = receive_from(self._router)
            except zmq.Again:
                return True
            if len(body) > MAX_FRAMES:
                reason = f"a message of more than the {MAX_FRAMES} frames that are allowed"
                self._hang_up_for(reason, conn, body[0])
            elif len(conn) != 5 or conn[0] != 0:
                # libzmq's own are a zero byte and a running number. A peer that chooses its own
                # might choose another's.
                reason = "a routing id of the peer's own choice"
                self._hang_up_for(reason, conn, body[0])
            else:
                user: str | None = None  # the key that was proved on its connection
                if curve:
                    with contextlib.suppress(zmq.ZMQError):
                        found = body[0].get("User-Id")
                        user = found if isinstance(found, str) else None
                stands = conn in conns
                if not stands:
                    fd = _descriptor_of(body[0])
                    if fd is None:
                        reason = "a peer with ZMTP before version 3, which is not supported"
                        self._refuse(reason, self.peer(conn))
                        continue
                    stands = self._meet(conn, user, fd, events)
                events.append(Received(conn, tuple(map(owned_frame, body)), user))
                if not stands:
                    events.append(Closed(conn))
            if conn in conns:
                conns[conn].received += framing(*map(len, body), curve=curve)
        return False

    def _meet(self, conn: bytes, user: str | None, fd: int, events: list[Event]) -> bool:
        """Joins a routing id seen for the first time to its connection; whether that still stands.

        The kernel gives a closed descriptor to the next connection, so `fd` may have had another
        owner or have got a new one. libzmq reports the end of a connection before it closes the
        descriptor, and routing ids count upwards: the two decide.
        """
        self._read_monitor()
        events.append(Opened(conn))
        link = self._by_descriptor.get(fd)
        if link is None:
            return False
        if link.conn is not None:
            # Both ids count upwards modulo 2^32.
            ahead = int.from_bytes(conn[1:], "big") - int.from_bytes(link.conn[1:], "big")
            if not 0 < ahead % 2**32 < 2**31:
                return False
            # An older connection's last message was taken for this one's.
            self._by_routing_id.pop(link.conn, None)
            self._blocked.pop(link.conn, None)
            # Its messages wait there. Those for this connection would wait behind them for ever.
            link.queue.clear()
            events.append(Closed(link.conn))
        link.conn = conn
        link.user = user
        self._by_routing_id[conn] = link
        if user is not None:
            self._own(link, user)
        kernel = link.kernel
        if (
            kernel is not None
            and not kernel.kept
            and self._descriptors_in_use() < self._room * 3 // 4
        ):
            try:
                kernel.keep()
                self._kept += 1
            except OSError:
                pass  # its last bytes go uncounted: no reason to hang up on it
        return True

    def _hang_up_for(self, reason: str, conn: bytes, frame: zmq.Frame) -> None:
        """Hangs up on the sender of a frame that no client of ours sends. This makes no event: the
        limit of useless messages need not count the frame of a sender that is hung up on anyway.
        """
        link = self._by_routing_id.get(conn)
        fd = _descriptor_of(frame)
        if link is None and fd is not None:
            link = self._by_descriptor.get(fd)
            if link is not None and link.conn is not None:
                link = None  # another connection's, which has the descriptor now
        self._refuse(reason, "unknown" if link is None else link.peer())
        if link is not None:
            link.hang_up()

    def _flush(self, conn: bytes, link: Connection) -> bool:
        """Hands libzmq what is queued for a connection; False if its peer is gone."""
        gone = False
        while link.queue:
            try:
                send(self._router, (conn, *link.queue[0]))
            except zmq.Again:  # its peer has as much as it may have unread
                self._blocked[conn] = link
                return True
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                gone = True
                link.queue.clear()
            else:
                link.queue.popleft()
        self._blocked.pop(conn, None)
        return not gone

    # -- coming and going --------------------------------------------------------------------------
    def _check_keys(self, keyring: Keyring, asked: bool) -> None:
        """Answers those that ask whether they may connect, who wait for it in their handshakes, and
        hangs up on those that may no more.
        """
        while asked and self._access is not None:
            try:
                request = self._access.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            _version, request_id, _domain, address, _identity, mechanism, *credentials = request
            user = b""
            if mechanism == b"CURVE" and credentials:
                user = zmq.utils.z85.encode(credentials[0])
            if user and keyring.allows(user.decode()):
                self._access.send_multipart([b"1.0", request_id, b"200", b"OK", user, b""])
                continue
            reason = keyring.why_named(user.decode()) if user else "no key"
            self._refuse(reason, address.decode())
            self._access.send_multipart([b"1.0", request_id, b"400", b"key not allowed", b"", b""])
        keyring.refresh()
        if self._allowed != keyring.version:  # a key that was allowed may be so no more
            self._allowed = keyring.version
            for conn, link in self._by_routing_id.items():
                if link.user is not None and not keyring.allows(link.user):
                    link.why = keyring.why_not(link.user)
                    self._refuse(keyring.why_named(link.user), link.peer())
                    self.hang_up(conn)

    def _read_monitor(self) -> None:
        fresh = []
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_LISTENING:
                await_words(value)
            elif event == zmq.EVENT_ACCEPTED:
                self._on_disconnect(value)  # whose end was not reported
                link = Connection(next(self._serial), value)
                self._by_descriptor[value] = self._strangers[link.serial] = link
                fresh.append(link)
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnect(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse(
                    "a handshake failed: the client trusts another server's key, or only one of "
                    "the two uses keys, or it is no fednet client, or bytes were damaged on their "
                    "way",
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refuse("a connection ended in its handshake")
        for link in fresh:
            if self._by_descriptor.get(link.fd) is link:
                try:
                    link.kernel = KernelSocket(link.fd)
                except OSError:
                    continue  # gone already, and its descriptor perhaps a file's now
                if self.keyring is None:
                    self._own(link, link.peer().rpartition(":")[0])
        while self._strangers and self._descriptors_in_use() > self._room:
            oldest = next(iter(self._strangers.values()))
            self._drop(oldest, f"more than {self._room} descriptors of connections")

    def _descriptors_in_use(self) -> int:
        return len(self._by_descriptor) + self._kept - len(self._leaving)

    def _own(self, link: Connection, owner: str) -> None:
        """Counts a connection for its key or address. If it has too many, the oldest stranger among
        them is hung up on, or else this one.
        """
        self._disown(link)
        if link.serial in self._leaving:
            return
        link.owner = owner
        owned = self._owned.setdefault(owner, {})
        owned[link.serial] = link
        if self._max_each is not None and len(owned) > self._max_each:
            strangers = (other for serial, other in owned.items() if serial in self._strangers)
            reason = f"more than {self._max_each} connections of one key or address"
            self._drop(next(strangers, link), reason)

    def _disown(self, link: Connection) -> None:
        if link.owner is not None:
            owned = self._owned[link.owner]
            del owned[link.serial]
            if not owned:
                del self._owned[link.owner]
            link.owner = None

    def _drop(self, link: Connection, reason: str) -> None:
        """Hangs up. It is among the connections until libzmq reports its end."""
        self._disown(link)
        self._leaving.add(link.serial)
        self._strangers.pop(link.serial, None)
        self._refuse(reason, link.peer())
        link.hang_up()

    def _on_disconnect(self, fd: int) -> None:
        link = self._by_descriptor.pop(fd, None)
        if link is not None:
            self._disown(link)
            self._ended.append(link)
            self._leaving.discard(link.serial)
            self._strangers.pop(link.serial, None)

    def _end(self, link: Connection, events: list[Event]) -> None:
        """All that it had sent has been read."""
        counts = None
        if link.kernel is not None:
            self._kept -= link.kernel.kept
            counts = link.kernel.close()
            link.kernel = None
        if counts is not None:
            # Connections may be very many. Each one's counts are kept only after `close`, when no
            # event reports its end.
            name: bytes | int = 0
            if self._closed:
                name = link.conn or link.serial
            sent, received = self._past.get(name, (0, 0))
            self._past[name] = sent + counts[0], received + counts[1]
        if link.conn is not None and self._by_routing_id.get(link.conn) is link:
            del self._by_routing_id[link.conn]
            self._blocked.pop(link.conn, None)
            events.append(Closed(link.conn, None if counts is None else counts[1], link.why))

    def _look(self, now: float) -> None:
        """Hangs up on strangers who are too many or send too much, and on messages without an
        end.
        """
        began = time.thread_time()
        if self._strangers and now >= self._look_at:
            seen = [(link, link.came()) for link in self._strangers.values()]
            most = min(MAX_STRANGERS, max(1, self._room // 2))
            for link, reason in list(unwelcome(seen, most)):
                self._drop(link, reason)
            self._look_at = time.monotonic() + pause(LOOK_S, began)
        if now >= self._watch_at:
            began = time.thread_time()
            for link in list(self._by_descriptor.values()):
                if link.received != link.received_then:
                    # It has finished one since, so it is not amid an endless one; and to ask the
                    # kernel about a busy connection can take a millisecond.
                    link.received_then = link.received
                elif link.came() - link.received > MAX_UNFINISHED_BYTES:
                    reason = f"more than {MAX_UNFINISHED_BYTES} bytes of no finished message"
                    self._refuse(reason, link.peer())
                    link.hang_up()
                elif link.kernel is not None and link.kernel.over:
                    link.over_at = link.over_at or now
                    if now - link.over_at >= STALLED_S:
                        self._on_disconnect(link.fd)
            self._watch_at = time.monotonic() + pause(WATCH_S, began)

    def _refuse(self, reason: str, address: str = "unknown") -> None:
        if self.on_refused is not None:
            self.on_refused(reason, address)
        else:
            log.warning("refused: %s (from %s)", reason, address)


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The descriptor of the connection that a frame came over; None where the peer's ZMTP knows no
    metadata: version 1, which libzmq also takes noise for, and 2.
    """
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None

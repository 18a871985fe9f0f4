"""The server's end of ZeroMQ: a ROUTER.

What libzmq leaves out is made up for here. It reports closed connections by descriptor and messages
by routing id: the descriptor that each message carries joins the two. It drops what is for an
unknown peer, and with `ROUTER_MANDATORY` blocks on a full one: messages wait in queues of our own.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

import zmq

from fednet.errors import ConfigError
from fednet.transport.base import MAX_FRAMES, Closed, Event, Frames, Opened, Received
from fednet.transport.framing import framing
from fednet.transport.kernel import await_words
from fednet.transport.keys import Keyring
from fednet.transport.zeromq.access import Access
from fednet.transport.zeromq.connections import Connection, Connections
from fednet.transport.zeromq.sockets import (
    RefusalCounts,
    Refused,
    Waker,
    check_address,
    close_all,
    common_options,
    descriptor_of,
    kept,
    monitor_events,
    monitor_of,
    ms,
    polled,
    receive,
    send,
    sooner,
    user_of,
    why,
)

log = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = 64 * 2**20
"""libzmq keeps the frames of a message until its last one has come, however many: `MAXMSGSIZE` and
high-water marks do not bound it. Whoever has sent so much more than its finished messages amount to
is hung up on; what TCP and libzmq hold of honest ones is far less. Without this one stranger can
fill the memory of a server that has no CURVE."""

BATCH = 512
"""Messages read in one `poll`, so that a flood cannot keep it from returning."""

BLOCKED_RETRY_S = 0.01
"""libzmq has no event for "this one peer of a ROUTER is writable again". Only while a peer does not
read, `poll` wakes this often to try."""


class ZmqServer:
    """A ROUTER bound to `address`: tcp://127.0.0.1:5555, tcp://*:0 for any free port, ipc://PATH.

    With a `keyring`, CURVE: a key that it does not allow never completes the handshake, and
    `Received.user` is the key that was proved. max_connections, max_each: at a time, and of each
    key or, without CURVE, each address. Raises ConfigError if the address cannot be bound.
    `refusals` counts what was refused, by reason. later: nobody can connect before `listen`; the
    port is this process's from now on.
    """

    def __init__(
        self,
        address: str,
        *,
        keyring: Keyring | None = None,
        max_connections: int | None = None,
        max_each: int | None = None,
        max_unfinished_bytes: int = MAX_UNFINISHED_BYTES,
        on_refused: Refused | None = None,
        later: bool = False,
    ) -> None:
        check_address(address)
        self.keyring, self.on_refused = keyring, on_refused
        self.on_renewed: Callable[[], object] = lambda: None  # the server has another pair
        self._refusals, self._closed = RefusalCounts(), False
        self.refusals = self._refusals.counts
        self._context = zmq.Context()
        self._access: Access | None = None  # None where anyone may connect
        router = self._context.socket(zmq.ROUTER)
        try:
            common_options(router, "[" in address)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            router.setsockopt(zmq.BACKLOG, 1024)
            if keyring is not None:
                self._access = Access(
                    self._context,
                    keyring,
                    lambda reason, address: self._refuse("key", reason, None, address),
                )
                self._access.guard(router)
            self._monitor = monitor_of(self._context, router)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {address!r}: {why(error)}.") from None
        self._router, self.address = router, address
        self._held: socket.socket | None = None
        self._waker = Waker()
        self._poller = zmq.Poller()
        sources = [router, self._monitor, self._waker.fd]
        for source in sources if self._access is None else [*sources, self._access.socket]:
            self._poller.register(source, zmq.POLLIN)
        self._blocked: dict[bytes, Connection] = {}  # those whose peer does not read fast enough
        self._connections = Connections(
            lambda what, reason, link: self._refuse(what, reason, None, link.peer()),
            keyring is not None,
            max_connections,
            max_each,
            max_unfinished_bytes,
        )
        if later and address.startswith("tcp://"):
            self._hold()
        else:
            self.listen()

    def _hold(self) -> None:
        """Takes the port, so that no other process can, and lets nobody connect to it."""
        host, port = self.address.removeprefix("tcp://").rsplit(":", 1)
        six = host.startswith("[")
        name = host.strip("[]")
        held = socket.socket(socket.AF_INET6 if six else socket.AF_INET)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("" if name == "*" else name, 0 if port == "*" else int(port)))
        except socket.gaierror:  # an interface, whose name only libzmq knows
            held.close()
            return
        except OSError as error:
            held.close()
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot bind {self.address!r}: {why(error)}.") from None
        self._held = held
        shown = "0.0.0.0" if name == "*" else host
        self.address = f"tcp://{shown}:{held.getsockname()[1]}"

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
        return polled(timeout_s, self._ready, self._pump, self._waker)

    def _ready(self, left: float | None) -> set[object]:
        if self._connections.ended:
            left = 0.0  # there may be words of theirs to read, and their ends to tell
        else:
            left = sooner(left, BLOCKED_RETRY_S if self._blocked else self._connections.wait())
        return {source for source, _ in self._poller.poll(ms(left))}

    def send(self, conn: bytes, frames: Frames) -> bool:
        link = self._connections.conns.get(conn)
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
        """libzmq cannot close one peer of a socket, nor take back what it has; `hang_up` goes by
        the kernel.
        """
        self._blocked.pop(conn, None)
        link = self._connections.conns.get(conn)
        if link is not None:
            link.queue.clear()
            if hang_up:
                link.hang_up()

    def vouch(self, conn: bytes) -> None:
        self._connections.vouch(conn)

    def peer(self, conn: bytes) -> str:
        """The address at the other end of `conn`, for logs."""
        link = self._connections.conns.get(conn)
        return link.peer() if link is not None else "unknown"

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return self._connections.traffic()

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        if self._held is not None:
            self._held.close()
        until = time.monotonic() + linger_s
        while self._blocked and time.monotonic() < until:
            self._retry()
            time.sleep(BLOCKED_RETRY_S)
        others = [self._monitor, *([self._access.socket] if self._access else [])]
        close_all(self._context, self._router, others, max(0.0, until - time.monotonic()))
        self._connections.close()
        self._blocked.clear()
        self._waker.close()

    def _pump(self, ready: set[object], events: list[Event]) -> None:
        """Everything that can be done now, without waiting."""
        if self._access is not None:
            if self._access.socket in ready:
                self._access.answer()
            if self._access.changed():
                self._hang_up_on_revoked(self._access)
            if self._access.renewed(self._router, self.address):
                self._read_monitor()
                self._connections.all_ended()
                self.on_renewed()
        if self._monitor in ready:
            self._read_monitor()
        gone = self._connections.ended
        ended = len(gone)
        if (self._router in ready or ended) and self._read_messages(events):
            # All that these had sent before they ended has been read now.
            for link in gone[:ended]:
                self._end(link, events)
            del gone[:ended]
        if self._blocked:
            self._retry()
        self._connections.look()

    def _read_messages(self, events: list[Event]) -> bool:
        """Whether all that was there was read."""
        conns = self._connections.conns
        for _ in range(BATCH):
            try:
                conn_frame, *body = receive(self._router, 1 + MAX_FRAMES)
            except zmq.Again:
                return True
            conn = conn_frame.bytes
            if len(body) > MAX_FRAMES:
                reason = f"a message of more than the {MAX_FRAMES} frames that are allowed"
                self._end_for("frames", reason, conn, body[0])
            elif len(conn) != 5 or conn[0] != 0:
                # libzmq's own are a zero byte and a running number. Whoever brings one might bring
                # another's.
                self._end_for("identity", "a routing id of the peer's own choice", conn, body[0])
            else:
                user = user_of(body[0]) if self._access is not None else None
                stands = conn in conns
                if not stands:
                    fd = descriptor_of(body[0])
                    if fd is None:
                        self._refuse(
                            "version",
                            "a peer of a ZMTP before 3, whose connection cannot be told",
                            conn,
                        )
                        continue
                    stands = self._meet(conn, user, fd, events)
                events.append(Received(conn, tuple(map(kept, body)), user))
                if not stands:
                    events.append(Closed(conn))
            if conn in conns:
                curve = self._access is not None
                conns[conn].received += sum(framing(len(frame), curve=curve) for frame in body)
        return False

    def _meet(self, conn: bytes, user: str | None, fd: int, events: list[Event]) -> bool:
        """Join a routing id seen for the first time to its connection; whether that still stands.

        The kernel gives a closed descriptor to the next connection, so `fd` may have had another
        owner or have got a new one. libzmq reports the end of a connection before it closes the
        descriptor, and routing ids count upwards: the two decide.
        """
        self._read_monitor()
        events.append(Opened(conn))
        link = self._connections.links.get(fd)
        if link is None:
            return False
        if link.conn is not None:
            if not _newer(conn, link.conn):
                return False
            # An older connection's last words were taken for this one's.
            self._connections.conns.pop(link.conn, None)
            self._blocked.pop(link.conn, None)
            # what waits there is for that one; this one's own would wait behind it for ever
            link.queue.clear()
            events.append(Closed(link.conn))
        self._connections.spoke(link, conn, user)
        return True

    def _read_monitor(self) -> None:
        fresh = []
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_LISTENING:
                await_words(value)
            elif event == zmq.EVENT_ACCEPTED:
                fresh.append(self._connections.accepted(value))
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.disconnected(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse(
                    "handshake",
                    "a handshake failed: the peer speaks no ZMTP, or only one of the two has "
                    "CURVE, or the peer was given another server's key; or bytes were damaged on "
                    "their way",
                    None,
                )
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._refuse("handshake", "a connection ended in its handshake", None)
        self._connections.settle(fresh)

    def _hang_up_on_revoked(self, access: Access) -> None:
        for conn, link in self._connections.conns.items():
            if link.user is not None and not access.allows(link.user):
                link.why = access.why_not(link.user)
                self._refuse("key", access.described(link.user), conn)
                self.drop(conn, hang_up=True)

    def _try(self, conn: bytes, frames: Frames) -> bool | None:
        """True: handed to libzmq. False: the peer is gone. None: it has as much as it may have
        unread.
        """
        try:
            send(self._router, (conn, *frames))
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

    def _end(self, link: Connection, events: list[Event]) -> None:
        stood = link.conn is not None and self._connections.conns.get(link.conn) is link
        counts = self._connections.end(link)
        if stood and link.conn is not None:
            self._blocked.pop(link.conn, None)
            received = counts[1] if counts is not None else None
            events.append(Closed(link.conn, received, link.why))

    def _end_for(self, what: str, reason: str, conn: bytes, frame: zmq.Frame) -> None:
        """Hangs up on whoever sent that: nobody who takes part does, and nobody further in hears of
        it, who bounds the time that messages of no use may take.
        """
        link = self._connections.conns.get(conn)
        if link is None and (fd := descriptor_of(frame)) is not None:
            link = self._connections.stranger(fd)
        self._refuse(what, reason, None, "unknown" if link is None else link.peer())
        if link is not None:
            link.hang_up()

    def _refuse(self, what: str, reason: str, conn: bytes | None, address: str = "unknown") -> None:
        if not self._refusals.count(what):
            return
        if conn is not None:
            address = self.peer(conn)
        log.warning("refused: %s (from %s)", reason, address)
        if self.on_refused is not None:
            self.on_refused(reason, address)


def _newer(conn: bytes, other: bytes) -> bool:
    """Whether routing id `conn` was given after `other`: both count upwards modulo 2^32."""
    ahead = int.from_bytes(conn[1:], "big") - int.from_bytes(other[1:], "big")
    return 0 < ahead % 2**32 < 2**31

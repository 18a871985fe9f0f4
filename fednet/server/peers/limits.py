"""How many messages a second a peer may send that bring the run nothing, and who is hung up on.

A message before a join, or a join, counts against the key or address that it comes from; after the
join heartbeats, and what belongs to nothing, count against the connection too. Connections are
capped by the transport (`transport/zeromq/connections.py`, `transport/strangers.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from fednet.protocol.instructions import REFUSALS
from fednet.protocol.server import ServerProtocol
from fednet.server.peers.events import Events
from fednet.transport.base import Closed, Event, Opened, Received, ServerTransport
from fednet.wire import messages as m
from fednet.wire.link import Link

JOINS_A_SECOND, JOINS_AT_ONCE = 10, 256
"""Messages before a join, or joins, of each key, or address without CURVE: so many a second, and at
once so many and two for each client of the federation. It may have as many connections."""

USELESS_A_SECOND, USELESS_AT_ONCE = 100, 1000
"""Heartbeats, and messages that belong to nothing, of a connection; of a key or address so many for
each client of the federation and one more."""

PEERS = 4096
"""Keys, addresses and connections whose messages are counted: those that sent last."""


def at_once(clients: int) -> int:
    """Connections, and joins, of one key or address. clients: of the federation, which may all be
    one's, each with a connection that has broken beside its new one.
    """
    return JOINS_AT_ONCE + 2 * clients


class Rate:
    """Counts messages by who sent them: so many a second, and up to `at_once` saved up."""

    def __init__(self, a_second: float, at_once: float) -> None:
        self._a_second, self._at_once = a_second, at_once
        self._known: OrderedDict[object, tuple[float, float]] = OrderedDict()  # (left, when)

    def allows(self, who: object, now: float) -> bool:
        """Counts one more message; False where it is one too many."""
        left, then = self._known.pop(who, (self._at_once, now))
        left = min(self._at_once, left + (now - then) * self._a_second)
        allowed = left >= 1
        self._known[who] = (left - 1 if allowed else left), now
        if len(self._known) > PEERS:
            self._known.popitem(last=False)
        return allowed


class Limits:
    """Hands what came to whoever takes it in, and hangs up on who sends too much. receive(event):
    takes a message in; whether it was of no use. closed(conn): a connection has ended, and all that
    it had sent was taken in.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        transport: ServerTransport,
        link: Link,
        events: Events,
        receive: Callable[[Received], bool],
        closed: Callable[[Closed], None],
    ) -> None:
        self._protocol, self._transport = protocol, transport
        self._link, self._events = link, events
        self._receive, self._closed = receive, closed
        everyone = 1 + protocol.clients
        self._joins = Rate(JOINS_A_SECOND, at_once(protocol.clients))
        self._of_connection = Rate(USELESS_A_SECOND, USELESS_AT_ONCE)
        self._of_peer = Rate(everyone * USELESS_A_SECOND, everyone * USELESS_AT_ONCE)
        self._addresses: dict[bytes, str] = {}  # by connection
        self._hung_up: set[bytes] = set()  # connections of which nothing is taken in any more

    def came(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, Opened):
            self._link.opened(conn, stranger=True)
            self._addresses[conn] = self._transport.peer(conn).rpartition(":")[0]
        elif isinstance(event, Closed):
            self._closed(event)
            self._hung_up.discard(conn)
            self._addresses.pop(conn, None)
        elif conn in self._hung_up:
            self._link.refused(conn, event.frames)
        elif not self._protocol.has_joined(conn):
            if self._joins.allows(self._peer(event), time.monotonic()):
                self._receive(event)
            else:
                self._hang_up(conn, "more joins than this server takes of one peer")
                self._link.refused(conn, event.frames)
        elif self._receive(event):
            now = time.monotonic()
            here = self._of_connection.allows(conn, now)
            if not (self._of_peer.allows(self._peer(event), now) and here):
                self._hang_up(conn, "more messages of no use than this server takes of one peer")

    def worth_a_row(self, conn: bytes, stray: str, key: m.Key) -> bool:
        """Whether a payload that belongs to nothing has a line of the book of its own: not where it
        is of rounds or clients that a peer has made up, nor among very many.
        """
        known = stray != "refused" and key.round <= self._protocol.round
        return known and self._protocol.strikes(conn) <= REFUSALS

    def _peer(self, event: Received) -> str:
        """Who sent it: a key, or an address where there are no keys."""
        return event.user or self._addresses.get(event.conn, "")

    def _hang_up(self, conn: bytes, reason: str) -> None:
        if conn not in self._hung_up:
            self._hung_up.add(conn)
            fields = {"what": "connection", "reason": reason, "worker": ""}
            self._events.tell("refused", {**fields, "address": self._addresses.get(conn, "")})
            self._transport.drop(conn, hang_up=True)

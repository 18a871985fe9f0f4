"""Which of the messages that came are heard, and when: of strangers as far as there is time for
them, of peers whose messages are of use to the run; and who is hung up on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fednet.protocol.rules import REFUSALS
from fednet.protocol.server import ServerProtocol
from fednet.server.peers.budget import Peers, Strangers
from fednet.server.peers.events import Events
from fednet.transport.base import Closed, Event, Opened, Received, ServerTransport
from fednet.wire import messages as m
from fednet.wire.link import Link

AT_ONCE_S = 0.05
"""How long strangers are heard before it is looked for what else has come."""


class Hearing:
    """receive(event): takes a message in; whether it was of no use. closed(conn): the
    connection has ended, and all that it had sent was heard.
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
        self._protocol, self._transport, self._link, self._events = (
            protocol,
            transport,
            link,
            events,
        )
        self._receive, self._closed = receive, closed
        self._strangers = Strangers(time.monotonic())
        self._peers = Peers(protocol.clients)
        self._addresses: dict[bytes, str] = {}  # by connection
        self._hung_up: set[bytes] = set()  # connections of which nothing is heard any more

    def wait(self, timeout_s: float | None) -> float | None:
        """How long the transport may be waited for, with what strangers have sent in mind."""
        wait = self._strangers.wait(time.monotonic())
        if wait is None:
            return timeout_s
        wait = wait if self._protocol.present() else 0.0
        return wait if timeout_s is None else min(timeout_s, wait)

    def came(self, event: Event) -> None:
        conn = event.conn
        if isinstance(event, Opened):
            self._link.opened(conn, stranger=True)
            self._addresses[conn] = self._transport.peer(conn).rpartition(":")[0]
        elif conn in self._strangers or (
            isinstance(event, Received) and not self._protocol.has_joined(conn)
        ):
            if isinstance(event, Closed):
                self._hung_up.add(conn)  # what waits of it need not be heard
            if not self._strangers.put(event):
                self._hang_up(conn, "more messages before a join than this server can keep")
                self._link.refused(conn, event.frames)  # type: ignore[union-attr]
        elif isinstance(event, Closed):
            self._end(event)
        elif conn in self._hung_up:
            self._link.refused(conn, event.frames)
        else:
            began = time.monotonic()
            useless = self._receive(event)
            if useless and self._peers.useless(conn, self._peer(event), time.monotonic() - began):
                self._hang_up(conn, "more messages of no use than this server has time for")

    def strangers(self) -> bool:
        """Hears them, as far as there is time for it; whether there was anything."""
        began = now = time.monotonic()
        while now - began < AT_ONCE_S:
            event = self._strangers.next(now, hurried=bool(self._protocol.present()))
            if event is None:
                break
            if isinstance(event, Closed):
                self._end(event)
            elif event.conn in self._hung_up:
                self._link.refused(event.conn, event.frames)
            elif not self._peers.first(self._peer(event)):
                self._hang_up(event.conn, "more joins than this server hears of one peer")
                self._link.refused(event.conn, event.frames)
            else:
                self._receive(event)
            before, now = now, time.monotonic()
            self._strangers.spent(now - before)
        return now > began

    def worth_a_row(self, conn: bytes, stray: str, key: m.Key) -> bool:
        """Whether a payload that belongs to nothing has a line of the book of its own: not where it
        is of rounds or clients that a peer has made up, nor among very many.
        """
        known = stray != "refused" and key.round <= self._protocol.round
        return known and self._protocol.strikes(conn) <= REFUSALS

    def _peer(self, event: Received) -> str:
        """Whose time is spent: a key's, or an address's where there are no keys."""
        return event.user or self._addresses.get(event.conn, "")

    def _hang_up(self, conn: bytes, reason: str) -> None:
        if conn not in self._hung_up:
            self._hung_up.add(conn)
            fields = {"what": "connection", "reason": reason, "worker": ""}
            self._events.tell("refused", {**fields, "address": self._addresses.get(conn, "")})
            self._transport.drop(conn, hang_up=True)

    def _end(self, event: Closed) -> None:
        self._closed(event)
        self._hung_up.discard(event.conn)
        self._addresses.pop(event.conn, None)

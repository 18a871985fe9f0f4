"""A server and its clients in one process and one thread, with no sockets. Headers and small
payloads are bytes, as in a network; a large payload is handed over as the tensors that it has.

Messages of one connection keep their order; those of different connections reach the server in an
order drawn from a seed, so that whatever depends on the order of arrival is found out. `poll` never
waits: there is nobody to wait for.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from fednet import seeds
from fednet.transport.base import Closed, Event, Frames, Opened, Received
from fednet.wire.body import Body


def _as_received(frames: Frames) -> tuple[Any, ...]:
    """The header is copied; a payload, which nobody writes to any more, is not."""
    header, *rest = frames
    carried: list[Any] = [bytes(header)]
    for frame in rest:
        carried.append(frame if isinstance(frame, Body) else memoryview(frame).toreadonly())
    return tuple(carried)


class Inproc:
    """What stands for the network: one server at a time, and any number of clients."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = seeds.rng(seed, "inproc")
        self._server: InprocServer | None = None
        self._clients: list[InprocClient] = []
        self._given = 0

    def server(self) -> InprocServer:
        """A new server; clients that wait for one connect to it."""
        self._server = InprocServer(self)
        for client in self._clients:
            self._connect(client)
        return self._server

    def client(self) -> InprocClient:
        client = InprocClient(self)
        self._clients.append(client)
        self._connect(client)
        return client

    def _connect(self, client: InprocClient) -> None:
        if self._server is not None and client.conn is None:
            self._given += 1
            client.conn = b"\x00" + self._given.to_bytes(4, "big")
            client.inbox.append(Opened(b""))
            self._server.peers[client.conn] = client

    def _disconnect(self, client: InprocClient) -> None:
        if client.conn is None:
            return
        if self._server is not None:
            del self._server.peers[client.conn]
            if client.conn in self._server.inboxes:
                self._server.inboxes[client.conn].append(Closed(client.conn))
        client.conn = None
        client.inbox.append(Closed(b""))


class InprocServer:
    address = "inproc"

    def __init__(self, network: Inproc) -> None:
        self._network = network
        self._closed = False
        self.peers: dict[bytes, InprocClient] = {}
        self.inboxes: dict[bytes, deque[Event]] = {}  # from a connection's first message on

    def poll(self, timeout_s: float | None) -> list[Event]:
        events: list[Event] = []
        waiting = [conn for conn, inbox in self.inboxes.items() if inbox]
        while waiting:
            at = int(self._network._rng.integers(len(waiting))) if len(waiting) > 1 else 0
            inbox = self.inboxes[waiting[at]]
            events.append(inbox.popleft())
            if isinstance(events[-1], Opened):
                events.append(inbox.popleft())  # its first message
            if isinstance(events[-1], Closed):
                del self.inboxes[waiting[at]]
            if not inbox:
                waiting.pop(at)
        return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        client = self.peers.get(conn)
        if client is None:
            return False
        client.inbox.append(Received(b"", _as_received(frames)))
        return True

    def wake(self) -> None:
        """`poll` never waits."""

    def hang_up(self, conn: bytes) -> None:
        client = self.peers.get(conn)
        if client is not None:
            client.reconnect()

    def peer(self, conn: bytes) -> str:
        return "inproc:0"

    def bytes_read(self, conn: bytes) -> int:
        return 0

    def vouch(self, conn: bytes) -> None:
        """There are as many connections as clients."""

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return {}

    def close(self, linger_s: float = 1.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._network._server = None
        for client in self.peers.values():
            client.conn = None
            client.inbox.append(Closed(b""))
        self.peers.clear()
        self.inboxes.clear()


class InprocClient:
    address = "inproc"
    trouble = ""

    def __init__(self, network: Inproc) -> None:
        self._network = network
        self.conn: bytes | None = None
        self.inbox: deque[Event] = deque()

    def poll(self, timeout_s: float | None) -> list[Event]:
        events = list(self.inbox)
        self.inbox.clear()
        return events

    def send(self, frames: Frames) -> bool:
        server = self._network._server
        if server is None or self.conn is None:
            return False
        if self.conn not in server.inboxes:
            server.inboxes[self.conn] = deque([Opened(self.conn)])
        server.inboxes[self.conn].append(Received(self.conn, _as_received(frames)))
        return True

    def wake(self) -> None:
        """`poll` never waits."""

    def reconnect(self, address: str | None = None) -> None:
        self._network._disconnect(self)
        self._network._connect(self)

    def bytes_read(self) -> int:
        return 0

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return {}

    def close(self, linger_s: float = 1.0) -> None:
        self._network._disconnect(self)
        if self in self._network._clients:
            self._network._clients.remove(self)

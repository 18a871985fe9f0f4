"""A server and its clients on real sockets, polled in turn until something holds."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack

from fednet.transport.base import ClientTransport, Event, Opened, Received, ServerTransport
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer

LIMIT_S = 20.0


class Pair:
    def __init__(self, stack: ExitStack, address: str = "tcp://127.0.0.1:0", **options) -> None:
        self.stack = stack
        self.refused: list[str] = []  # reasons of what the server refused
        options.setdefault("on_refused", lambda reason, where: self.refused.append(reason))
        self.server = ZmqServer(address, **options)
        stack.callback(self.server.close, 0)

    def client(self, **options) -> ZmqClient:
        client = ZmqClient(self.server.address, **options)
        self.stack.callback(client.close, 0)
        return client

    def refusals(self, text: str) -> int:
        """How many of the reasons contain this text."""
        return sum(text in reason for reason in self.refused)

    def stranger(self, source: str = "127.0.0.1") -> socket.socket:
        """A plain connection to the server, over which nothing was said."""
        host, port = self.server.address.removeprefix("tcp://").split(":")
        address = (host, int(port))
        one = socket.create_connection(address, timeout=LIMIT_S, source_address=(source, 0))
        return self.stack.enter_context(one)

    def ends(self, one: socket.socket) -> bool:
        """Whether the server ends the connection."""
        one.settimeout(0.05)
        for _ in range(10):
            self.server.poll(0)
            try:
                if not one.recv(64):
                    return True
            except TimeoutError:
                continue
        return False


def pump(server: ServerTransport, *clients: ClientTransport, until) -> list[tuple[object, Event]]:
    """Poll all of them in turn until `until(events)` holds, and return the (transport, event)
    pairs.
    """
    events: list[tuple[object, Event]] = []
    limit = time.monotonic() + LIMIT_S
    while not until(events):
        assert time.monotonic() < limit, f"still waiting after {LIMIT_S} s; saw {events}"
        for end in (server, *clients):
            events += [(end, event) for event in end.poll(0.002)]
    return events


def of(events, kind, end=None) -> list:
    return [event for where, event in events if isinstance(event, kind) and end in (None, where)]


def joined(pair: Pair, **options) -> tuple[ZmqClient, bytes]:
    """A client that takes part, and its conn."""
    client, conn = spoken(pair, **options)
    pair.server.vouch(conn)
    return client, conn


def spoken(pair: Pair, **options) -> tuple[ZmqClient, bytes]:
    """A client that has sent a message and takes no part, and its conn."""
    client = opened(pair, **options)
    return client, said(pair, client, b"join").conn


def opened(pair: Pair, **options) -> ZmqClient:
    """A client that has a connection and has sent nothing."""
    client = pair.client(**options)
    pump(pair.server, client, until=lambda seen: of(seen, Opened, client))
    return client


def said(pair: Pair, client: ZmqClient, *frames: bytes) -> Received:
    """Send a message. Return what came, at the server and nowhere else."""
    assert client.send(list(frames))
    seen = pump(pair.server, client, until=lambda seen: of(seen, Received))
    (message,) = of(seen, Received)
    assert of(seen, Received, pair.server) == [message]
    return message

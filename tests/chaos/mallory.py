"""Peers that speak the protocol and abuse it: `Mallory`, a client, and `Liar`, a server."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import numpy as np

from fednet.experiment.build import Experiment
from fednet.tensors import Tensors
from fednet.transport.base import Closed, Opened, Received
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer
from fednet.wire import messages as m
from fednet.wire.codec import Compression, Encoded
from fednet.wire.frames import decode_from_client, decode_from_server, encode
from fednet.wire.payload import LocalRun

LIMIT_S = 60.0


def raw(**fields: Any) -> bytes:
    """Return a header that no sender would write."""
    covered = msgpack.packb({"v": m.PROTOCOL, **fields, "c": 0xFFFFFFFF})[:-4]
    return covered + zlib.crc32(covered).to_bytes(4, "big")


class Peer:
    """heard: the messages that came, each with its body."""

    def __init__(self) -> None:
        self.heard: list[tuple[m.Message, memoryview | None]] = []

    def listen(self, until: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Take messages until `until()` is true."""
        limit = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < limit, [type(x).__name__ for x, _ in self.heard]
            self.poll(0.01)

    def said(self, kind: type[m.Message]) -> list[Any]:
        return [x for x, _ in self.heard if isinstance(x, kind)]

    def poll(self, timeout_s: float) -> Any:
        raise NotImplementedError


class Mallory(Peer):
    """run, inc: as in the welcome. keys: a pair that knows the server's."""

    def __init__(self, address: str, keys: Any = None, wait: bool = True) -> None:
        super().__init__()
        self.transport = ZmqClient(address, keys=keys, on_refused=lambda reason, where: None)
        self.run = ""
        self.inc = 0
        self.open = False
        if wait:
            self.listen(lambda: self.open)

    def poll(self, timeout_s: float) -> list[m.Message]:
        fresh = []
        for event in self.transport.poll(timeout_s):
            if isinstance(event, Opened):
                self.open = True
            elif isinstance(event, Closed):
                self.open = False
            elif isinstance(event, Received):
                message, body = decode_from_server(event.frames)
                if isinstance(message, m.Welcome):
                    self.run = message.run
                    self.inc = message.inc
                self.heard.append((message, body))
                fresh.append(message)
        return fresh

    def frames(self, *frames: bytes) -> None:
        self.transport.send(list(frames))

    def say(self, message: m.Message, body: bytes | None = None) -> None:
        whole = msgspec.structs.replace(message, run=self.run, inc=self.inc)
        self.frames(encode(whole), *([] if body is None else [body]))

    def refusals(self) -> list[str]:
        return [x.reason for x in self.said(m.Refuse)]


def reply(exp: Experiment, key: m.Key, weight: float) -> tuple[m.Reply, bytes]:
    """Return a reply of the right form, of which all weights are 0 but one."""
    up = exp.algorithm.exchanges[0].up
    x = Tensors.zeros(exp.shared)
    x.vector[3] = weight
    values = {n: x if f.form == "tensors" else LocalRun(1, 1, 0.0) for n, f in up.fields.items()}
    return packed(
        key, exp.up.encode(up(**values), Compression(lambda name: np.random.default_rng(0)))
    )


def packed(key: m.Key, encoded: Encoded) -> tuple[m.Reply, bytes]:
    body = bytes(encoded.body)
    form = list(encoded.form)
    return m.Reply(key=key, form=form, size=len(body), check=encoded.body.digest()), body


class Liar(Peer):
    """Serves one client. welcome: how it answers a join, but for the session."""

    def __init__(self, config: str, **welcome: Any) -> None:
        super().__init__()
        self.transport = ZmqServer("tcp://127.0.0.1:*")
        self.welcome = {"run": "r", "inc": 1, "name": "n", "config": config, "ids": [0]}
        self.welcome |= {"speaks": m.PROTOCOL, **welcome}
        self.conn = b""

    @property
    def address(self) -> str:
        return self.transport.address

    def poll(self, timeout_s: float) -> None:
        """Answers joins and heartbeats too."""
        for event in self.transport.poll(timeout_s):
            if not isinstance(event, Received):
                continue
            message, body = decode_from_client(event.frames)
            self.heard.append((message, body))
            self.conn = event.conn
            if isinstance(message, m.Join):
                self.frames(raw(t="welcome", session="s", **self.welcome))
            elif isinstance(message, m.Alive):
                self.say(m.Alive())

    def frames(self, *frames: bytes) -> None:
        self.transport.send(self.conn, list(frames))

    def say(self, message: m.Message, body: bytes | None = None) -> None:
        whole = msgspec.structs.replace(message, run=self.welcome["run"], inc=self.welcome["inc"])
        self.frames(encode(whole), *([] if body is None else [body]))

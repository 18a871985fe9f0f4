"""A real server with CURVE under attack over real sockets: its peak memory stays within what the
declared sizes say, rounds continue, and they are the same to the bit.

    FEDNET_ATTACK_S=300 pytest tests/chaos/test_memory.py -m slow -s

lasts as long as you like, and prints what was sent.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zstandard

from fednet import config as configuration
from fednet.client.loop import read_server
from fednet.experiment import build as experiment
from fednet.protocol.server import BUDGET
from fednet.transport import keys
from fednet.transport.base import MAX_FRAME_BYTES
from fednet.transport.zeromq.server import MAX_ALL_BYTES, MAX_UNFINISHED_BYTES
from fednet.transport.zeromq.sockets import RECEIVE_MESSAGES
from fednet.wire import messages as m
from fednet.wire.frames import encode
from tests.chaos.mallory import Mallory, reply
from tests.chaos.test_floods import memory
from tests.processes import Federation, settings, undisturbed

MIB = 2**20

CHANGES: dict[str, Any] = {
    "rounds": 10**6,
    "model": {"name": "mlp", "hidden": [8000]},
    "data": {"samples": 80, "classes": 4, "client_test": "none"},
    "evaluate": {"every": 0, "clients": "none"},
    "wire": {"up": {"state": ["zstd"]}},
    "round": {"deadline": 2.0, "lost": {"closed": 0.5, "silent": 3}},
    "security": {"curve": True, "max_norm": 20.0},
}
INSIDERS = 3
ALLOWANCE = 96 * MIB
"""For what no declared size bounds: connections (15 kB each in libzmq), Python's own, and what
strangers send between two looks."""
change = msgspec.structs.replace
Answer = tuple[m.Message, bytes | None]


def bound(payload: int) -> int:
    """Return how much more memory the server may use than before, in bytes: what strangers may have
    sent; of each insider's connection what is received and not read, and one message that never
    ends; parts granted; some copies of a payload.
    """
    insider = RECEIVE_MESSAGES * MAX_FRAME_BYTES + MAX_UNFINISHED_BYTES
    return MAX_ALL_BYTES + INSIDERS * insider + BUDGET * m.PART + 4 * payload + ALLOWANCE


class Attack:
    """Threads that go on until the context is left.

    sent: bytes, and other things that were done, by name. broken: errors of the threads.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        host, port = address.removeprefix("tcp://").split(":")
        self.place = (host, int(port))
        self.server = keys.load(folder / "server.key").public
        self.own = keys.load(folder / "clients" / "1.key")
        self.exp = experiment.build(configuration.from_mapping(settings(**CHANGES)))
        self.sent: Counter[str] = Counter()
        self.broken: list[BaseException] = []
        self.earlier: list[tuple[bytes, ...]] = []
        self._stop = threading.Event()
        outside = (self.giants, self.noise, self.tricklers, self.unknown_keys)
        inside = (self.endless, self.flood, self.poison)
        self.threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True)
            for work in (*outside, *inside)
        ]

    def __enter__(self) -> Attack:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self.threads:
            thread.join(20)

    def _guard(self, work: Any) -> None:
        try:
            while not self._stop.is_set():
                with contextlib.suppress(OSError):
                    work()
        except BaseException as broken:
            self.broken.append(broken)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.place, timeout=5)

    # -- without a key
    def giants(self) -> None:
        """Handshakes of megabytes each, hundreds at a time; and multiparts that never end, before
        any handshake.
        """
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
        size = MAX_FRAME_BYTES.to_bytes(8, "big")
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            for n in range(200):
                one = stack.enter_context(self._connect())
                one.sendall(greeting + (b"\x06", b"\x03")[n % 2] + size)
                one.setblocking(False)
                selector.register(one, selectors.EVENT_WRITE)
            while selector.get_map() and not self._stop.is_set():
                for found, _ in selector.select(0.1):
                    try:
                        self.sent["giants"] += found.fileobj.send(bytes(2**16))
                    except BlockingIOError:
                        continue
                    except OSError:  # the server closed it
                        self.sent["giants closed"] += 1
                        selector.unregister(found.fileobj)

    def noise(self) -> None:
        draw = random.Random(0)
        with self._connect() as one:
            one.sendall(draw.randbytes(draw.choice((1, 64, 5000))))
            self.sent["noise"] += 1
        self._stop.wait(0.005)

    def tricklers(self) -> None:
        """Fifty that send a byte now and then."""
        with contextlib.ExitStack() as stack:
            crowd = [stack.enter_context(self._connect()) for _ in range(50)]
            for byte in b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE":
                for one in crowd:
                    one.sendall(bytes([byte]))
                    self.sent["trickled"] += 1
                if self._stop.wait(0.1):
                    return

    def unknown_keys(self) -> None:
        file = self.folder / f"unknown-{self.sent['unknown keys']}.key"
        keys.make_client_keys(file, self.server)
        stranger = Mallory(self.address, keys.load(file), wait=False)
        with contextlib.closing(stranger.transport):
            for _ in range(10):
                stranger.poll(0.05)
                assert not stranger.open
        self.sent["unknown keys"] += 1

    # -- with a key that may speak for client 1
    def endless(self) -> None:
        """A multipart without an end."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_publickey = self.own.public.encode()
            dealer.curve_secretkey = self.own.secret.encode()
            dealer.curve_serverkey = self.server.encode()
            dealer.connect(self.address)
            for _ in range(1000):
                if self._stop.is_set() or not dealer.poll(500, zmq.POLLOUT):
                    return
                with contextlib.suppress(zmq.Again):
                    dealer.send(bytes(MIB), zmq.SNDMORE | zmq.NOBLOCK)
                    self.sent["endless"] += MIB

    def flood(self) -> None:
        """Whole messages that belong to nothing, as fast as they go, until the server closes."""
        insider = Mallory(self.address, self.own)
        deep = b"\xdc\xff\xff" * 1000
        with contextlib.closing(insider.transport):
            insider.say(m.Join(worker=f"flood-{self.sent['floods']}", ids=[1]))
            insider.listen(lambda: bool(insider.run) or not insider.open)
            self.sent["floods"] += 1
            while insider.open and not self._stop.is_set():
                insider.say(m.Part(key=m.Key(1, 0, 0, 1), index=0), bytes(m.PART))
                insider.say(m.Progress(client=1, stage="x" * 128))
                insider.frames(deep)
                insider.frames(bytes(m.MAX_HEADER))
                self.sent["flood"] += m.PART + len(deep) + m.MAX_HEADER
                insider.poll(0)
                insider.heard.clear()

    def poison(self) -> None:
        """Takes a task and answers it with something else; the next time under another name, as
        this one is known then.
        """
        insider = Mallory(self.address, self.own)
        with contextlib.closing(insider.transport):
            insider.say(m.Join(worker=f"poison-{self.sent['tasks']}", ids=[1], slots=1024))
            # Another's, and over a connection that has joined.
            insider.say(m.Join(worker="poison", ids=[0]))
            insider.listen(lambda: bool(insider.run) or not insider.open)
            insider.say(m.Ready(layout=self.exp.shared.digest))
            beaten = 0.0
            taken = None
            while insider.open and not self._stop.is_set():
                if time.monotonic() - beaten > 0.1:
                    beaten = time.monotonic()
                    insider.say(m.Progress(client=1, stage="training", step=1, steps=9))
                for message in insider.poll(0.01):
                    if not isinstance(message, m.Task):
                        continue
                    for again in self.earlier[-20:]:  # replayed
                        insider.frames(*again)
                    for wrong, body in self._answers(message, self.sent["tasks"]):
                        whole = encode(change(wrong, run=insider.run, inc=insider.inc))
                        self.earlier.append((whole, *([] if body is None else [body])))
                        insider.frames(*self.earlier[-1])
                    self.sent["tasks"] += 1
                    beaten = 0.0
                    taken = time.monotonic()
                # What was announced last was never sent.
                if taken is not None and time.monotonic() - taken > 1.0:
                    return

    def _answers(self, task: m.Task, turn: int) -> Iterator[Answer]:
        key = task.key
        good, body = reply(self.exp, key, (float("nan"), float("inf"), 3e38, 0.0)[turn % 4])
        form = good.form
        yield change(good, key=change(key, client=0)), body  # another's id
        yield change(good, key=change(key, round=key.round + 1)), body

        bomb = zstandard.ZstdCompressor().compress(bytes(10**9 if turn == 0 else 10**7))
        bombs = [change(f, size=len(bomb)) if f.kind == "state" else f for f in form]
        packed = b"".join(bomb if f.kind == "state" else bytes(f.size) for f in form)
        huge = [change(f, size=1 << 40) for f in form]
        whole = [change(f, size=f.raw) for f in form]
        last: list[Answer] = [
            (good, body),
            (m.Reply(key=key, form=bombs, size=len(packed)), packed),
            (change(good, form=huge, size=len(huge) << 40), None),
            (change(good, form=whole, size=sum(f.raw for f in form)), None),
        ]
        yield last[turn % 4]


@pytest.mark.parametrize(
    ("seconds", "tasks"),
    [
        pytest.param(1.0, 1, marks=pytest.mark.timeout(180)),
        pytest.param(
            float(os.environ.get("FEDNET_ATTACK_S", "60")),
            8,
            marks=[pytest.mark.slow, pytest.mark.timeout(0)],
        ),
    ],
    ids=["short", "long"],
)
def test_memory_stays_within_what_is_declared_while_peers_do_their_worst(tmp_path, seconds, tasks):
    keys.lab(tmp_path / "keys", 4)
    with Federation(tmp_path, **CHANGES) as fed:
        fed.client("0-3", "--keys", tmp_path / "keys" / "clients" / "all.key")
        fed.server("--keys", tmp_path / "keys")
        fed.until(lambda: len(fed.rounds()) >= 5)
        before = memory(fed.last.pid, "VmHWM")
        calm = len(fed.rounds())
        end = time.monotonic() + seconds
        with Attack(read_server(fed.path)[0], tmp_path / "keys") as attack:

            def enough() -> bool:
                assert fed.last.poll() is None, fed.last.said()
                done = attack.sent["tasks"] >= tasks and len(fed.rounds()) >= calm + 3
                return bool(attack.broken) or (done and time.monotonic() > end)

            fed.until(enough)
            more = memory(fed.last.pid, "VmHWM") - before
        fed.stop()
    allowed = bound(attack.exp.shared.nbytes)
    print(f"\n{more / 1e6:.0f} MB more, allowed {allowed / 1e6:.0f}; {dict(attack.sent)}")
    assert attack.broken == []
    assert more < allowed
    # Client 1 may miss a round in which its task was with the insider until the deadline.
    assert all({0, 2, 3} <= set(completed) for completed in fed.completed())
    changes = {**CHANGES, "rounds": len(fed.rounds()), "security": {"max_norm": 20.0}}
    assert fed.hashes() == undisturbed(**changes, faults={"replay": str(fed.path)})
    refused = {e["what"] for e in fed.events("refused")}
    assert {"connection", "join", "frame", "reply"} <= refused

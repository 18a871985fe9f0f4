"""How many small replies a second a server takes, and what each costs of its processor, by the
number of connections.

A server as `fednet-server` starts it, whose clients train nothing: each answers at once by the same
payload. All that a round asks of the server is in the figures: its tasks, its books, the fold, the
checkpoint and the records. The clients speak ZMTP over plain sockets in this process: thousands of
ZeroMQ sockets would take more of the processor than the server that is measured.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from fednet import config as configuration
from fednet.errors import CannotGoOn
from fednet.experiment import build as experiments
from fednet.files import read_lines
from fednet.plain import JsonDict, JsonMapping
from fednet.proc import processor_seconds
from fednet.wire import frames
from fednet.wire import messages as m
from fednet.wire.payload import LocalRun
from tests.bench.run import ENVIRONMENT, cell, spread
from tests.bench.workloads import Workload

SIZES = (100, 500, 2000, 5000)  # connections
REPLIES = 12_000  # of a run, at least, that are timed
FIRST = 2  # rounds that are not
PATIENCE_S = 120.0  # for a server to listen, and to end
AT_ONCE = 500  # connections that are not welcomed yet: a server hangs up on too many of those

# ZMTP 3.1 (rfc.zeromq.org/spec/37): flags of a frame, and what a client says first.
MORE = 1
LONG = 2
COMMAND = 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


def bench(sizes: Sequence[int], repeat: int, out: Path) -> Iterator[JsonDict]:
    """One record a number of connections; the runs of all take turns."""
    found: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for k in range(repeat):
        for size in sizes:
            run = measure(size, out / f"{size}-{k}")
            least = floor(size, out / f"{size}-{k}" / "floor.json")
            found[size].append({**run, "floor_ms": least, "ratio": run["server_ms"] / least})
    for size, runs in found.items():
        yield {
            "connections": size,
            "repeat": repeat,
            **{name: spread([run[name] for run in runs]) for name in runs[0]},
        }


def measure(clients: int, folder: Path) -> dict[str, float]:
    """One run: replies a second; milliseconds of the server's processor for each, and of the
    clients'. At least three rounds are timed.
    """
    folder.mkdir(parents=True)
    rounds = _rounds(clients)
    mapping = _config(clients)
    config = folder / "config.yaml"
    config.write_text(json.dumps(mapping), encoding="utf-8")
    words = [sys.executable, "-m", "fednet.cli.server", str(config), "--quiet"]
    words += ["--bind", "tcp://127.0.0.1:0", "--out", str(folder)]
    server = subprocess.Popen(words, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        place = folder / "bench" / "server.json"
        until = time.monotonic() + PATIENCE_S
        while not place.exists():
            if server.poll() is not None or time.monotonic() > until:
                server.kill()
                raise CannotGoOn(f"the server did not start: {server.communicate()[1].strip()}")
            time.sleep(0.05)
        found = json.loads(place.read_text())
        host, _, port = found["address"].removeprefix("tcp://").rpartition(":")
        layout, reply = _reply(mapping)
        idle = IdleClients(clients, (host, int(port)), layout, reply)
        begun = time.process_time()
        times = idle.run(lambda: (time.monotonic(), processor_seconds(found["pid"])))
        spent = time.process_time() - begun
        server.wait(PATIENCE_S)
    finally:
        server.kill()
        server.communicate()
    for row in read_lines(folder / "bench" / "rounds.jsonl"):
        if len(row["completed"]) != clients:  # the figures would be of another federation
            raise CannotGoOn(
                f"{len(row['completed'])} of {clients} clients completed round {row['round']}: the "
                f"server lost the others ({next(iter(row['dropped'].values()), '')})."
            )
    began, before = times[FIRST]
    ended, after = times[-1]
    replies = clients * (len(times) - 1 - FIRST)
    return {
        "a_second": replies / (ended - began),
        "server_ms": 1e3 * (after - before) / replies,
        "clients_ms": 1e3 * spent / (clients * rounds),
    }


def _rounds(clients: int) -> int:
    return FIRST + max(3, -(-REPLIES // clients)) + 1


def _config(clients: int) -> JsonDict:
    model = {"name": "mlp", "hidden": [32]}  # 2,410 parameters
    work = Workload("replies", model, clients, clients, 2, shape=(64,))
    return {**work.config(_rounds(clients)), "report": False}


def floor(clients: int, file: Path) -> float:
    """Milliseconds of the processor a reply of the same messages at a bare socket (`router`)."""
    layout, (reply, body) = _reply(_config(clients))
    form = [msgspec.to_builtins(field) for field in reply.form]
    job = {"clients": clients, "rounds": _rounds(clients), "body": body.hex(), "form": form}
    file.write_text(json.dumps({**job, "entries": reply.form[0].size // 4}), encoding="utf-8")
    words = [sys.executable, "-m", "tests.bench.router", str(file)]
    router = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert router.stdout is not None
    try:
        address = "127.0.0.1", int(router.stdout.readline())
        IdleClients(clients, address, layout, (reply, body)).run(lambda: (0.0, 0.0))
        begins = json.loads(router.stdout.readline())
    finally:
        router.kill()
        router.communicate()
    spent = begins[-1][0] - begins[FIRST][0]
    return float(1e3 * spent / (clients * (len(begins) - 1 - FIRST)))


def _reply(mapping: JsonMapping) -> tuple[str, tuple[m.Reply, bytes]]:
    """The digest of what every client would train, and what it answers: the initial model, as if
    one step on one sample had left it as it was.
    """
    built = experiments.build(configuration.from_mapping(dict(mapping), "bench replies"))
    x = built.setting.initial.select(built.shared)
    # FedAvg's, which has these two fields.
    up: Any = built.algorithm.exchanges[0].up
    encoded = built.up.encode(up(x=x, run=LocalRun(1, 1, 2.0)))
    body = bytes(encoded.body)
    reply = m.Reply(
        key=m.Key(0, 0, 0, 0),
        form=list(encoded.form),
        size=len(body),
        check=encoded.body.digest(),
        seconds=0.001,
        split=[0.001, 0.0, 0.0],
    )
    return built.digest, (reply, body)


def line(record: JsonMapping) -> str:
    return (
        f"{record['connections']:6} connections, {record['repeat']} runs: "
        f"{cell(record, 'a_second', 0)} replies a second; the server's processor "
        f"{cell(record, 'server_ms')} ms a reply, {cell(record, 'ratio', 2)} times the floor's "
        f"{cell(record, 'floor_ms')} ms; the clients' {cell(record, 'clients_ms')} ms"
    )


# -- clients that train nothing --------------------------------------------------------------------
class Fake:
    """One client, over a connection of its own."""

    def __init__(self, client: int, address: tuple[str, int]) -> None:
        self.client = client
        self.spoke = 0.0  # when it said something last
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(GREETING + bytes([COMMAND, len(READY)]) + READY)
        self._buffer = bytearray()
        self._greeting = len(GREETING)  # bytes of the server's that have not come yet
        self._in_body = False

    def say(self, message: m.Message, body: bytes = b"") -> None:
        header = frames.encode(message)
        parts = [(header, MORE), (body, 0)] if body else [(header, 0)]
        whole = b""
        for data, flags in parts:
            if len(data) <= 255:
                whole += bytes([flags, len(data)]) + data
            else:
                whole += bytes([flags | LONG]) + len(data).to_bytes(8, "big") + data
        self.socket.sendall(whole)
        self.spoke = time.monotonic()

    def heard(self) -> Iterator[JsonDict]:
        """The headers of the messages that came, and before them an empty one once messages may be
        sent. Raises CannotGoOn where the server hung up.
        """
        data = self.socket.recv(1 << 16)
        if not data:
            raise CannotGoOn(f"the server hung up on client {self.client}")
        buffer = self._buffer
        buffer += data
        taken = min(self._greeting, len(buffer))
        del buffer[:taken]
        self._greeting -= taken
        while buffer:
            flags = buffer[0]
            head = 9 if flags & LONG else 2
            end = head + int.from_bytes(buffer[1:head], "big")
            if len(buffer) < max(head, end):
                return
            frame = bytes(buffer[head:end])
            del buffer[:end]
            if not self._in_body:
                yield {} if flags & COMMAND else msgpack.unpackb(frame)
            self._in_body = bool(flags & MORE)


class IdleClients:
    """Answer each task at once. layout: the digest of what they would train."""

    def __init__(
        self, clients: int, address: tuple[str, int], layout: str, reply: tuple[m.Reply, bytes]
    ) -> None:
        self._clients = clients
        self._address = address
        self._layout = layout
        self._reply, self._body = reply
        self._welcomed: list[Fake] = []
        self._beat_s = 2.0
        self._over = False

    def run(self, note: Callable[[], tuple[float, float]]) -> list[tuple[float, float]]:
        """Take part until the server says that the run is over. Return what `note` returned at the
        first task of each round.
        """
        found = list[tuple[float, float]]()
        selector = selectors.DefaultSelector()
        beaten = time.monotonic()
        come = 0
        while not self._over:
            while come < min(self._clients, len(self._welcomed) + AT_ONCE):
                fake = Fake(come, self._address)
                selector.register(fake.socket, selectors.EVENT_READ, fake)
                come += 1
            for ready, _ in selector.select(self._beat_s / 4):
                for fields in ready.data.heard():
                    if fields.get("t") == "task" and fields["key"][0] > len(found):
                        found.append(note())
                    self._hear(ready.data, fields)
            now = time.monotonic()
            if now - beaten >= self._beat_s / 4:
                beaten = now
                for fake in self._welcomed:
                    if now - fake.spoke >= self._beat_s:
                        fake.say(m.Alive(run=self._reply.run, inc=self._reply.inc))
        for key in list(selector.get_map().values()):
            key.fileobj.close()
        return found

    def _hear(self, fake: Fake, fields: JsonDict) -> None:
        what = fields.get("t")
        if what is None:
            fake.say(m.Join(worker=f"fake{fake.client}", ids=[fake.client]))
        elif what == "welcome":
            run = fields["run"]
            inc = fields["inc"]
            self._beat_s = fields["beat_s"]
            self._reply = msgspec.structs.replace(self._reply, run=run, inc=inc)
            self._welcomed.append(fake)
            if len(self._welcomed) == self._clients:
                for one in self._welcomed:  # while nobody is ready, those who join are not held up
                    one.say(m.Ready(run=run, inc=inc, layout=self._layout))
        elif what == "task":
            key = m.Key(*fields["key"])
            fake.say(msgspec.structs.replace(self._reply, key=key), self._body)
        elif what == "end":
            self._over = True
        elif what == "refuse":
            raise CannotGoOn(f"client {fake.client} was refused: {fields['reason']}")

"""Clients that train nothing, as many as are asked for, each over a connection of its own: what a
server is measured with by `replies`.

    python -m tests.bench.idle JOB.json

prints {"rounds": [[at_s, server_cpu_s], ...], "cpu_s": s}: when the first task of each round came,
what processor time the server had taken until then, and what these clients took in all.

They speak ZMTP over plain sockets: thousands of ZeroMQ sockets in one process would take more of
the processor than the server that is measured.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec

from fednet.plain import JsonDict
from fednet.server.resources import processor_seconds
from fednet.wire import frames
from fednet.wire import messages as m

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
READ_BYTES = 1 << 16
AT_ONCE = 500  # connections that are not welcomed yet: a server hangs up on too many of those


class Fake:
    """One client: answers each task at once, by the same payload. head: bytes of the greeting that
    have not come yet.
    """

    def __init__(self, client: int, host: str, port: int) -> None:
        self.client, self.head, self._in_body = client, len(GREETING), False
        self.said = 0.0  # when it said something last
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self.socket.sendall(GREETING + bytes([COMMAND, len(READY)]) + READY)

    def say(self, message: m.Message, body: bytes = b"") -> None:
        header = frames.encode(message)
        whole = b"".join(_frame(header, MORE) + _frame(body, 0) if body else _frame(header, 0))
        self.socket.sendall(whole)
        self.said = time.monotonic()

    def heard(self) -> Iterator[JsonDict]:
        """The headers of the messages that came, and before them an empty one once messages may be
        sent. Raises ConnectionError where the server hung up.
        """
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionError(f"the server hung up on client {self.client}")
        self._buffer += data
        if self.head:
            taken = min(self.head, len(self._buffer))
            del self._buffer[:taken]
            self.head -= taken
        while (found := self._next()) is not None:
            flags, frame = found
            if not self._in_body:
                yield {} if flags & COMMAND else msgpack.unpackb(frame)
            self._in_body = bool(flags & MORE)

    def _next(self) -> tuple[int, bytes] | None:
        """(flags, frame), if one is whole."""
        b = self._buffer
        head = 9 if b and b[0] & LONG else 2
        if self.head or len(b) < head:
            return None
        end = head + int.from_bytes(b[1:head], "big")
        if len(b) < end:
            return None
        found = b[0], bytes(b[head:end])
        del b[:end]
        return found


def _frame(data: bytes, flags: int) -> tuple[bytes, bytes]:
    if len(data) <= 255:
        return bytes([flags, len(data)]), data
    return bytes([flags | LONG]) + len(data).to_bytes(8, "big"), data


class IdleClients:
    """job: host, port and pid of the server; clients, their first and how many; layout, digest of
    what they would train; form, body, check, of the one reply; rounds to be taken part in.
    """

    def __init__(self, job: JsonDict) -> None:
        self._job = job
        self._form = msgspec.convert(job["form"], list[m.Field])
        self._body, self._check = bytes.fromhex(job["body"]), bytes.fromhex(job["check"])
        self._selector = selectors.DefaultSelector()
        self._welcomed: list[Fake] = []
        self._run, self._inc, self._beat_s = "", 0, 2.0
        self.rounds: list[tuple[float, float]] = []
        self.over = False

    def run(self) -> None:
        """Answers until the server says that the run is over, or hangs up."""
        beaten, come = time.monotonic(), 0
        while not self.over:
            while come < min(self._job["clients"], len(self._welcomed) + AT_ONCE):
                fake = Fake(self._job["first"] + come, self._job["host"], self._job["port"])
                self._selector.register(fake.socket, selectors.EVENT_READ, fake)
                come += 1
            for found, _ in self._selector.select(self._beat_s / 4):
                for fields in found.data.heard():
                    self._hear(found.data, fields)
            if self._welcomed and (now := time.monotonic()) - beaten >= self._beat_s / 4:
                beaten = now
                for fake in self._welcomed:
                    if now - fake.said >= self._beat_s:
                        fake.say(m.Alive(run=self._run, inc=self._inc))

    def _hear(self, fake: Fake, fields: JsonDict) -> None:
        what = fields.get("t")
        if what is None:
            fake.say(m.Join(worker=f"fake{fake.client}", ids=[fake.client]))
        elif what == "welcome":
            self._run, self._inc, self._beat_s = fields["run"], fields["inc"], fields["beat_s"]
            self._welcomed.append(fake)
            if len(self._welcomed) == self._job["clients"]:
                for one in self._welcomed:  # while nobody is ready, those who join are not held up
                    one.say(m.Ready(run=self._run, inc=self._inc, layout=self._job["layout"]))
        elif what == "task":
            self._answer(fake, fields["key"])
        elif what == "end":
            self.over = True
        elif what == "refuse":
            raise ConnectionError(f"client {fake.client} was refused: {fields['reason']}")

    # key: as it came, unchecked.
    def _answer(self, fake: Fake, key: list[Any]) -> None:
        if key[0] > len(self.rounds):
            self.rounds.append((time.monotonic(), processor_seconds(self._job["pid"])))
        reply = m.Reply(
            run=self._run,
            inc=self._inc,
            key=m.Key(*key),
            form=self._form,
            size=len(self._body),
            check=self._check,
            seconds=0.001,
            split=[0.001, 0.0, 0.0],
        )
        fake.say(reply, self._body)


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        idle = IdleClients(json.load(file))
    idle.run()
    print(json.dumps({"rounds": idle.rounds, "cpu_s": time.process_time()}))


if __name__ == "__main__":
    main(sys.argv[1])

"""Seconds for N clients to each get and give M megabytes over loopback: python -m
tests.bench.bench_transport [N] [M]

bare/whole   a plain ROUTER and DEALERs, each payload one frame: the floor, with no bound on memory
bare/pulled  the same sockets, parts of 1 MiB pulled with a window
fednet       our classes, parts of 1 MiB pulled with a window
Clients are processes of their own; what is measured runs from "all are connected" to "the last byte
is in".
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from typing import Any

import zmq

from fednet.transport.base import Opened, Received
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer

PART = 2**20
WINDOW = 4


def parts(size: int) -> list[tuple[int, int]]:
    return [(at, min(at + PART, size)) for at in range(0, size, PART)]


class Sender:
    """Gives out parts as they are asked for."""

    def __init__(self, body: bytes) -> None:
        self.body, self.spans = memoryview(body), parts(len(body))

    def part(self, index: int) -> list[bytes | memoryview]:
        start, stop = self.spans[index]
        return [b"part %d" % index, self.body[start:stop]]


class Receiver:
    """Asks for parts, a window at a time, and writes them in place."""

    def __init__(self, size: int) -> None:
        self.buffer, self.spans = bytearray(size), parts(size)
        self.asked = self.got = 0

    def asks(self) -> list[bytes]:
        out = []
        while self.asked < len(self.spans) and self.asked - self.got < WINDOW:
            out.append(b"pull %d" % self.asked)
            self.asked += 1
        return out

    def take(self, header: bytes, body: Any) -> bool:
        start, stop = self.spans[int(header[5:])]
        self.buffer[start:stop] = body
        self.got += 1
        return self.got == len(self.spans)


class Bare:
    """The sockets alone, with the calls that the loops below need."""

    def __init__(self, kind: int, address: str, bind: bool) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.router = kind == zmq.ROUTER
        if bind:
            self.socket.bind(address)
        else:
            self.socket.connect(address)
        self.address = self.socket.get_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[tuple[bytes, list[Any]]]:
        conn, *frames = [b""] * (not self.router) + self.socket.recv_multipart(copy=False)
        return [
            (
                conn.bytes if self.router else b"",
                [frames[0].bytes, *[frame.buffer for frame in frames[1:]]],
            )
        ]

    def send(self, conn: bytes, frames: Any) -> None:
        self.socket.send_multipart([conn, *frames] if self.router else frames, copy=False)

    def close(self) -> None:
        self.context.destroy(linger=1000)


class Ours:
    def __init__(self, end: ZmqServer | ZmqClient) -> None:
        self.end = end
        self.address = end.address
        if isinstance(end, ZmqClient):
            while not any(isinstance(event, Opened) for event in end.poll(None)):
                pass

    def receive(self) -> list[tuple[bytes, Any]]:
        return [
            (event.conn, event.frames)
            for event in self.end.poll(None)
            if isinstance(event, Received)
        ]

    def send(self, conn: bytes, frames: Any) -> None:
        sent = (
            self.end.send(conn, frames)
            if isinstance(self.end, ZmqServer)
            else self.end.send(frames)
        )
        assert sent

    def close(self) -> None:
        self.end.close()


def client(kind: str, address: str, size: int, whole: bool) -> None:
    end = Ours(ZmqClient(address)) if kind == "fednet" else Bare(zmq.DEALER, address, False)
    body, receiver, up = bytes(size), Receiver(size), Sender(bytes(size))
    end.send(b"", [b"join"])
    while True:
        for conn, frames in end.receive():
            if frames[0] == b"end":
                end.close()
                return
            if whole:
                receiver.buffer[:] = frames[1]
                end.send(conn, [b"whole", body])
            elif frames[0].startswith(b"pull"):
                end.send(conn, up.part(int(frames[0][5:])))
            elif frames[0] == b"start" or not receiver.take(*frames):
                for ask in receiver.asks():
                    end.send(conn, [ask])
            else:
                end.send(conn, [b"ready"])


def server(kind: str, clients: int, size: int, whole: bool) -> float:
    end = (
        Ours(ZmqServer("tcp://127.0.0.1:0"))
        if kind == "fednet"
        else Bare(zmq.ROUTER, "tcp://127.0.0.1:*", True)
    )
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=client, args=(kind, end.address, size, whole))
        for _ in range(clients)
    ]
    for worker in workers:
        worker.start()
    down, joined, done = Sender(bytes(size)), [], 0
    while len(joined) < clients:
        joined += [conn for conn, _ in end.receive()]
    receivers = {conn: Receiver(size) for conn in joined}
    started = time.perf_counter()
    for conn in joined:
        end.send(conn, [b"whole", down.body] if whole else [b"start"])
    while done < clients:
        for conn, frames in end.receive():
            receiver = receivers[conn]
            if whole:
                receiver.buffer[:] = frames[1]
                done += 1
            elif frames[0].startswith(b"pull"):
                end.send(conn, down.part(int(frames[0][5:])))
            elif frames[0] == b"ready" or not receiver.take(*frames):
                for ask in receiver.asks():
                    end.send(conn, [ask])
            else:
                done += 1
    seconds = time.perf_counter() - started
    for conn in joined:
        end.send(conn, [b"end"])
    for worker in workers:
        worker.join()
    end.close()
    return seconds


WAYS = {"bare/whole": ("bare", True), "bare/pulled": ("bare", False), "fednet": ("fednet", False)}


def main(clients: int = 8, megabytes: int = 45, repeats: int = 3) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(repeats):  # in turns: the machine's other work then strikes all alike
        for name, (kind, whole) in WAYS.items():
            seconds[name].append(server(kind, clients, megabytes * 10**6, whole))
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"{name:12} median {middle:.3f} s, {min(times):.3f} to {max(times):.3f} of {repeats}; "
            f"{2 * clients * megabytes / middle:.0f} MB/s"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

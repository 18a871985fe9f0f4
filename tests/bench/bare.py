"""What a round's bytes cost without fednet, carried as well as we know how: the same payloads
between as many processes, and their mean in float64.

    python -m tests.bench.bare JOB.json

prints {"tcp_s": [...], "mean_s": [...]}, one figure a round: over TCP on loopback, and for the
mean.

Plain sockets with large buffers, a thread for each peer, and arrays that are taken once and written
over: no messages, parts, windows, checks or books.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing as mp
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from fednet.launch.parent import die_with_parent
from fednet.plain import JsonDict

BUFFER_BYTES = 4 << 20  # of a socket; the system may allow less
ROUNDS_FIRST = 1  # in which memory is touched for the first time
BLOCK = 1 << 16  # entries of a sum that are at work at a time


def main(path: str) -> None:
    """The job: processes, payloads (a round), nbytes (of each), rounds."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    print(json.dumps({"tcp_s": over_tcp(job), "mean_s": mean(job)}))


def share(job: JsonDict, k: int) -> int:
    """Payloads of the k-th process in a round."""
    return len(range(k, job["payloads"], job["processes"]))


def over_tcp(job: JsonDict) -> list[float]:
    """Seconds of each round: every payload sent to its process, and as many bytes received back."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with started(job, listening.getsockname()):
            peers = [tuned(listening.accept()[0]) for _ in range(job["processes"])]
            payload = np.ones(job["nbytes"], np.uint8).data
            into = [np.empty(job["nbytes"], np.uint8).data for _ in peers]

            def one(k: int) -> None:
                for _ in range(share(job, k)):
                    peers[k].sendall(payload)
                    receive(peers[k], into[k])

            # Which process is behind which connection is not known; each is told its number.
            for k, peer in enumerate(peers):
                peer.sendall(bytes([k]))
            seconds = timed(job, one)
            for peer in peers:
                peer.close()
    return seconds


def echo(parent: int, job: JsonDict, address: tuple[str, int]) -> None:
    """Answers each payload by one of its size."""
    die_with_parent(parent)  # else it would wait for ever for one that was killed
    with tuned(socket.socket()) as peer:
        peer.connect(address)
        k = peer.recv(1)[0]
        into, answer = np.empty(job["nbytes"], np.uint8).data, np.ones(job["nbytes"], np.uint8).data
        for _ in range((job["rounds"] + ROUNDS_FIRST) * share(job, k)):
            receive(peer, into)
            peer.sendall(answer)


def tuned(one: socket.socket) -> socket.socket:
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        one.setsockopt(socket.SOL_SOCKET, name, BUFFER_BYTES)
    return one


def receive(peer: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        n = peer.recv_into(into[got:])
        if not n:
            raise ConnectionError("the other process has ended")
        got += n


@contextlib.contextmanager
def started(job: JsonDict, address: tuple[str, int]) -> Iterator[None]:
    """Inside, the other processes run."""
    context = mp.get_context("spawn")
    peers = [
        context.Process(target=echo, args=(os.getpid(), job, address))
        for _ in range(job["processes"])
    ]
    for peer in peers:
        peer.start()
    yield
    for peer in peers:
        peer.join()


def timed(job: JsonDict, one: Callable[[int], None]) -> list[float]:
    """Seconds of each round: one(k) does the k-th process's part of it."""
    seconds = []
    for _ in range(job["rounds"] + ROUNDS_FIRST):
        begun = time.perf_counter()
        threads = [threading.Thread(target=one, args=(k,)) for k in range(job["processes"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begun)
    return seconds[ROUNDS_FIRST:]


def mean(job: JsonDict) -> list[float]:
    """Seconds of one thread for the float64 mean of as many float32 vectors: each block of the sum
    is added to by all of them while it is in the cache, in arrays that are taken once.
    """
    import torch

    torch.set_num_threads(1)
    n, count = job["nbytes"] // 4, job["payloads"]
    values = [torch.ones(n) for _ in range(min(8, count))]
    total, made = torch.zeros(n, dtype=torch.float64), torch.zeros(n)
    wide, seconds = torch.zeros(BLOCK, dtype=torch.float64), []
    for _ in range(job["rounds"] + ROUNDS_FIRST):
        begun = time.perf_counter()
        for start in range(0, n, BLOCK):
            here = slice(start, start + BLOCK)
            block = total[here].zero_()
            own = wide[: len(block)]
            parts = [value[here] for value in values]
            for number in range(count):
                block.add_(own.copy_(parts[number % len(parts)]))
            made[here].copy_(block.div_(count))
        seconds.append(time.perf_counter() - begun)
    return seconds[ROUNDS_FIRST:]


if __name__ == "__main__":
    main(sys.argv[1])

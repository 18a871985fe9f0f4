"""What a round's bytes cost without fednet, carried as well as we know how: the same payloads
between as many processes, and their mean in float64.

    python -m tests.bench.bare JOB.json

prints {"tcp_s": [...], "mean_s": [...]}, one figure a round: over TCP on loopback, and for the
mean.

Plain sockets with large buffers, a thread for each peer, and arrays that are taken once and written
over: no messages, parts, windows, checks or books.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

from fednet.capacity import die_with_parent
from fednet.plain import JsonDict

BUFFER_BYTES = 4 << 20  # of a socket; the system may allow less
ROUNDS_FIRST = 1  # in which memory is touched for the first time
BLOCK = 1 << 16  # entries of a sum that are at work at a time


def main(path: str) -> None:
    """The job: processes, payloads (a round), nbytes (of each), rounds."""
    job = json.loads(Path(path).read_text())
    print(json.dumps({"tcp_s": over_tcp(job), "mean_s": mean(job)}))


def over_tcp(job: JsonDict) -> list[float]:
    """Seconds of each round: every payload sent to its process, and as many bytes received back."""
    nbytes = job["nbytes"]
    processes = job["processes"]
    seconds = []
    payload = np.ones(nbytes, np.uint8).data

    def carry(k: int) -> None:
        """The k-th process's payloads of a round."""
        for _ in range(k, job["payloads"], processes):
            peers[k].sendall(payload)
            if not receive(peers[k], into[k]):
                raise ConnectionError("the other process has ended")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        job = {"parent": os.getpid(), "address": listening.getsockname(), **job}
        echoes = [
            mp.get_context("spawn").Process(target=echo, args=(job,)) for _ in range(processes)
        ]
        for process in echoes:
            process.start()
        peers = [tuned(listening.accept()[0]) for _ in echoes]
    into = [np.empty(nbytes, np.uint8).data for _ in peers]
    for _ in range(job["rounds"] + ROUNDS_FIRST):
        begun = time.perf_counter()
        threads = [threading.Thread(target=carry, args=(k,)) for k in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begun)
    for peer in peers:
        peer.close()
    for process in echoes:
        process.join()
    return seconds[ROUNDS_FIRST:]


def echo(job: JsonDict) -> None:
    """In a process of its own: answer each payload by one of its size, until the other end
    closes.
    """
    die_with_parent(job["parent"])  # else it would wait for ever for one that was killed
    into, answer = (np.ones(job["nbytes"], np.uint8).data for _ in range(2))
    with tuned(socket.socket()) as peer:
        peer.connect(job["address"])
        while receive(peer, into):
            peer.sendall(answer)


def tuned(one: socket.socket) -> socket.socket:
    for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        one.setsockopt(socket.SOL_SOCKET, name, BUFFER_BYTES)
    return one


def receive(peer: socket.socket, into: memoryview) -> bool:
    """Fill `into`. False: the other end has closed."""
    got = 0
    while got < len(into):
        n = peer.recv_into(into[got:])
        if not n:
            return False
        got += n
    return True


def mean(job: JsonDict) -> list[float]:
    """Seconds of one thread for the float64 mean of as many float32 vectors: each block of the sum
    is added to by all of them while it is in the cache, in arrays that are taken once.
    """
    import torch

    torch.set_num_threads(1)
    n = job["nbytes"] // 4
    count = job["payloads"]
    values = [torch.ones(n) for _ in range(min(8, count))]
    total = torch.zeros(n, dtype=torch.float64)
    made = torch.zeros(n)
    wide = torch.zeros(BLOCK, dtype=torch.float64)
    seconds = []
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

"""What a round's bytes cost without fednet: the same payloads over bare ROUTER and DEALER sockets,
and their mean in float64.

    python -m fednet.bench.exchange JOB.json

prints {"tcp_s": [...], "ipc_s": [...], "mean_s": [...]}, one figure a round.

Each payload is pushed whole, as one message, and answered by one of its size: no parts, no windows,
no checks, no books.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import tempfile
import time
from typing import Any

import numpy as np
import zmq


def main(path: str) -> None:
    """The job: processes, payloads (a round), nbytes (of each), rounds."""
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    with tempfile.TemporaryDirectory(prefix="fednet-ipc-") as folder:
        print(
            json.dumps(
                {
                    "tcp_s": exchange(job, "tcp://127.0.0.1:*"),
                    "ipc_s": exchange(job, f"ipc://{folder}/socket"),
                    "mean_s": mean(job),
                }
            )
        )


def exchange(job: dict[str, Any], address: str) -> list[float]:
    """Seconds of each round: every payload sent to its process, and as many bytes received back."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    peers = [
        mp.get_context("spawn").Process(
            target=echo, args=(str(router.getsockopt_string(zmq.LAST_ENDPOINT)), k, job)
        )
        for k in range(job["processes"])
    ]
    for peer in peers:
        peer.start()
    for _ in peers:
        router.recv_multipart()
    payload, seconds = np.ones(job["nbytes"], np.uint8).data, []
    for _ in range(job["rounds"]):
        begun = time.perf_counter()
        for number in range(job["payloads"]):
            router.send_multipart([bytes([1 + number % len(peers)]), payload], copy=False)
        for _ in range(job["payloads"]):
            router.recv_multipart(copy=False)
        seconds.append(time.perf_counter() - begun)
    for peer in peers:
        peer.join()
    context.destroy(linger=0)
    return seconds


def echo(address: str, k: int, job: dict[str, Any]) -> None:
    """Answers each message by one of its size."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.routing_id = bytes([1 + k])
    dealer.connect(address)
    dealer.send(b"here")
    answer = np.ones(job["nbytes"], np.uint8).data
    for _ in range(job["rounds"] * len(range(k, job["payloads"], job["processes"]))):
        dealer.recv(copy=False)
        dealer.send(answer, copy=False)
    dealer.close(linger=-1)
    context.term()


def mean(job: dict[str, Any]) -> list[float]:
    """Seconds of one thread for the float64 mean of as many float32 vectors, in passes that stay in
    the cache.
    """
    import torch

    torch.set_num_threads(1)
    values = [torch.ones(job["nbytes"] // 4) for _ in range(min(2, job["payloads"]))]
    total, seconds = torch.zeros(job["nbytes"] // 4, dtype=torch.float64), []
    for _ in range(job["rounds"]):
        begun = time.perf_counter()
        for number in range(job["payloads"]):
            for into, part in zip(
                total.split(1 << 16), values[number % len(values)].split(1 << 16)
            ):
                into.add_(part.double())
        (total / job["payloads"]).float()
        seconds.append(time.perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])

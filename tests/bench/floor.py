"""The floor of a round: the same SGD steps in plain PyTorch, in as many processes as there are
cores, with no communication. The best plain loop we know: one gather an epoch and then slices,
fused SGD without torch's `Optimizer` around it, channels-last kernels unless the job says other,
and freed memory that is kept for the next step instead of going back to the system.
On a GPU the data are there, and one process does all.

    python -m tests.bench.floor WORKLOAD.json      prints {"seconds": [...]}, one figure a round
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.launch.parent import die_with_parent
from fednet.plain import JsonDict

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    import torch


def main(path: str) -> None:
    work = json.loads(Path(path).read_text())
    context = mp.get_context("spawn")
    barrier = context.Barrier(work["processes"] + 1)
    workers = [
        context.Process(target=train, args=(os.getpid(), work, k, barrier))
        for k in range(work["processes"])
    ]
    for w in workers:
        w.start()
    seconds = []
    barrier.wait()  # all have built what they need, and taken a first step
    for _ in range(work["rounds"]):
        begun = time.perf_counter()
        barrier.wait()
        seconds.append(time.perf_counter() - begun)
    for w in workers:
        w.join()
    print(json.dumps({"seconds": seconds}))


def train(parent: int, work: JsonDict, k: int, barrier: Barrier) -> None:
    """The k-th process's share of each round's clients."""
    import torch
    from torch import nn
    from torch.optim.sgd import sgd

    from fednet import capacity, models

    die_with_parent(parent)  # else it would wait at the barrier for one that was killed
    torch.set_num_threads(1)
    capacity.keep_freed_memory()
    shape = tuple(work["shape"])
    n = work["samples"]
    size = work["batch_size"]
    model = models.build(work["model"], shape, 10, 0)
    torch.backends.cuda.matmul.allow_tf32 = work.get("tf32", False)
    torch.backends.cudnn.allow_tf32 = work.get("tf32", False)
    device = torch.device(work.get("device", "cpu"))
    model = model.to(device)
    innermost = work.get("channels_last", True)
    if innermost and any(isinstance(part, nn.Conv2d) for part in model.modules()):
        model = model.to(memory_format=torch.channels_last)
    draw = torch.Generator().manual_seed(k)
    data = [
        (
            torch.randn((n, *shape), generator=draw).to(device),
            torch.randint(0, 10, (n,), generator=draw).to(device),
        )
        for _ in range(min(8, work["per_round"]))
    ]
    loss = nn.CrossEntropyLoss()
    parameters = list[torch.Tensor](model.parameters())
    plain: JsonDict = {"fused": True, "lr": work["lr"], "momentum": 0.0, "weight_decay": 0.0}
    plain |= {"dampening": 0.0, "nesterov": False, "maximize": False}

    def client(number: int) -> None:
        x, y = data[number % len(data)]
        buffers: list[torch.Tensor | None] = [None] * len(parameters)
        index = torch.randperm(n, generator=draw).to(device)
        xs = x.index_select(0, index)
        ys = y.index_select(0, index)
        if innermost and xs.dim() == 4:
            xs = xs.contiguous(memory_format=torch.channels_last)
        for step, start in enumerate(range(0, n, size)):
            if work["steps"] is not None and step >= work["steps"]:
                break
            loss(model(xs[start : start + size]), ys[start : start + size]).backward()
            with torch.no_grad():
                gradients = [p.grad for p in parameters if p.grad is not None]
                sgd(parameters, gradients, buffers, **plain)
            for p in parameters:
                p.grad = None

    mine = range(k, work["per_round"], work["processes"])
    client(0)
    barrier.wait()
    for _ in range(work["rounds"]):
        for number in mine:
            client(number)
        if device.type == "cuda":
            torch.cuda.synchronize()
        barrier.wait()


if __name__ == "__main__":
    main(sys.argv[1])

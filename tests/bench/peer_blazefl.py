"""BlazeFL (the package `blazefl`, 2.0) on a workload of these benchmarks: its own FedAvg with the
LeNet-5 of its benchmark, on data that lie in memory. It needs nothing of fednet's, so that it may
run in an environment of its own.

    PYTHON tests/bench/peer_blazefl.py WORKLOAD.json

prints {"seconds": [...], "cpu_s": S}, one figure a round and processor seconds of a round.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # else the optimizer imports it, in each of the new processes of each round
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

# Here, so that forked processes have them and nothing of them is sent.
DATA: list[TensorDataset] = []


class Samples:
    """Each client's samples; a batch is one gather."""

    def get_dataloader(
        self, type_: str, cid: int, batch_size: int, generator: torch.Generator
    ) -> DataLoader[Any]:
        own = DATA[cid]
        batches = BatchSampler(RandomSampler(own, generator=generator), batch_size, False)
        return DataLoader(own, sampler=batches, batch_size=None)

    def get_dataset(self, type_: str, cid: int) -> None:
        return None

    def set_dataset(self, type_: str, cid: int, dataset: object) -> None:
        return None


class Models:
    """The CNN of its benchmark, from PyTorch's tutorial on CIFAR-10."""

    def select_model(self, name: str) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )


def main(path: str) -> None:
    work = json.loads(Path(path).read_text())
    mp.set_start_method("fork")  # the quickest
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    for _ in range(work["clients"]):
        xs = torch.randn((work["samples"], *work["shape"]), generator=draw)
        ys = torch.randint(0, 10, (work["samples"],), generator=draw)
        DATA.append(TensorDataset(xs, ys))
    both = {
        "model_selector": Models(),
        "model_name": "cnn",
        "dataset": Samples(),
        "device": "cpu",
        "num_clients": work["clients"],
        "batch_size": work["batch_size"],
        "seed": 0,
    }
    rounds = work["rounds"] + work["untimed"]
    ratio = work["per_round"] / work["clients"]
    server = FedAvgBaseServerHandler(**both, global_round=rounds, sample_ratio=ratio)
    own = {**both, "epochs": 1, "lr": work["lr"], "num_parallels": work["processes"]}
    seconds: list[float] = []
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        clients: Any
        if work["in_threads"]:
            clients = FedAvgThreadPoolClientTrainer(**own)
        else:
            clients = FedAvgProcessPoolClientTrainer(
                **own,
                share_dir=Path(folder) / "share",
                state_dir=Path(folder) / "state",
                ipc_mode=IPCMode.SHARED_MEMORY,
            )
        while not server.if_stop():
            begun = time.perf_counter()
            before = processor()
            clients.local_process(server.downlink_package(), server.sample_clients())
            for reply in clients.uplink_package():
                server.load(reply)
            seconds.append(time.perf_counter() - begun)
            spent.append(processor() - before)
    timed = slice(work["untimed"], None)
    print(json.dumps({"seconds": seconds[timed], "cpu_s": statistics.median(spent[timed])}))


def processor() -> float:
    """Seconds of this process and of those that it made and that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, whose))


if __name__ == "__main__":
    main(sys.argv[1])

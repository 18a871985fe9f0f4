"""The local epochs of many small clients on one device: one after another, as one (`train.pack`),
and on a card each in a thread and stream of its own.

All are what a worker does for a task, from the weights that came to those that go, without codec
and files: one after another in one thread; packed in a thread a client, which meet as in a run; and
at a card's slots, as without `train.pack`. In turn, several times, in one process.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fednet import config as configuration
from fednet.client.packing import Packing
from fednet.experiment import build, determinism, placement
from fednet.plain import JsonDict, JsonMapping
from fednet.training.hosts import ClientHost
from fednet.training.loop import Descent
from fednet.training.setting import Splits
from fednet.wire.payload import Run
from tests.bench.run import cell, spread


@dataclass(frozen=True, slots=True)
class Size:
    """A model, and the local task measured with it: an epoch in batches of batch_size over samples
    of `shape`, in 10 classes.
    """

    text: str
    model: JsonMapping
    samples: int
    batch_size: int
    shape: tuple[int, ...] = (3, 32, 32)

    def experiment(self, clients: int, train: JsonMapping) -> build.Experiment:
        """That of FedAvg. train: further keys of that section."""
        config = configuration.from_mapping(
            {
                "name": "bench",
                "clients": clients,
                "participation": None,
                "clients_per_round": clients,
                "rounds": 1000,
                "model": dict(self.model),
                "train": {"epochs": 1, "batch_size": self.batch_size, "lr": 0.01, **train},
                "data": {
                    "dataset": "synthetic",
                    "samples": clients * self.samples,
                    "shape": list(self.shape),
                    "classes": 10,
                    "partition": {"scheme": "iid"},
                    "client_test": "none",
                },
                "evaluate": {"every": 0, "clients": "none"},
            },
            "the benchmark",
        )
        determinism.set_switches(config.train)
        return build.build(config)


SIZES = {
    "cnn": Size("LeNet-5 (62,006 parameters), 16 steps of batch 64", {"name": "lenet5"}, 1024, 64),
    "mlp": Size(
        "MLP of 11.2 M parameters (45 MB), 6 steps of batch 8",
        {"name": "mlp", "hidden": [2150, 2150]},
        48,
        8,
    ),
    "pfl": Size(
        "pfl-research's CNN (1.6 M parameters), 5 steps of batch 10", {"name": "pfl_cnn"}, 50, 10
    ),
    "resnet18": Size(
        "ResNet-18 with GroupNorm, 4 steps of batch 64", {"name": "resnet18_gn"}, 256, 64
    ),
    "feddc": Size(
        "FedDC's Table 1: ConvNet of width 128, 79 steps of batch 64",
        {"name": "convnet3", "width": 128},
        5000,
        64,
    ),
    "convnet": Size(
        "ConvNet of width 128 (320,010 parameters), 16 steps of batch 64",
        {"name": "convnet3", "width": 128},
        1024,
        64,
    ),
}


class Clients:
    """m clients of one size on a device, with the same weights to start from."""

    def __init__(self, size: str, m: int, device: str, train: JsonMapping | None = None) -> None:
        """See `Size.experiment` for train."""
        self.built = SIZES[size].experiment(m, train or {})
        self.m, self.device = m, device
        self.data = [self.built.divided.site(k, device).train for k in range(m)]
        self.scratches = [self.built.scratch(device) for _ in range(m)]
        self.start = self.built.setting.initial.to(device)
        self.packing = Packing(m, self.built.setting.task, lambda device: m)
        self.pool = ThreadPoolExecutor(m, initializer=determinism.set_thread)
        self.streams = [
            torch.cuda.Stream(device) if device.startswith("cuda") else None for _ in range(m)
        ]

    def apart(self) -> float:
        """Seconds."""
        return self._timed(self._each)

    def together(self) -> float:
        """Seconds. A pack of all."""
        for _ in range(self.m):
            self.packing.expect()
        return self._timed(lambda: list(self.pool.map(self._in_pack, range(self.m))))

    def beside(self) -> float:
        """Seconds. All at once, each by itself."""
        return self._timed(lambda: list(self.pool.map(self._in_stream, range(self.m))))

    def _each(self) -> None:
        # In a stream of its own, as at a worker: a step cannot be captured in the default one.
        with (
            contextlib.nullcontext()
            if self.streams[0] is None
            else torch.cuda.stream(self.streams[0])
        ):
            for k in range(self.m):
                self._client(k, 0, None)

    def _in_pack(self, k: int) -> None:
        with self.packing.at_work(0):
            self._in_stream(k, functools.partial(self.packing.descend, 0))

    def _in_stream(self, k: int, pack: Callable[[Descent], Run] | None = None) -> None:
        stream = self.streams[k]
        if stream is None:
            self._client(k, k, pack)
        else:
            with torch.cuda.stream(stream):
                self._client(k, k, pack)

    def _client(self, k: int, scratch: int, pack: Callable[[Descent], Run] | None) -> None:
        host = ClientHost(
            self.built.setting,
            self.scratches[scratch],
            k,
            1,
            splits=Splits(self.data[k]),
            pack=pack,
        )
        host.train(self.start)

    def _timed(self, work: Callable[[], object]) -> float:
        self._settle()
        begun = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - begun

    def _settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)


def bench(size: str, m: int, device: str, repeat: int) -> JsonDict:
    place = placement.place(device)[0]
    clients = Clients(size, m, place)
    ways = {"apart": clients.apart, "together": clients.together}
    if place != "cpu":
        ways["beside"] = clients.beside
    for way in ways.values():  # the first time imports, and chooses kernels
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            found[name].append(1e3 * way())
    clients.pool.shutdown()
    record = {
        "size": size,
        "clients": m,
        "device": place,
        "device_name": torch.cuda.get_device_name(place) if place != "cpu" else "cpu",
        "torch": str(torch.__version__),
        "repeat": repeat,
        "apart_ms": spread(found["apart"]),
        "together_ms": spread(found["together"]),
        "ratio": spread([a / b for a, b in zip(found["apart"], found["together"])]),
    }
    if "beside" in found:
        record["beside_ratio"] = spread([a / b for a, b in zip(found["apart"], found["beside"])])
    return record


def line(record: JsonMapping) -> str:
    """One record as a line of the table."""
    beside = (
        f"; at once {cell(record, 'beside_ratio', 2)} times" if "beside_ratio" in record else ""
    )
    return (
        f"{record['size']} on {record['device_name']}, {record['clients']} clients: one after "
        f"another {cell(record, 'apart_ms', 0)} ms, packed {cell(record, 'together_ms', 0)} ms, "
        f"{cell(record, 'ratio', 2)} times the rate{beside}"
    )

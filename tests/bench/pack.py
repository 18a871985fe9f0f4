"""The local epochs of many small clients on one device: one after another, as one (`train.pack`),
and on a card each in a thread and stream of its own.

All are what a worker does for a task, from the weights that came to those that go, without codec
and files: one after another; packed, as in a run; and at a card's slots, as without `train.pack`.
In turn, several times, in one process.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from fednet import config as configuration
from fednet.client.packs import Packs
from fednet.experiment import build, determinism, placement
from fednet.plain import JsonDict, JsonMapping
from fednet.tensors import Tensors
from fednet.training.hosts import ClientHost
from fednet.training.loop import Descent
from fednet.training.setting import Splits
from fednet.wire.payload import LocalRun
from tests.bench.run import cell, spread
from tests.bench.workloads import WORKLOADS


class Clients:
    """m clients of one size on a device, with the same weights to start from.

    train: further keys of that section.
    """

    def __init__(self, size: str, m: int, device: str, train: JsonMapping | None = None) -> None:
        work = replace(WORKLOADS[size], clients=m, per_round=m)
        config = configuration.from_mapping(work.config(1000, train=train), "the benchmark")
        determinism.set_switches(config.train)
        self.built = build.build(config)
        self.m = m
        self.device = device
        self.data = [self.built.known_federation.site(k, device).train for k in range(m)]
        self.scratches = [self.built.scratch(device) for _ in range(m)]
        self.start = self.built.setting.initial.to(device)
        self.trained: dict[int, Tensors] = {}
        """What each client's training came to last."""
        self.packs = Packs(m, self.built.setting.task)
        self.pool = ThreadPoolExecutor(m, initializer=determinism.set_thread)
        # As at a worker: a step cannot be captured in the default stream.
        self.streams = [
            torch.cuda.stream(torch.cuda.Stream(device))
            if device.startswith("cuda")
            else contextlib.nullcontext()
            for _ in range(m)
        ]

    def apart(self) -> float:
        """Seconds. One after another, in one stream and scratch."""
        return self._timed(lambda: [self._client(k, place=0) for k in range(self.m)])

    def together(self) -> float:
        """Seconds. A pack of all."""

        def work() -> None:
            calls = [
                functools.partial(self._client, k, 0, self.packs.descend) for k in range(self.m)
            ]
            self.packs.work(calls.pop(), lambda running: calls.pop() if calls else None)

        return self._timed(work)

    def beside(self) -> float:
        """Seconds. All at once, each by itself."""
        everyone = range(self.m)
        return self._timed(lambda: list(self.pool.map(self._client, everyone, everyone)))

    def _client(
        self, k: int, place: int, pack: Callable[[Descent], LocalRun] | None = None
    ) -> None:
        splits = Splits(self.data[k], self.data[k])
        host = ClientHost(self.built.setting, self.scratches[place], k, 1, splits=splits, pack=pack)
        # Packed clients share a thread, and so its stream.
        with self.streams[place] if pack is None else contextlib.nullcontext():
            self.trained[k] = host.train(self.start).x

    def _timed(self, work: Callable[[], object]) -> float:
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        work()
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begun


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
    text = (
        f"{record['size']} on {record['device_name']}, {record['clients']} clients: one after "
        f"another {cell(record, 'apart_ms', 0)} ms, packed {cell(record, 'together_ms', 0)} ms, "
        f"{cell(record, 'ratio', 2)} times the rate"
    )
    if "beside_ratio" in record:
        text += f"; at once {cell(record, 'beside_ratio', 2)} times"
    return text

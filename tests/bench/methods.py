"""What each method's two halves cost beside the plainest there is.

    python -m tests.bench.methods --size cnn --method fedprox,moon

server: all that a method's own functions do in a round (broadcast, start, fold, finish) over random
replies, beside FedAvg's. client: its local task, beside the same SGD steps in plain PyTorch. Both
are measured in turn with what they are compared to, several times, so that the ratio holds where
the machine's speed drifts. No codec, socket or other process takes part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednet import models, registry
from fednet.algorithms.base import Run, Samples, Tensors
from fednet.algorithms.state import PerClient
from fednet.errors import ConfigError, unknown
from fednet.experiment.build import Experiment
from fednet.experiment.store import RowStore, on_disk
from fednet.training.hosts import ServerHost, SiteHost
from tests.bench.family import machine
from tests.bench.pack import SIZES, Size
from tests.bench.run import spread
from tests.bench.servercost import one_round

POOL = 3  # distinct random replies: together more than a cache holds where the model is large


# What is done once is not measured.
OPTIONS: dict[str, dict[str, Any]] = {"feddc": {"iterations": 1}, "feddcplus": {"iterations": 1}}


def made(method: str, size: Size, clients: int) -> Experiment:
    """The experiment of a method, with a public set where it needs one."""
    known = registry.algorithm.names()
    if method not in known:
        raise ConfigError(f"--method: {unknown('algorithm', method, known)}")
    options = {"name": method, **OPTIONS.get(method, {})}
    return size.experiment(options, clients, 512 * registry.algorithm.get(method).needs_public)


# -- the server's half -----------------------------------------------------------------------------
class ServerIO(ServerHost):
    """A server's host that keeps apart what is spent in models: scoring (FedPDC) and fine-tuning
    (FedDC).
    """

    in_models = 0.0

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().evaluate, args, kwargs)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed(super().fit, args, kwargs)

    def _timed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.in_models += time.perf_counter() - begun


class ServerHalf:
    """One method's server, round after round with the same participants: half of its clients."""

    def __init__(self, built: Experiment, cohort: int, rows: RowStore | None = None) -> None:
        self.built, self.method = built, built.algorithm
        self.host = ServerIO(
            built.setting, lambda: built.scratch("cpu"), 2 * cohort, built.federation.public_data()
        )
        first = self.method.prepare(
            self.method.init_server(built.setting.initial.select(built.shared)), self.host
        )
        self.server = first if rows is None else on_disk(first, rows)  # as in a run
        self.cohort, self.rows = tuple(range(cohort)), rows
        self._vectors: dict[Any, list[Tensors]] = {}
        self.received = 0  # bytes of tensors a client, all exchanges together
        self._round = 0

    def round(self) -> tuple[float, float]:
        """(seconds in the method's own functions, of these in models)."""
        self._round += 1
        self.host.in_models, self.received = 0.0, 0
        self.server, spent = one_round(
            self.method, self.server, self.host, self._round, self.cohort, self._reply
        )
        server = self.server
        if self.rows is not None:  # with the checkpoint
            self.rows.prune(
                {
                    row
                    for value in vars(server).values()
                    if isinstance(value, PerClient)
                    for row in value.rows.values()
                }
            )
        return spent, self.host.in_models

    def _reply(self, payload: Any, client: int) -> Any:
        values: dict[str, Any] = {}
        for k, (name, field) in enumerate(payload.fields.items()):
            if field.form in ("tensors", "parameters"):
                pool = self._pool(field.form)
                values[name] = pool[(client + k + self._round) % len(pool)]
            elif field.form == "samples":
                values[name] = Samples(torch.zeros(10, *self.built.input_shape), torch.arange(10))
            elif field.form == "array":
                values[name] = stand_in(self.built, payload, client, name)
            else:
                values[name] = Run(500, 2 + client % 2, 1.0) if field.form == "run" else 0.5
        if client == self.cohort[0]:
            tensors = [v for v in values.values() if isinstance(v, Tensors)]
            self.received += sum(v.layout.nbytes for v in tensors)
        return payload(**values)

    def _pool(self, form: str) -> list[Tensors]:
        layout = self.built.shared if form == "tensors" else self.built.shared.parameters
        if form not in self._vectors:
            draw = torch.Generator().manual_seed(0)
            zero = Tensors.zeros(layout)
            self._vectors[form] = [
                zero.with_vector(torch.randn(len(zero.vector), generator=draw).mul_(0.01))
                for _ in range(POOL)
            ]
        return self._vectors[form]


def stand_in(built: Experiment, payload: Any, client: int, name: str) -> torch.Tensor:
    """Ones in as many bytes as the method says of this field; of rank 2 with a row for each
    class.
    """
    field = payload.fields[name]
    dtype: torch.dtype = getattr(torch, field.dtype)
    nbytes = built.algorithm.sizes(payload, built.facts(client))[name]
    ones = torch.ones(nbytes // dtype.itemsize, dtype=dtype)
    return ones if field.rank == 1 else ones.view(built.setting.classes, -1)


# -- the client's half -----------------------------------------------------------------------------
class ClientHalf:
    """One client's local task in a later round than its first: it has what it keeps, the server
    what it sends.
    """

    def __init__(self, built: Experiment, size: Size) -> None:
        self.built, self.method, self.size = built, built.algorithm, size
        self.scratch = built.scratch("cpu")
        self.data = built.federation.site(0).train
        self.io = ServerIO(
            built.setting, lambda: built.scratch("cpu"), 2, built.federation.public_data()
        )
        self.server = self.method.prepare(
            self.method.init_server(built.setting.initial.select(built.shared)), self.io
        )
        self.state = self.method.init_client(built.setting.initial)
        enrolment = self.method.enroll(self.server, 0, self.io)
        if enrolment is not None:
            self.state = self.method.enrolled(self.state, enrolment, self._host(1, 0, None))
        self._round = 0

    def _host(self, round: int, phase: int, progress: Any) -> SiteHost:
        return SiteHost(
            self.built.setting, self.scratch, 0, round, phase, train=self.data, progress=progress
        )

    def task(self) -> tuple[list[float], float]:
        """(seconds of each SGD step but the first, seconds of all the method does at the client
        over its steps), one round.
        """
        self._round += 1
        state, server, times, whole, steps = self.state, self.server, list[float](), 0.0, 0
        for phase in range(len(self.method.exchanges)):
            self.io.begin(self._round, phase, (0,))
            down, marks = self.method.broadcast(server, phase, 0), list[float]()
            host = self._host(
                self._round,
                phase,
                lambda step, steps: marks.append(time.perf_counter()),  # noqa: B023
            )
            begun = time.perf_counter()
            state, up = self.method.client_update(phase, state, down, host)
            whole += time.perf_counter() - begun
            times += [b - a for a, b in itertools.pairwise(marks)]
            steps += len(marks)
            server = self.method.server_update(
                self.method.accumulate(
                    self.method.init_accumulator(server, phase), server, 0, up, self.io
                ),
                server,
                (0,),
                self.io,
            )
        self.state, self.server = state, server
        return times, whole / (steps or math.ceil(self.size.samples / self.size.batch_size))


class Plain:
    """The same steps as anyone would write them: one gather, slices, fused SGD, channels-last
    kernels. forwards: of a further model each, without gradients, on each batch (what MOON's loss
    takes).
    """

    def __init__(self, size: Size, forwards: int = 0) -> None:
        self.size, self.models = (
            size,
            [models.build(dict(size.model), size.shape, 10, k) for k in range(1 + forwards)],
        )
        self.last = any(isinstance(part, nn.Conv2d) for part in self.models[0].modules())
        if self.last:
            self.models = [m.to(memory_format=torch.channels_last) for m in self.models]  # type: ignore[call-overload]
        draw = torch.Generator().manual_seed(0)
        self.data = (
            torch.randn((size.samples, *size.shape), generator=draw),
            torch.randint(0, 10, (size.samples,), generator=draw),
        )
        self.draw = draw

    def task(self) -> tuple[list[float], float]:
        """As `ClientHalf.task`."""
        begun, marks, size, (model, *others) = (
            time.perf_counter(),
            list[float](),
            self.size,
            self.models,
        )
        optimizer, loss = (
            torch.optim.SGD(model.parameters(), lr=0.01, fused=True),
            nn.CrossEntropyLoss(),
        )
        index = torch.randperm(size.samples, generator=self.draw)
        xs, ys = self.data[0].index_select(0, index), self.data[1].index_select(0, index)
        if self.last:
            xs = xs.contiguous(memory_format=torch.channels_last)
        for x, y in zip(xs.split(size.batch_size), ys.split(size.batch_size)):
            with torch.no_grad():
                for other in others:
                    other(x)
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            marks.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(marks)], (time.perf_counter() - begun) / len(
            marks
        )


# -- both ------------------------------------------------------------------------------------------
def servers(names: Sequence[str], size: str, cohort: int, repeat: int) -> Iterator[dict[str, Any]]:
    """One record a method: its server's round over FedAvg's, taken in turn."""
    base = ServerHalf(made("fedavg", SIZES[size], 2 * cohort), cohort)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fednet-rows-") as folder:
            half = ServerHalf(made(name, SIZES[size], 2 * cohort), cohort, RowStore(Path(folder)))
            half.round(), half.round(), base.round()
            pairs = [(base.round()[0], *half.round()) for _ in range(repeat)]
        yield {
            "half": "server",
            "method": name,
            "size": size,
            "replies": cohort,
            "repeat": repeat,
            "ms": spread([1e3 * (own - inside) for _, own, inside in pairs]),
            "in_models_ms": spread([1e3 * inside for *_, inside in pairs]),
            "ratio": spread([(own - inside) / plain for plain, own, inside in pairs]),
            "received": half.received / base.received,
        }


def clients(names: Sequence[str], size: str, repeat: int) -> Iterator[dict[str, Any]]:
    """One record a method: its median step, and its whole task per step, over the plain loop's,
    taken in turn. FedSGD takes a gradient and no step; what it takes for an epoch's batches stands
    for its task.
    """
    for name in names:
        forwards = 2 if name == "moon" else 0
        half, plain = (
            ClientHalf(made(name, SIZES[size], 2), SIZES[size]),
            Plain(SIZES[size], forwards),
        )
        half.task(), half.task(), plain.task()
        pairs = [(plain.task(), half.task()) for _ in range(repeat)]
        steps = [
            (statistics.median(p[0]), statistics.median(h[0]), p[1], h[1]) for p, h in pairs if h[0]
        ]
        record = {
            "half": "client",
            "method": name,
            "size": size,
            "repeat": repeat,
            "forwards": 1 + forwards,
        }
        if not steps:
            yield record | {
                "ms": None,
                "ratio": None,
                "task": spread([h[1] / p[1] for p, h in pairs]),
            }
            continue
        yield record | {
            "ms": spread([1e3 * h for _, h, *_ in steps]),
            "ratio": spread([h / p for p, h, *_ in steps]),
            "task": spread([h / p for *_, p, h in steps]),
        }


def bench(
    names: Sequence[str] | None,
    sizes: Sequence[str],
    halves: Sequence[str],
    cohort: int,
    repeat: int,
) -> Iterator[dict[str, Any]]:
    """Records, as they are made. names: None for all registered methods."""
    for size in sizes:
        if size not in SIZES:
            raise ConfigError(f"--size: {unknown('size', size, SIZES)}")
    chosen = list(names) if names is not None else registry.algorithm.names()
    for half, size in itertools.product(halves, sizes):
        yield from (
            servers(chosen, size, cohort, repeat)
            if half == "server"
            else clients(chosen, size, repeat)
        )


def line(record: Mapping[str, Any]) -> str:
    """One record as a line of the table."""

    def cell(key: str, digits: int = 2) -> str:
        s = record[key]
        return (
            "-"
            if s is None
            else f"{s['median']:.{digits}f} [{s['min']:.{digits}f} {s['max']:.{digits}f}]"
        )

    if record["half"] == "server":
        models_ms = record["in_models_ms"]["median"]
        more = f"; in models {models_ms:.1f} ms" if models_ms else ""
        return (
            f"server {record['size']} {record['method']:10} {cell('ms'):>24} ms  to FedAvg "
            f"{cell('ratio'):>18}  "
            f"receives {record['received']:.2f}{more}"
        )
    return (
        f"client {record['size']} {record['method']:10} {cell('ms'):>24} ms a step  to plain SGD"
        f"{' and two forwards' if record['forwards'] > 1 else ''} {cell('ratio'):>18}  whole task "
        f"{cell('task'):>18}"
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.methods", description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), help="[all]")
    parser.add_argument("--method", metavar="A,...", help="[all that are registered]")
    parser.add_argument("--half", choices=["server", "client"], help="[both]")
    parser.add_argument("--replies", type=int, default=10, help="of the server's round [10]")
    parser.add_argument("--repeat", type=int, default=3, help="[3]")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    args = parser.parse_args(words)
    names = args.method.split(",") if args.method else None
    sizes = [args.size] if args.size else list(SIZES)
    halves = [args.half] if args.half else ["server", "client"]
    print(machine(), flush=True)
    records = []
    for record in bench(names, sizes, halves, args.replies, args.repeat):
        records.append(record)
        print(line(record), flush=True)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

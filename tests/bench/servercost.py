"""Measures FedDPC's Table 1: the server's computation in a round, for which the paper gives O
notation.

    python -m tests.bench.servercost

A method's `broadcast`, `accumulate` and `server_update` run on random updates, without training,
codec or network. d: number of parameters; k': number of participants.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fednet import config as configuration
from fednet import papers
from fednet.algorithms.base import Algorithm, Payload, State
from fednet.experiment import build as experiment
from fednet.experiment import determinism
from fednet.plain import JsonDict
from fednet.tensors import Layout, Tensors
from fednet.training.hosts import ServerHost
from fednet.wire.payload import P, Run

MODELS: dict[str, JsonDict] = {
    "lenet5": {"name": "lenet5"},
    "resnet18_gn": {"name": "resnet18_gn", "gn_groups": 2, "stem": "cifar"},
}
METHODS = {"FedAvg": {"name": "fedavg", "weighting": "uniform"}}  # and those of Table 2
CLIENTS, COHORT, ROUNDS = 100, 10, 7
DATA = {
    "dataset": "synthetic",
    "samples": 2000,
    "shape": [3, 32, 32],
    "classes": 10,
    "partition": {"scheme": "iid"},
    "client_test": "none",
}


def measured(
    algorithm: JsonDict, model: JsonDict, cohort: int = COHORT, rounds: int = ROUNDS
) -> tuple[float, int]:
    """(median seconds of the server's part of a round after the first two, d)."""
    config = configuration.from_mapping(
        {
            "name": "cost",
            "clients": CLIENTS,
            "clients_per_round": cohort,
            "participation": None,
            "rounds": rounds,
            "algorithm": algorithm,
            "model": model,
            "train": {"epochs": 1, "batch_size": 64, "lr": 0.01},
            "data": DATA,
        },
        "the server's cost",
    )
    determinism.set_switches(config.train)
    made = experiment.build(config)
    host = ServerHost(made.setting, lambda: made.scratch("cpu"), CLIENTS)
    method = made.algorithm
    server = method.prepare(method.init_server(made.setting.initial.select(made.shared)), host)
    draws = np.random.default_rng(0)
    spent = []
    for t in range(1, rounds + 1):
        chosen = sorted(draws.choice(CLIENTS, cohort, replace=False).tolist())
        server, seconds = one_round(
            method, server, host, t, chosen, lambda up, client: random(up, made.shared, draws)
        )
        spent.append(seconds)
    return statistics.median(spent[2:]), made.shared.parameters.nbytes // 4


def one_round(
    method: Algorithm,
    server: State,
    host: ServerHost,
    round: int,
    cohort: Sequence[int],
    reply: Callable[[type[Payload], int], Payload],
) -> tuple[State, float]:
    """(the server's next state, seconds in the method's own functions). reply(payload, client):
    what a client would send.
    """
    seconds = 0.0
    for phase, exchange in enumerate(method.exchanges):
        host.begin(round, phase, cohort)
        replies = [reply(exchange.up, client) for client in cohort]
        begun = time.perf_counter()
        for client in cohort:
            method.broadcast(server, phase, client)
        fold = method.init_accumulator(server, phase)
        for client, up in zip(cohort, replies):
            fold = method.accumulate(fold, server, client, up, host)
        server = method.server_update(fold, server, cohort, host)
        seconds += time.perf_counter() - begun
    return server, seconds


def random(payload: type[P], layout: Layout, draws: np.random.Generator) -> P:
    """A reply with random tensors of the model's size."""
    values: JsonDict = {}
    for name, field in payload.fields.items():
        if field.form in ("tensors", "parameters"):
            own = layout if field.form == "tensors" else layout.parameters
            zero = Tensors.zeros(own)
            vector = torch.from_numpy(
                draws.standard_normal(len(zero.vector), dtype=np.float32) * 0.01
            )
            values[name] = Tensors(own, vector, zero.buffers, zero.counters)
        else:
            values[name] = Run(n=500, steps=2, loss=1.0) if field.form == "run" else 0.5
    return payload(**values)


def report() -> str:
    """The paper's column `total_server` beside the measured times."""
    printed = papers.paper("feddpc")["tables"]["table1"]
    column = printed["columns"].index("total_server")
    algorithms = {
        **METHODS,
        **{c.method: c.config["algorithm"] for c in papers.cells("feddpc/table2")},
    }
    lines = [("method", "paper", *(text for m in MODELS for text in (f"{m}, ms", "to FedAvg")))]
    base: dict[str, float] = {}
    size: dict[str, int] = {}
    for name, row in printed["rows"].items():
        cells = []
        for label, model in MODELS.items():
            seconds, size[label] = measured(algorithms[name], model)
            base.setdefault(label, seconds)
            cells += [f"{1e3 * seconds:.2f}", f"{seconds / base[label]:.1f}"]
        lines.append((name, str(row[column]), *cells))
    wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join(
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, wide)))
        for line in lines
    )
    return (
        f"{text}\n\nk' = {COHORT} of {CLIENTS} clients; "
        + ", ".join(f"{m}: d = {n:,}" for m, n in size.items())
        + f". Median of {ROUNDS - 2} rounds, one thread, sums in float64. The server half "
        f"of each method, without codec and network."
    )


if __name__ == "__main__":
    print(report())

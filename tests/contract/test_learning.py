"""Every registered method learns real images: MNIST where $FEDNET_DATA has it, some rounds of a
small MLP.

Chance is 0.1; after eight such rounds the methods stand between 0.6 and 0.95, those that average
uniformly lowest.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import fednet
from fednet import registry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("FEDNET_DATA"), reason="FEDNET_DATA does not say where MNIST lies"
    ),
]

COMMON: dict[str, Any] = {
    "rounds": 8,
    "clients": 20,
    "participation": 0.5,
    "model": {"name": "mlp", "hidden": [64]},
    "train.lr": 0.05,
    "train.epochs": 1,
    "train.momentum": 0.9,
    "train.batch_size": 64,
    "data": {"dataset": "mnist", "partition": {"scheme": "dirichlet", "alpha": 0.5}},
    "evaluate.every": 8,
}
# What a method needs beside: a shared part, images for its condensation, a step that its own scale
# asks for.
OWN: dict[str, dict[str, Any]] = {
    "fedrds": {"data": {**COMMON["data"], "public": {"fraction": 0.05}}},
    "feddc": {"algorithm": {"name": "feddc", "iterations": 5, "real_batch": 32}},
    "feddcplus": {"algorithm": {"name": "feddcplus", "iterations": 5, "real_batch": 32}},
    # One gradient a round.
    "fedsgd": {"train.lr": 0.5, "train.momentum": 0.0, "rounds": 40, "evaluate.every": 40},
    # Its own gradient counts for a tenth; it refuses local momentum.
    "fedcm": {"train.lr": 0.5, "train.momentum": 0.0},
    # Its step shrinks with the square of how far clients went, for which local momentum is too far.
    "qfedavg": {"train.lr": 0.1, "train.momentum": 0.0},
}


@pytest.mark.parametrize("name", registry.algorithm.names())
def test_method_learns_mnist(name, tmp_path):
    changes = {**COMMON, "algorithm": {"name": name}, "name": name, **OWN.get(name, {})}
    if registry.algorithm.get(name).needs_public:
        changes["data"] = {**changes["data"], "public": {"samples": 500}}
    run = fednet.run(set=changes, in_process=True, out=tmp_path)
    reached = run.rounds[-1].test_accuracy
    judged = run.summary["personal"]
    accuracy = reached if reached is not None else judged["personal"]
    assert accuracy > 0.5, f"{name} reached {accuracy:.3f} after {len(run.rounds)} rounds"

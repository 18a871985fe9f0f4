"""SCAFFOLD."""

from __future__ import annotations

import pytest
import torch

from fednet.config import from_mapping
from tests.algorithms.harness import Federation
from tests.algorithms.reference import LR, Reference, agrees, whole_batches

COHORTS = [[0, 2], [1, 2], [0, 2]]
OPTIONS = [
    {},
    {"option": "I"},
    {"correction": "post"},
    {"server_lr": 0.5},
    {"divisor": "steps"},
    {"mean_over": "participants"},
    {"variates": "random"},
]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("options", OPTIONS)
def test_three_rounds_recomputed_in_float64(options, momentum):
    f = whole_batches(train={"epochs": 3, "momentum": momentum})
    run = f.run("scaffold", cohorts=COHORTS, **options)
    reference = Reference(f)
    x = reference.start
    c = torch.zeros_like(x)
    if "variates" in options:
        c = torch.cat([p.flatten().flip(0).double() for _, p in f.initial.items()])
    c_i = dict.fromkeys(range(4), c)
    tau = 3.0
    if "divisor" not in options and "correction" not in options:
        tau = sum((1 - momentum**k) / (1 - momentum) for k in (1, 2, 3))
    for cohort in COHORTS:
        dy, dc = [], []
        for k in cohort:
            y, velocity = x, torch.zeros_like(x)
            for _ in range(3):
                g = reference.gradient(y, k)
                if "correction" in options:
                    velocity = momentum * velocity + g
                    y = y - LR * velocity - LR * (c - c_i[k])
                else:
                    velocity = momentum * velocity + g + c - c_i[k]
                    y = y - LR * velocity
            new = c_i[k] - c + (x - y) / (LR * tau)
            if "option" in options:
                new = reference.gradient(x, k)
            dy.append(y - x)
            dc.append(new - c_i[k])
            c_i[k] = new
        x = x + options.get("server_lr", 1.0) * sum(dy) / len(cohort)
        c = c + sum(dc) / (len(cohort) if "mean_over" in options else 4)
    assert agrees(run.x, x, 1e-4)
    assert agrees(run.server.c, c, 1e-3)
    assert all(agrees(run.clients[k].c, c_i[k], 1e-3) for k in (0, 1, 2))


def test_a_client_without_samples_leaves_its_variate():
    f = Federation(parts=[range(20), range(20, 60), range(0)], clients=3)
    run = f.run("scaffold")
    assert run.clients[2].c.norm() == 0.0
    assert run.x.is_finite()


def test_option_i_goes_with_the_correction_outside_of_momentum_where_there_is_none():
    """Otherwise it is refused: tests/refused.yaml."""
    one, other = {"name": "scaffold", "option": "I"}, {"name": "scaffold", "correction": "post"}
    from_mapping({"algorithm": one | other})
    for alone in (one, other):
        from_mapping({"algorithm": alone, "train": {"momentum": 0.9}})

"""SCAFFOLD."""

from __future__ import annotations

import pytest
import torch

from fednet import registry
from fednet.config import from_mapping
from fednet.errors import ConfigError
from tests.algorithms.harness import Federation
from tests.algorithms.reference import LR, Reference, agrees, whole_batches

COHORTS = [[0, 2], [1, 2], [0, 2]]
METHODS = [
    ("scaffold", {}),
    ("scaffold", {"option": "I"}),
    ("scaffold", {"server_lr": 0.5}),
    ("scaffold-post", {}),
    ("scaffold-steps", {}),
    ("scaffold-participants", {}),
    ("scaffold-random", {}),
    ("scaffold-random-post", {}),
    ("scaffold-niidbench", {}),
    ("scaffold-niidbench-2021", {}),
]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("name", "options"), METHODS)
@pytest.mark.usefixtures("readings")
def test_three_rounds_recomputed_in_float64(name, options, momentum):
    f = whole_batches(train={"epochs": 3, "momentum": momentum})
    run = f.run(name, cohorts=COHORTS, **options)
    random = "random" in name or "niidbench" in name
    post = "post" in name or "niidbench" in name
    participants = name in ("scaffold-participants", "scaffold-niidbench-2021")
    weights = [1.0] * 4
    if "niidbench" in name:
        weights = [len(f.parts[k]) for k in range(4)]
    reference = Reference(f)
    x = reference.start
    c = torch.zeros_like(x)
    if random:
        c = torch.cat([p.flatten().flip(0).double() for _, p in f.initial.items()])
    c_i = dict.fromkeys(range(4), c)
    tau = 3.0
    if name != "scaffold-steps" and not post:
        tau = sum((1 - momentum**k) / (1 - momentum) for k in (1, 2, 3))
    for cohort in COHORTS:
        dy = []
        dc = []
        for k in cohort:
            y = x
            velocity = torch.zeros_like(x)
            for _ in range(3):
                g = reference.gradient(y, k)
                if post:
                    velocity = momentum * velocity + g
                    y = y - LR * velocity - LR * (c - c_i[k])
                else:
                    velocity = momentum * velocity + g + c - c_i[k]
                    y = y - LR * velocity
            new = c_i[k] - c + (x - y) / (LR * tau)
            if "option" in options:
                new = reference.gradient(x, k)
            dy.append(weights[k] * (y - x))
            dc.append(new - c_i[k])
            c_i[k] = new
        x = x + options.get("server_lr", 1.0) * sum(dy) / sum(weights[k] for k in cohort)
        c = c + sum(dc) / (len(cohort) if participants else 4)
    assert agrees(run.x, x, 1e-4)
    assert agrees(run.server.c, c, 1e-3)
    assert all(agrees(run.clients[k].c, c_i[k], 1e-3) for k in (0, 1, 2))


def test_a_client_without_samples_leaves_its_variate():
    f = Federation(parts=[range(20), range(20, 60), range(0)], clients=3)
    run = f.run("scaffold")
    assert run.clients[2].c.norm() == 0.0
    assert run.x.is_finite()


@pytest.mark.usefixtures("readings")
def test_option_i_goes_with_the_correction_after_the_step_where_there_is_no_momentum():
    both = {"name": "scaffold-post", "option": "I"}
    from_mapping({"algorithm": both})
    for alone in ({"name": "scaffold", "option": "I"}, {"name": "scaffold-post"}):
        from_mapping({"algorithm": alone, "train": {"momentum": 0.9}})
    with pytest.raises(ConfigError, match=r"algorithm.option: I corrects too little under mom"):
        from_mapping({"algorithm": both, "train": {"momentum": 0.9}})


@pytest.mark.usefixtures("readings")
@pytest.mark.parametrize("name", ["scaffold-random", "scaffold-niidbench-2021"])
def test_no_client_joins_where_variates_start_at_random(name):
    method = registry.algorithm.get(name)
    with pytest.raises(ConfigError, match=r"^algorithm.name: no client can join the run"):
        method(method.Config()).with_more_clients(None, 3, 4)

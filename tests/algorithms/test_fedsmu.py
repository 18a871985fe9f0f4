"""FedSMU: two rounds recomputed in float64, and whose momentum moves."""

from __future__ import annotations

import pytest
import torch

from fednet.config import from_mapping
from fednet.errors import ConfigError
from tests.algorithms.harness import same
from tests.algorithms.reference import Reference, agrees, whole_batches


def test_two_rounds_recomputed_in_float64():
    f = whole_batches(rounds=2)
    rates = {"server_lr": 0.01, "decay": 0.1, "beta_1": 0.5, "beta_2": 0.75}
    rates["server_lr_decay"] = 0.5
    run = f.run("fedsmu", cohorts=[[0, 1, 2], [1, 3]], **rates)
    reference = Reference(f)
    x, m = reference.start, {k: torch.zeros_like(reference.start) for k in range(4)}
    for gamma, cohort in ((0.01, [0, 1, 2]), (0.005, [1, 3])):
        total = torch.zeros_like(x)
        for k in cohort:
            g = reference.descend(x, k, 1) - x
            total += torch.sign(0.5 * m[k] + 0.5 * g)
            m[k] = 0.75 * m[k] + 0.25 * g
        x = x + gamma * (total / len(cohort) - 0.1 * x)
    # A coordinate whose momentum is next to zero may take another sign in float32.
    apart = (run.x.vector.double() - x).abs() > 1e-6
    assert float(apart.float().mean()) < 0.01
    assert agrees(run.clients[1].m, m[1], 1e-3)
    assert agrees(run.clients[3].m, m[3], 1e-3)


def test_who_did_not_take_part_keeps_its_momentum():
    f = whole_batches(rounds=2)
    run = f.run("fedsmu", cohorts=[[0, 1], [1]])
    f.rounds = 1
    assert same(run.clients[0].m, f.run("fedsmu", cohorts=[[0, 1]]).clients[0].m)


@pytest.mark.parametrize("chain", [["sign"], ["topk(0.1)"]])
def test_error_feedback_that_nobody_named_is_refused(chain):
    """It would send another vector than the signs."""

    def config(*named, way="up", kind="delta"):
        return from_mapping({"algorithm": "fedsmu", "wire": {way: {kind: [*named, *chain]}}})

    with pytest.raises(ConfigError, match=r"wire\.up\.delta: .* qsgd\(2\) sends -1, 0 and 1 exac"):
        config()
    for asked in (config("ef"), config("noef"), config(way="down", kind="state")):
        assert asked.algorithm.name == "fedsmu"

"""FedNova: by hand, and recomputed in float64."""

from __future__ import annotations

import pytest

from fednet.algorithms.base import Run
from fednet.algorithms.fednova import gradient_weight
from tests.algorithms.harness import Desk, Federation, serve, vector
from tests.algorithms.reference import Reference, agrees, whole_batches

F = Federation()


def test_gradient_weights_of_the_papers_local_solvers():
    assert gradient_weight(7, 0.1, 0.0, 0.0) == 7.0
    # momentum 1/2, three steps: 1 + 1.5 + 1.75
    assert gradient_weight(3, 0.1, 0.5, 0.0) == 4.25
    # proximal: (1 - (1 - eta mu)^tau) / (eta mu) with eta mu = 1/2
    assert gradient_weight(3, 0.5, 0.0, 1.0) == pytest.approx((1 - 0.5**3) / 0.5)
    assert gradient_weight(0, 0.1, 0.9, 0.1) == 0.0


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("pull", [0.1, 0.5, 1.0, 1.9])  # eta mu
def test_no_client_is_blown_up_where_weights_of_gradients_are_negative(momentum, pull):
    for steps in range(1, 40):
        # a_i by the definition: the displacement is linear in the gradients, one a step.
        weights = []
        for step in range(steps):
            moved = velocity = 0.0
            for now in range(steps):
                velocity = momentum * velocity + (now == step) - pull * moved
                moved += velocity
            weights.append(moved)
        norm = gradient_weight(steps, 0.5, momentum, pull / 0.5)
        assert norm == pytest.approx(sum(abs(a) for a in weights))
        assert norm >= 1.0


def test_updates_are_normalised_and_scaled_together():
    algorithm = F.make("fednova")
    ups = {
        0: algorithm.Up(d=vector(2.0), run=Run(1, 1, 0.0)),  # d_0 = 2, p_0 = 1/4
        1: algorithm.Up(d=vector(8.0), run=Run(3, 4, 0.0)),  # d_1 = 2, p_1 = 3/4
    }
    after = serve(algorithm, algorithm.init_server(vector(10.0)), ups, Desk(2))
    assert float(after.x.vector[0]) == 10 - (1 / 4 * 1 + 3 / 4 * 4) * 2  # tau_eff = 3.25


def test_momentum_and_the_pull_count_in_the_norm():
    algorithm = F.make("fednova", mu=1.0)
    ups = {
        0: algorithm.Up(d=vector(1.0), run=Run(1, 1, 0.0)),  # a = 1
        1: algorithm.Up(d=vector(5.0), run=Run(1, 3, 0.0)),  # a = 1, 1, 0.5
    }
    host = Desk(2, lr=0.5, momentum=0.5)
    after = serve(algorithm, algorithm.init_server(vector(10.0)), ups, host)
    assert float(after.x.vector[0]) == 10 - (1 + 2.5) / 2 * (1 / 1 + 5 / 2.5) / 2


def test_equal_work_with_momentum_and_a_pull_recomputed_in_float64():
    f = whole_batches(train={"epochs": 3, "momentum": 0.9}, rounds=1)
    run, reference = f.run("fednova", mu=0.5), Reference(f)
    x, sizes = reference.start, [len(part) for part in f.parts]
    local = [reference.descend(x, k, 3, 0.9, lambda g, w: g + 0.5 * (w - x)) for k in range(4)]
    assert agrees(run.x, sum(n * w for n, w in zip(sizes, local)) / sum(sizes))

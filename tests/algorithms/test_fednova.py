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


def test_tau_eff_by_steps_is_the_authors_code_under_a_proximal_term():
    algorithm = F.make("fednova", mu=1.0, tau_eff="steps")
    ups = {0: algorithm.Up(d=vector(1.75), run=Run(1, 3, 0.0))}
    after = serve(algorithm, algorithm.init_server(vector(0.0)), ups, Desk(1, lr=0.5))
    assert float(after.x.vector[0]) == pytest.approx(-3.0)  # ||a||_1 = 1.75, tau_eff = 3


@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_recomputed_in_float64(momentum, mu):
    f = Federation(train={"batch_size": 40, "lr": 0.1, "momentum": momentum}, parts=None, rounds=1)
    run = f.run("fednova", mu=mu)
    x = run.servers[0].x.vector.double()
    sizes = [len(p) for p in f.parts]
    moved, tau = 0.0, 0.0
    for client, (_, up) in run.trips[-1].items():
        p, a = sizes[client] / sum(sizes), gradient_weight(up.run.steps, 0.1, momentum, mu)
        moved, tau = moved + p * up.d.vector.double() / a, tau + p * a
    assert agrees(run.x, x - tau * moved)
    assert len({up.run.steps for _, up in run.trips[-1].values()}) > 1  # unequal work


def test_one_step_each_is_one_step_of_the_pooled_gradient():
    f = whole_batches(rounds=1)
    reference = Reference(f)
    sizes = [len(p) for p in f.parts]
    pooled = sum(n * reference.gradient(reference.start, i) for i, n in enumerate(sizes))
    assert agrees(f.run("fednova").x, reference.start - 0.1 * pooled / sum(sizes))

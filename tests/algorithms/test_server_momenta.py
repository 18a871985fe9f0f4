"""The methods whose server keeps a direction, a memory or a rule: FedCM, FedVARP, FedExP, FedGA, by
hand.
"""

from __future__ import annotations

import numpy as np
import pytest

from fednet.algorithms.base import Run
from tests.algorithms.harness import Desk, Federation, close, same, serve, vector

F = Federation()


def deltas(algorithm, vectors, steps=1, n=1):
    return {i: algorithm.Up(d=v, run=Run(n, steps, 0.0)) for i, v in enumerate(vectors)}


# -- FedCM -----------------------------------------------------------------------------------------
def test_fedcm_with_one_full_step_is_the_heavy_ball_average():
    alpha = 0.3
    f = Federation(train={"batch_size": 200})
    run = f.run("fedcm", alpha=alpha)
    x, delta = f.initial, f.initial.params.zeros_like()
    plain = f.run("fedsgd", weighting="uniform")
    for t in range(1, 4):
        host = [plain.site(i, round=t) for i in range(4)]
        gradient = sum((h.gradient(x).x.params for h in host), start=delta.zeros_like()) / 4
        delta = alpha * gradient + (1 - alpha) * delta
        x = x - 0.1 * delta
        assert close(run.servers[t].delta, delta, 1e-4)
        assert close(run.servers[t].x, x, 1e-5)


# -- FedVARP ---------------------------------------------------------------------------------------
# -- FedExP ----------------------------------------------------------------------------------------
def eta(vectors, host=None, run=None, **options):
    algorithm = F.make("fedexp", **options)
    host = host or Desk(len(vectors))
    ups = deltas(algorithm, vectors)
    if run is not None:
        ups = {i: algorithm.Up(d=v, run=run[i]) for i, v in enumerate(vectors)}
    serve(algorithm, algorithm.init_server(vector(*[0.0] * len(vectors[0].vector))), ups, host)
    return host.reported["eta_g"]


def unit(k, n=10):
    return vector(*np.eye(n)[k].tolist())


def test_fedexp_steps_half_as_far_as_there_are_orthogonal_updates():
    assert eta([unit(k) for k in range(10)], eps=0.0) == pytest.approx(5.0)


def test_fedexp_with_zero_updates_is_finite():
    assert eta([vector(0.0, 0.0)] * 2, eps=0.0) == 1.0


def test_fedexp_eps_plain_and_decayed():
    vectors = [unit(k, 4) for k in range(4)]  # sum of squares / m = 1, ||D||^2 = 1/4
    assert eta(vectors, eps=0.05) == pytest.approx(1 / (2 * 0.30))
    assert eta(vectors, eps=0.2, host=Desk(4, lr_decay=0.5)) == pytest.approx(1 / (2 * 0.30))


def test_fedexp_may_weight_both_sums_by_samples():
    runs = [Run(3, 1, 0.0), Run(1, 1, 0.0)]
    # sum a ||.||^2 = 1; D = (3/4, 1/4), ||D||^2 = 10/16
    assert eta([unit(0, 2), unit(1, 2)], run=runs, eps=0.0, weighting="samples") == 1.0
    vectors = [vector(1.0, 0.0), vector(-2.0, 0.1)]
    # a ||.||^2: 3/4 + 4.01/4 = 1.7525; D = (0.25, 0.025), ||D||^2 = 0.063125
    assert eta(vectors, run=runs, eps=0.0, weighting="samples") == pytest.approx(
        1.7525 / 0.12625, rel=1e-5
    )


def test_fedexp_is_judged_by_the_averaged_iterate_from_the_second_round_on():
    run = F.run("fedexp")
    judged = [run.algorithm.global_model(s) for s in run.servers]
    assert same(judged[0], run.servers[0].x)
    assert same(judged[1], run.servers[1].x)
    assert close(judged[2], (run.servers[2].x + run.servers[1].x) / 2)
    assert same(run.algorithm.broadcast(run.servers[2], 0, 0).x, run.servers[2].x)
    assert all(r["eta_g"] >= 1.0 for r in run.reports)


# -- FedGA -----------------------------------------------------------------------------------------


def test_fedga_with_one_full_step_is_a_step_on_the_displaced_gradients():
    f = Federation(rounds=1, train={"batch_size": 200})
    run = f.run("fedga", beta=0.5)
    sites = [f.run("fedavg").site(i, round=1) for i in range(4)]
    own = [s.gradient(f.initial).x for s in sites]
    g = sum(own[1:], start=own[0]) / 4
    displaced = [s.gradient(f.initial - 0.5 * (g - o)).x for s, o in zip(sites, own)]
    expected = f.initial - 0.1 * (sum(displaced[1:], start=displaced[0]) / 4)
    assert close(run.x, expected, 1e-5)


def test_fedga_says_when_a_client_was_lost_between_the_trips():
    run = Federation(rounds=1).run("fedga")
    assert not run.warnings
    run.round([0, 1, 2], lost=[1])
    assert "1 of 3 clients" in run.warnings[0]
    assert run.x.is_finite()

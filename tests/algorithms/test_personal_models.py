"""Ditto, APFL and pFedMe: recomputed in float64, and their limits."""

from __future__ import annotations

import pytest
import torch

from tests.algorithms.harness import Federation
from tests.algorithms.reference import LR, Reference, agrees, whole_batches


def test_ditto_recomputed_in_float64():
    f, strength = whole_batches(train={"epochs": 3}, rounds=2), 0.7
    run = f.run("ditto", **{"lambda": strength})
    reference = Reference(f)
    w = run.servers[1].x.vector.double()  # what came down in round 2
    v = reference.start
    for at in (reference.start, w):
        v = reference.descend(v, 2, 3, change=lambda g, x, at=at: g + strength * (x - at))
    assert agrees(run.clients[2].v, v)


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_recomputed_in_float64(adaptive):
    f = whole_batches(train={"epochs": 2}, rounds=2)
    run = f.run("apfl", alpha=0.3, adaptive=adaptive)
    reference = Reference(f)
    v, alpha = reference.start, 0.3
    for t in range(2):
        w = run.servers[t].x.vector.double()
        if adaptive:
            slope = torch.dot(v - w, reference.gradient(alpha * v + (1 - alpha) * w, 3))
            alpha = min(1.0, max(0.0, alpha - LR * float(slope)))
        for _ in range(2):
            gradient = reference.gradient(alpha * v + (1 - alpha) * w, 3)
            w, v = w - LR * reference.gradient(w, 3), v - LR * alpha * gradient
    assert agrees(run.clients[3].v, v)
    assert run.clients[3].alpha == pytest.approx(alpha, rel=1e-5)
    host = run.site(3)
    judged = run.algorithm.personal_model(run.clients[3], run.locals[3], host)
    assert agrees(judged, alpha * v + (1 - alpha) * w)


def test_pfedme_recomputed_in_float64():
    f = whole_batches(train={"epochs": 2}, rounds=2)
    strength, eta, beta = 4.0, 0.05, 0.5
    run = f.run("pfedme", **{"K": 3, "lambda": strength, "eta": eta, "beta": beta})
    reference = Reference(f)
    x = reference.start
    for _ in range(2):
        local, thetas = [], []
        for k in range(4):
            w = theta = x
            for _ in range(2):  # R: two epochs of one batch
                theta = reference.descend(
                    theta, k, 3, change=lambda g, at, w=w: g + strength * (at - w)
                )
                w = w - eta * strength * (w - theta)
            local.append(w)
            thetas.append(theta)
        x = (1 - beta) * x + beta * sum(local) / 4
    assert agrees(run.x, x)
    assert agrees(run.clients[1].theta, thetas[1])


def test_pfedmes_k_steps_of_a_local_round_are_all_on_one_minibatch():
    parts = [[0, 1]]  # of two samples, one a batch
    f = Federation(clients=1, parts=parts, rounds=1, train={"batch_size": 1, "steps": 1, "lr": LR})
    theta = f.run("pfedme", **{"K": 4, "lambda": 2.0}).clients[0].theta
    alone = Reference(Federation(clients=2, parts=[[0], [1]]))
    expected = [
        alone.descend(alone.start, k, 4, change=lambda g, at: g + 2.0 * (at - alone.start))
        for k in (0, 1)
    ]
    apart = [float((theta.vector.double() - w).norm() / w.norm()) for w in expected]
    assert min(apart) < 1e-5 < 1e-3 < max(apart)

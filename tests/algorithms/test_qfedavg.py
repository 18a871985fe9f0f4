"""q-FedAvg: by hand, against FedAvg at q = 0, and recomputed in float64."""

from __future__ import annotations

from tests.algorithms.harness import close
from tests.algorithms.reference import LR, Reference, agrees, whole_batches


def test_q_zero_is_the_uniform_mean():
    f = whole_batches()
    assert close(f.run("qfedavg", q=0.0).x, f.run("fedavg", weighting="uniform").x, 1e-5)


def test_recomputed_in_float64():
    f, q = whole_batches(train={"epochs": 2}, rounds=3), 1.5
    run = f.run("qfedavg", q=q)
    reference = Reference(f)
    w = reference.start
    for _ in range(3):
        above, below = 0.0, 0.0
        for k in range(4):
            loss = reference.loss(w, k) + 1e-10
            delta = (w - reference.descend(w, k, 2)) / LR
            above = above + loss**q * delta
            below += q * loss ** (q - 1) * float(delta.square().sum()) + loss**q / LR
        w = w - above / below
    assert agrees(run.x, w)

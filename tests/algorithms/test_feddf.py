"""FedDF: the ensemble's target and one step of distillation, in float64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.algorithms.harness import same
from tests.algorithms.reference import Reference, agrees, whole_batches


def test_one_step_of_distillation_recomputed_in_float64():
    f = whole_batches(train={"epochs": 2}, rounds=1)
    run = f.run("feddf", distill_lr=0.5, distill_batch=1000)
    reference = Reference(f)
    d = f.public_data.train[0].double()
    local = [reference.descend(reference.start, k, 2) for k in range(4)]
    with torch.no_grad():
        target = sum(reference.load(w)(d) for w in local).div(4).softmax(1)
    sizes = [len(p) for p in f.parts]
    x = sum(n * w for n, w in zip(sizes, local)) / sum(sizes)
    gradient = reference.gradient(
        x,
        0,
        lambda module, _x, _y: F.kl_div(module(d).log_softmax(1), target, reduction="batchmean"),
    )
    assert agrees(run.x, x - 0.5 * gradient)


def test_without_distillation_it_is_fedavg():
    f = whole_batches()
    assert same(f.run("feddf", distill_epochs=0).x, f.run("fedavg").x)

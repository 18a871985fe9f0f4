"""FedMD: a round in float64, and what crosses."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.algorithms.reference import LR, Reference, agrees, whole_batches


def test_one_round_recomputed_in_float64():
    f = whole_batches(rounds=1)
    run = f.run("fedmd", batch=1000)
    reference = Reference(f)
    x0, y0 = (t for t in f.public_data.train)
    x0 = x0.double()

    def step(w, loss):
        return w - LR * reference.gradient(w, 0, lambda module, _x, _y: loss(module))

    begun, given = [], []
    for k in range(4):
        w = step(reference.start, lambda module: F.cross_entropy(module(x0), y0))
        w = reference.descend(w, k, 1)
        begun.append(w)
        with torch.no_grad():
            given.append(reference.load(w)(x0))
    consensus = sum(given) / 4
    for k, w in enumerate(begun):
        w = step(w, lambda module: (module(x0) - consensus).abs().mean())
        assert agrees(run.clients[k].w, reference.descend(w, k, 1), 1e-4)


def test_the_subset_is_the_rounds_and_the_same_for_all():
    f = whole_batches(rounds=2)
    run = f.run("fedmd", subset=0.25)
    answers = run.trips[0]
    assert {tuple(up.scores.shape) for _, up in answers.values()} == {(10, f.classes)}

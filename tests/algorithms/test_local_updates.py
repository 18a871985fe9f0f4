"""Local training that differs from FedAvg's: rounds recomputed in float64, and limits by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednet.algorithms.feddecorr import correlation
from tests.algorithms.harness import same
from tests.algorithms.reference import LR, agrees, averaged, whole_batches


def lacking():
    """Two rounds of three local steps; client k has no sample of class k, and unequal numbers."""
    f = whole_batches(train={"epochs": 3}, rounds=2)
    f.parts = [np.flatnonzero(f.y.numpy()[: 100 + 20 * k] != k) for k in range(4)]
    return f


def descended(**changes):
    return lambda r, w, k: r.descend(w, k, 3, **changes)


def of_loss(loss):
    """loss(module, x, y, n): n: (C,) the client's samples by class."""

    def local(r, w, k):
        n = torch.bincount(r.samples(k)[1], minlength=5).double()
        return r.descend(w, k, 3, loss=lambda module, x, y: loss(module, x, y, n))

    return local


def abc(module, x, y, n):
    z = module(x)
    q = z.sigmoid()
    total = 0.0
    for b in range(len(y)):
        for c in range(5):
            if c == y[b]:
                if q[b, c] < 0.6:
                    total = total - (1 - q[b, c]) ** 2 * q[b, c].log()
            elif q[b, c] > (0.3 if n[c] else 0.45):
                total = total - q[b, c] ** 2 * (1 - q[b, c]).log()
    return total / len(y)


def decorrelated(module, x, y, n, code):
    z = module.features(x)
    rows, d = z.shape
    corr = torch.corrcoef(z.T)
    term = corr.square().sum() / d**2
    if code:
        squares = ((rows - 1) * corr).square()
        term = (squares.sum() - squares.diagonal().sum()) / (d * (d - 1)) / rows
    return F.cross_entropy(module(x), y) + 0.3 * term


def sharp(r, w, k):
    for _ in range(3):
        g = r.gradient(w, k)
        w = w - LR * r.gradient(w + 0.2 * g / g.norm(), k)
    return w


def body(r, w, k):
    """The head's parameters come last: a weight and a bias of five classes over 16 features."""
    free = (torch.arange(len(w)) < len(w) - 5 * 17).double()
    return r.descend(w, k, 3, change=lambda g, at: free * g)


LOCAL = [
    ("fedavg", {}, descended()),
    (
        "fedprox",
        {"mu": 0.5},
        lambda r, w, k: descended(change=lambda g, at: g + 0.5 * (at - w))(r, w, k),
    ),
    ("fedlc", {"tau": 0.7}, of_loss(lambda m, x, y, n: F.cross_entropy(m(x) - 0.7 * n**-0.25, y))),
    (
        "fedrod",
        {"gamma": 0.5},
        of_loss(lambda m, x, y, n: F.cross_entropy(m(x) + 0.5 * n.log(), y)),
    ),
    ("fedabc", {"m_p": 0.6, "m_n": 0.3, "m_nn": 0.45}, of_loss(abc)),
    ("feddecorr", {"beta": 0.3}, of_loss(lambda *at: decorrelated(*at, code=True))),
    (
        "feddecorr",
        {"beta": 0.3, "form": "paper"},
        of_loss(lambda *at: decorrelated(*at, code=False)),
    ),
    ("fedsam", {"rho": 0.2}, sharp),
    ("fedbabu", {}, body),
]


@pytest.mark.parametrize(("name", "options", "local"), LOCAL)
def test_two_rounds_recomputed_in_float64(name, options, local):
    f = lacking()
    wanted = averaged(f, local)
    x = f.run(name, **options).x
    assert agrees(x, wanted[: len(x.vector)], 1e-4)


def test_fednovas_equal_work_with_momentum_and_a_pull_recomputed_in_float64():
    f = whole_batches(train={"epochs": 3, "momentum": 0.9}, rounds=1)
    pulled = lambda r, w, k: r.descend(w, k, 3, 0.9, lambda g, at: g + 0.5 * (at - w))  # noqa: E731
    assert agrees(f.run("fednova", mu=0.5).x, averaged(f, pulled))


def test_fedlc_leaves_the_model_of_a_client_of_one_class_alone():
    f = whole_batches(rounds=1)
    f.parts = [torch.nonzero(f.y == c).flatten().numpy() for c in range(f.clients)]
    assert same(f.run("fedlc").x.params, f.initial.params)


def test_feddecorr_of_one_sample_is_zero():
    assert float(correlation(torch.tensor([[1.0, 2.0]]))) == 0.0


def test_fedbabu_never_trains_the_head():
    f = whole_batches(train={"epochs": 2, "weight_decay": 0.1}, rounds=2)
    run = f.run("fedbabu")
    head = set(f.layout.names) - set(run.servers[-1].x.layout.names)
    assert head == set(run.setting.head)
    assert all(torch.equal(run.locals[0][name], f.initial[name]) for name in head)

"""FedLC, FedDecorr and FedSAM: their local losses by hand, and rounds recomputed in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fednet.algorithms.feddecorr import correlation
from fednet.algorithms.fedlc import margins
from tests.algorithms.harness import close, same
from tests.algorithms.reference import LR, Reference, agrees, whole_batches


# -- FedLC -----------------------------------------------------------------------------------------
def test_fedlc_margins_by_hand():
    found = margins(torch.tensor([16, 1, 0]), tau=2.0)
    assert found.tolist() == [1.0, 2.0, math.inf]
    assert margins(torch.tensor([3, 0]), tau=0.0).tolist() == [0.0, 0.0]


def test_fedlc_gives_an_absent_class_no_gradient():
    f = torch.zeros(2, 3, requires_grad=True)
    loss = F.cross_entropy(f - margins(torch.tensor([1, 1, 0]), 1.0), torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert f.grad[:, 2].tolist() == [0.0, 0.0]


def test_fedlc_leaves_the_model_of_a_client_of_one_class_alone():
    f = whole_batches(rounds=1)
    f.parts = [torch.nonzero(f.y == c).flatten().numpy() for c in range(f.clients)]
    assert same(f.run("fedlc").x.params, f.initial.params)


# -- FedDecorr -------------------------------------------------------------------------------------
def test_feddecorr_of_perfectly_correlated_features_is_one():
    z = torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    assert float(correlation(z)) == pytest.approx(1.0)
    # the code: products off the diagonal are n - 1 = 2, squared 4, over n = 3
    assert float(correlation(z, code=True)) == pytest.approx(4 / 3)


def test_feddecorr_of_uncorrelated_features_is_the_diagonal():
    z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert float(correlation(z)) == pytest.approx(0.5)  # 2 of 4 elements are 1
    assert float(correlation(z, code=True)) == pytest.approx(0.0, abs=1e-12)
    assert float(correlation(z[:1])) == 0.0


@pytest.mark.parametrize("form", ["paper", "code"])
def test_feddecorr_recomputed_in_float64(form):
    f = whole_batches(train={"epochs": 3}, rounds=1)
    reference = Reference(f)

    def loss(module, x, y):
        z = module.features(x)
        c = torch.corrcoef(z.T)
        if form == "code":
            n, d = z.shape
            squares = (c * (n - 1)).square()
            term = (squares.sum() - squares.diagonal().sum()) / (d * (d - 1)) / n
        else:
            term = c.square().sum() / len(c) ** 2
        return F.cross_entropy(module(x), y) + 0.3 * term

    local = [reference.descend(reference.start, k, 3, loss=loss) for k in range(4)]
    sizes = [len(p) for p in f.parts]
    mean = sum(n * w for n, w in zip(sizes, local)) / sum(sizes)
    assert agrees(f.run("feddecorr", beta=0.3, form=form).x, mean, 1e-4)


# -- FedSAM ----------------------------------------------------------------------------------------
def test_fedsam_recomputed_in_float64():
    f, rho = whole_batches(rounds=2), 0.2
    run = f.run("fedsam", rho=rho)
    reference = Reference(f)
    w, sizes = reference.start, [len(p) for p in f.parts]
    for _ in range(2):
        local = []
        for k in range(4):
            g = reference.gradient(w, k)
            local.append(w - LR * reference.gradient(w + rho * g / g.norm(), k))
        w = sum(n * x for n, x in zip(sizes, local)) / sum(sizes)
    assert agrees(run.x, w)
    assert not close(run.x, f.run("fedavg").x, 1e-4)  # the perturbation does something

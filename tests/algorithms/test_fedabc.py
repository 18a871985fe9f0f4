"""FedABC's loss; rounds of it are recomputed in `test_local_updates`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms import fedabc
from tests.algorithms.harness import begun, close, same

HERE = torch.tensor([True, True, False])  # P_i = {0, 1}, N_i = {2}
Y = torch.arange(5) % 2
ALL = {"m_p": 1, "m_n": 0, "m_nn": 0}


def logits():
    z = torch.randn(5, 3, generator=seeds.torch_rng(0, "z"), dtype=torch.float64)
    return (3 * z).requires_grad_()


def loss(z, y, present=HERE, **options):
    return fedabc.abc_loss(z, y, present, fedabc.FedABC.Config(**options))


# q = 1/2, 1/4, 1/2 for classes 0 (the sample's), 1 (in P_i), 2 (in N_i):
# (1-q)^2 -log q; q^2 -log(1-q)
FIRST = math.log(2) / 4
SECOND = -math.log(3 / 4) / 16
THIRD = math.log(2) / 4


@pytest.mark.parametrize(
    ("m_p", "m_n", "m_nn", "gamma", "expected"),
    [
        (0.75, 0.2, 0.3, 2, FIRST + SECOND + THIRD),
        (0.75, 0.3, 0.3, 2, FIRST + THIRD),  # 1/4 <= m_n
        (0.75, 0.2, 0.6, 2, FIRST + SECOND),  # 1/2 <= m_nn
        (0.4, 0.2, 0.3, 2, SECOND + THIRD),  # 1/2 >= m_p: too easy
        (0.75, 0.2, 0.3, 0, 2 * math.log(2) - math.log(3 / 4)),
    ],
)
def test_one_sample_worked_by_hand(m_p, m_n, m_nn, gamma, expected):
    z = torch.tensor([[0.0, -math.log(3), 0.0]], dtype=torch.float64)
    found = loss(z, torch.tensor([0]), m_p=m_p, m_n=m_n, m_nn=m_nn, focal_gamma=gamma)
    assert found.item() == pytest.approx(expected)


def test_the_norm_divides_by_samples_by_what_is_kept_or_by_all_terms():
    z = logits()
    q = torch.sigmoid(logits())
    by = {norm: loss(z, Y, norm=norm).item() for norm in ("samples", "kept", "samples_classes")}
    kept = torch.where(F.one_hot(Y, 3).bool(), q < 0.75, q > torch.tensor([0.25, 0.25, 0.3]))
    assert 0 < kept.sum() < 15
    assert by["samples"] * 5 == pytest.approx(by["kept"] * int(kept.sum()))
    assert by["samples"] == pytest.approx(by["samples_classes"] * 3)


@pytest.mark.parametrize("margin", ["m_p", "m_n", "m_nn"])
def test_margins_are_strict(margin):
    """A term whose q is at its margin does not count; with the next margin it does."""
    z = torch.zeros(1, 2, dtype=torch.float64)  # q = 1/2
    y = torch.tensor([0])
    none = {"m_p": 0.0, "m_n": 1.0, "m_nn": 1.0}
    present = torch.tensor([True, margin != "m_nn"])
    beyond = math.nextafter(0.5, 1.0 if margin == "m_p" else 0.0)
    assert loss(z, y, present, **{**none, margin: 0.5}).item() == 0
    assert loss(z, y, present, **{**none, margin: beyond}).item() > 0


@pytest.mark.parametrize("norm", ["samples", "kept", "samples_classes"])
def test_margins_that_keep_nothing_give_a_loss_of_0_that_can_be_stepped_on(norm):
    z = logits()
    found = loss(z, Y, m_p=0, m_n=1, m_nn=1, norm=norm)
    found.backward()
    assert found.item() == z.grad.abs().max() == 0


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_loss_and_gradient_stay_finite_for_huge_logits(gamma):
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], requires_grad=True)
    found = loss(z, torch.tensor([0, 0]), **ALL, focal_gamma=gamma)
    found.backward()
    assert torch.isfinite(found)
    assert torch.isfinite(z.grad).all()


def test_the_client_counts_its_training_samples_not_the_batch():
    missing = [np.tile([0, 2], 12), np.tile([1, 3], 12)]
    runs = [
        begun("fedabc", labels=missing, train={"batch_size": 4}, **o).rounds(2, (0, 1)).server.x
        for o in ({"m_n": 0.0, "m_nn": 0.9}, {"m_n": 0.9, "m_nn": 0.0}, {"m_n": 0.0, "m_nn": 0.9})
    ]
    assert not close(runs[0], runs[1], 1e-4)
    assert same(runs[0], runs[2])

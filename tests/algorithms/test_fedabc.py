"""FedABC."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms.fedabc import abc_loss, kept
from tests.algorithms.small import Federation, distance, same

HERE = torch.tensor([True, True, False])  # P_i = {0, 1}, N_i = {2}


def logits(n=5, c=3, dtype=torch.float64):
    return (3 * torch.randn(n, c, generator=seeds.torch_rng(0, "z"), dtype=dtype)).requires_grad_()


def labels(n=5):
    return torch.arange(n) % 2


def test_without_margins_and_focus_it_is_binary_cross_entropy():
    z, y = logits(), labels()
    ours = abc_loss(z, y, HERE, 1, 0, 0, 0)
    ours.backward()
    got = z.grad.clone()
    z.grad = None
    theirs = F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).double(), reduction="sum") / 5
    theirs.backward()
    assert abs(ours.item() - theirs.item()) < 1e-12
    assert (got - z.grad).abs().max() < 1e-12


def test_one_sample_worked_by_hand():
    # q = 1/2, 1/4, 1/2 for classes 0 (the sample's), 1 (in P_i), 2 (in N_i)
    z, y = torch.tensor([[0.0, -math.log(3), 0.0]], dtype=torch.float64), torch.tensor([0])
    # (1-q)^2 -log q; q^2 -log(1-q)
    first, second, third = (
        math.log(2) / 4,
        -math.log(3 / 4) / 16,
        math.log(2) / 4,
    )
    assert abc_loss(z, y, HERE, 0.75, 0.2, 0.3, 2).item() == pytest.approx(first + second + third)
    # 1/4 <= m_n
    assert abc_loss(z, y, HERE, 0.75, 0.3, 0.3, 2).item() == pytest.approx(first + third)
    # 1/2 <= m_nn
    assert abc_loss(z, y, HERE, 0.75, 0.2, 0.6, 2).item() == pytest.approx(first + second)
    # 1/2 >= m_p: too easy
    assert abc_loss(z, y, HERE, 0.4, 0.2, 0.3, 2).item() == pytest.approx(second + third)
    assert abc_loss(z, y, HERE, 0.75, 0.2, 0.3, 0).item() == pytest.approx(
        2 * math.log(2) - math.log(3 / 4)
    )


def test_the_norm_divides_by_samples_by_what_is_kept_or_by_all_terms():
    z, y = logits(), labels()
    norms = ("samples", "kept", "samples_classes")
    by = {norm: abc_loss(z, y, HERE, 0.75, 0.25, 0.3, 2, norm).item() for norm in norms}
    n = int(kept(torch.sigmoid(z), F.one_hot(y, 3).bool(), HERE, 0.75, 0.25, 0.3).sum())
    assert 0 < n < 15
    assert by["samples"] * 5 == pytest.approx(by["kept"] * n)
    assert by["samples"] == pytest.approx(by["samples_classes"] * 3)


@pytest.mark.parametrize("margin", ["m_p", "m_n", "m_nn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_margins_are_strict(margin, dtype):
    """A term whose q is at its margin does not count; with the next number beyond it does."""
    q = torch.tensor([[0.2]], dtype=dtype)
    beyond = torch.nextafter(q, torch.full_like(q, 0.0 if margin == "m_p" else 1.0))
    positive, present = torch.tensor([[margin == "m_p"]]), torch.tensor([margin != "m_nn"])
    margins = {"m_p": 1.0, "m_n": 0.0, "m_nn": 0.0, margin: 0.2}
    assert not kept(q, positive, present, **margins).item()
    assert kept(beyond, positive, present, **margins).item()


def test_margins_that_keep_nothing_give_a_loss_of_0_that_can_be_stepped_on():
    for norm in ("samples", "kept", "samples_classes"):
        z = logits()
        loss = abc_loss(z, labels(), HERE, 0, 1, 1, 2, norm)
        loss.backward()
        assert loss.item() == 0
        assert z.grad.abs().max() == 0


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_loss_and_gradient_stay_finite_for_huge_logits(gamma):
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], requires_grad=True)
    loss = abc_loss(z, torch.tensor([0, 0]), HERE, 1, 0, 0, gamma)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(z.grad).all()


def test_the_focal_factor_is_differentiated_and_the_mask_is_not():
    z = torch.tensor([[0.3]], dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(
        abc_loss(z, torch.tensor([0]), torch.tensor([True]), 0.9, 0, 0, 2), z
    )[0].item()
    q = 1 / (1 + math.exp(-0.3))
    # d/dz (1-q)^2 (-log q), dq/dz = q(1-q)
    by_hand = -2 * (1 - q) ** 2 * q * -math.log(q) - (1 - q) ** 3
    assert gradient == pytest.approx(by_hand)


def test_the_client_counts_its_training_samples_not_the_batch():
    missing = [np.tile([0, 2], 12), np.tile([1, 3], 12)]
    runs = [
        Federation("fedabc", labels=missing, train={"batch_size": 4}, **o)
        .rounds(2, (0, 1))
        .server.x
        for o in ({"m_n": 0.0, "m_nn": 0.9}, {"m_n": 0.9, "m_nn": 0.0}, {"m_n": 0.0, "m_nn": 0.9})
    ]
    assert distance(runs[0], runs[1]) > 1e-4
    assert same(runs[0], runs[2])

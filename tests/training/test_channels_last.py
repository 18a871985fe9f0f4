"""Kernels whose channels lie innermost: the same model, in another order of memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fednet.tensors import Layout, Tensors
from fednet.training.scratch import Scratch


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 2))


@pytest.fixture
def model():
    module = small()
    layout = Layout.of(module)
    generator = torch.Generator().manual_seed(1)
    x = Tensors.zeros(layout)
    x.vector.copy_(torch.randn(x.vector.numel(), generator=generator))
    return x


def test_what_is_loaded_comes_back_in_the_usual_order(model):
    scratch = Scratch(small(), model.layout, channels_last=True)
    scratch.load(model)
    assert torch.equal(scratch.values().vector, model.vector)
    assert torch.equal(dict(scratch.module.named_parameters())["0.weight"], model["0.weight"])


def test_a_step_is_the_same_step_up_to_rounding(model):
    found = []
    for last in (False, True):
        scratch = Scratch(small(), model.layout, channels_last=last)
        module = scratch.load(model)
        x = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)
        nn.functional.cross_entropy(module(x), torch.tensor([0, 1])).backward()
        with torch.no_grad():
            for p in scratch.parameters.values():
                p -= 0.1 * p.grad
        found.append(scratch.values().vector)
    assert not torch.equal(found[0], model.vector)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_corrections_reach_the_right_elements(model):
    """`views` gives a control variate in the usual order: adding it to a kernel must not permute
    it.
    """
    scratch = Scratch(small(), model.layout, channels_last=True)
    scratch.load(model)
    for parameter, view in zip(
        scratch.parameters.values(), scratch.views(model, scratch.parameters)
    ):
        assert torch.equal(parameter, view)

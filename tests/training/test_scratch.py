"""What a model does to itself while it trains: the next client finds none of it."""

from __future__ import annotations

from collections import deque
from random import Random

import numpy as np
import pytest
import torch
from torch import nn

from fednet.tensors import Layout, Tensors
from fednet.training.scratch import Scratch
from tests.algorithms.harness import same
from tests.training.test_training import host


class Counting(nn.Module):
    """Keeps what it has seen in attributes, and in buffers that its state dict has not."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.seen = 0
        self.register_buffer("first", None, persistent=False)

    def forward(self, x):
        self.seen += 1
        if self.first is None:
            self.first = x.mean()
        if not hasattr(self, "last"):
            self.register_buffer("last", x.mean(), persistent=False)
        self.scale = getattr(self, "scale", 0) + self.seen
        return x * self.w * self.scale + self.first + self.last


def test_what_a_model_keeps_in_attributes_and_new_buffers_is_not_the_next_clients():
    h = host(Counting(), epochs=2)
    first = h.train(h.initial).x
    assert same(h.train(h.initial).x, first)


class Own:
    def __init__(self):
        self.calls = [0]


class Hoarding(nn.Module):
    """Changes what it keeps in place."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.log = []
        self.past = deque([1.0], maxlen=3)
        self.once = {1}
        self.nested = {"sums": ([0.0],)}
        self.own = Own()
        self.mean = torch.zeros(1)
        self.rates = np.zeros(1, np.float32)
        self.draws = torch.Generator().manual_seed(0), np.random.default_rng(0), Random(0)
        self.register_buffer("mask", torch.ones(1), persistent=False)
        self.known = [self]

    def forward(self, x):
        assert self.known[0] is self
        self.log.append(len(self.log))
        self.past.append(self.past[-1] + 1)
        self.once.add(len(self.once) + 1)
        self.nested["sums"][0][0] += 1
        self.own.calls[0] += 1
        self.mean += 1
        self.rates += 1
        self.mask.mul_(0.5)
        kept = len(self.log) + sum(self.past) + len(self.once) + self.nested["sums"][0][0]
        kept += self.own.calls[0] + self.mean.item() + self.rates.item() + self.mask.item()
        drawn = torch.rand(1, generator=self.draws[0]) + self.draws[1].random()
        self.last = x * self.w * (kept + drawn + self.draws[2].random())  # has a graph
        return self.last


def test_what_a_model_changes_in_place_is_not_the_next_clients_nor_a_second_models():
    h = host(Hoarding(), epochs=2)
    first = h.train(h.initial).x
    assert same(h.train(h.initial).x, first)
    scratch = h.scratch
    out = scratch.load(h.initial)(h.data[0][:1])
    lent = scratch.lend()
    assert scratch.module.last is out
    assert not hasattr(lent.module, "last")
    assert (len(scratch.module.log), len(lent.module.log)) == (1, 0)
    assert (scratch.module.mask.item(), lent.module.mask.item()) == (0.5, 1.0)


class Recurrent(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.rnn = nn.LSTM(1, 1, batch_first=True)
        self.flat = flat

    def forward(self, x):
        if self.flat:
            self.rnn.flatten_parameters()
        return self.rnn(x[:, None])[0][:, 0]


def test_a_model_may_have_its_recurrent_layers_flattened(monkeypatch):
    def as_on_a_gpu(layer):
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", as_on_a_gpu)
    trained = []
    for flat in (False, True):
        torch.manual_seed(0)
        h = host(Recurrent(flat), epochs=2)
        trained.append(h.train(h.initial).x)
    assert same(*trained)


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_large_model_gives_its_memory_away_after_training(channels_last):
    """It takes other memory when the next client's model is loaded, not before."""
    layers = (nn.Conv2d(2, 2, 3), nn.Linear(1100, 1000), nn.BatchNorm1d(1000))
    layout = Layout.of(nn.Sequential(*layers))
    own = Scratch(lambda: nn.Sequential(*layers), layout, channels_last=channels_last)
    x = Tensors.zeros(layout)
    x.vector.copy_(torch.linspace(-1, 1, x.vector.numel()))
    own.load(x)
    place = own.vector.data_ptr()
    trained = own.values(give_away=True)
    assert trained.vector.data_ptr() == place
    assert trained.sha256() == x.sha256()
    assert not any(held.numel() for held in (own.vector, *own.module.parameters()))
    own.load(x.zeros_like())
    assert not own.module[1].weight.detach().any()
    assert own.module[0].weight.is_contiguous() is not channels_last
    assert trained.sha256() == x.sha256()
    own.load(x)
    assert torch.equal(own.module[0].weight, x["0.weight"])
    assert own.values().sha256() == x.sha256()


def test_a_model_on_a_device_keeps_its_memory_which_captured_steps_read():
    """A device of torch's without memory takes a GPU's place."""
    make = lambda: nn.Linear(1100, 1000)  # noqa: E731
    own = Scratch(make, Layout.of(make()), "meta")
    weight = own.module.weight
    own.values(give_away=True)
    assert own.vector.numel() == 1_101_000
    assert own.module.weight is weight
    assert weight.shape == (1000, 1100)


# -- kernels whose channels are innermost ---------------------------------------------------------
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


def test_a_step_is_the_same_step_up_to_rounding(model):
    found = []
    for last in (False, True):
        scratch = Scratch(small, model.layout, channels_last=last)
        module = scratch.load(model)
        x = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)
        nn.functional.cross_entropy(module(x), torch.tensor([0, 1])).backward()
        with torch.no_grad():
            for p in scratch.parameters.values():
                p -= 0.1 * p.grad
        found.append(scratch.values().vector)
    assert not torch.equal(found[0], model.vector)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_what_is_flattened_gets_a_gradient_in_its_own_layout():
    """The gradient of a sum of outputs is, for every sample, the sum of the weights' rows."""

    def pooled() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 2))

    layout = Layout.of(pooled())
    conv, pool, flatten, linear = Scratch(pooled, layout, channels_last=True).module
    images = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)
    x = pool(conv(images.contiguous(memory_format=torch.channels_last)))
    given = []
    x.grad_fn.register_prehook(lambda gradients: given.extend(gradients))
    linear(flatten(x)).sum().backward()
    assert given[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(given[0], linear.weight.sum(0).view(4, 2, 2).expand(2, -1, -1, -1))


def test_corrections_reach_the_right_elements(model):
    """`views` gives a control variate in the usual order, `flat` in the order of the memory: adding
    either to a kernel must not permute it.
    """
    scratch = Scratch(small, model.layout, channels_last=True)
    scratch.load(model)
    names = scratch.parameters.keys()
    given = zip(
        scratch.parameters.values(), scratch.views(model, names), scratch.flat(model, names)
    )
    for parameter, view, flat in given:
        assert torch.equal(parameter, view)
        assert torch.equal(parameter.as_strided((parameter.numel(),), (1,)), flat)


class Merging(nn.Linear):
    """Does more than to set its mode."""

    def train(self, mode: bool = True):
        self.modes = [*getattr(self, "modes", []), mode]
        return super().train(mode)


def parts_in_training(scratch: Scratch) -> list[str]:
    return [name for name, part in scratch.module.named_modules() if part.training]


def test_a_model_to_evaluate_is_in_eval_mode_whatever_it_was_used_for_before():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(0.5)))
    scratch = Scratch(lambda: model, Layout.of(model))
    for part in ("", "1", "1.0"):
        scratch.train_mode(alone=False)
        scratch.in_eval_mode()
        assert parts_in_training(scratch) == []
        scratch.module.get_submodule(part).training = True  # the mode of one alone
        assert scratch.in_eval_mode() is scratch.module
        assert parts_in_training(scratch) == []


def test_a_module_that_does_more_in_eval_mode_is_told_each_time():
    model = nn.Sequential(Merging(3, 3))
    scratch = Scratch(lambda: model, Layout.of(model))
    scratch.in_eval_mode()
    scratch.in_eval_mode()
    assert model[0].modes == [False, False]

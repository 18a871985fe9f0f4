from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.registry import task
from fednet.tensors import Layout, Tensors
from fednet.training.hosts import ClientHost
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting, Splits
from fednet.training.tasks import has_accuracy
from fednet.training.tasks.classification import class_axis


def test_cross_entropy_is_the_log_of_the_true_class():
    c = task.get("classification")()
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    y = torch.tensor([0, 1])
    assert c.losses(logits, y).tolist() == pytest.approx([math.log(4), math.log(2)])
    assert float(c.loss(logits, y)) == pytest.approx(1.5 * math.log(2))


def test_regression_counts_values_within_tolerance_and_means_squares():
    class Near(task.get("regression")):
        tolerance = 0.5

    r = Near()
    outputs = torch.tensor([[1.0], [2.0], [4.0]])
    y = torch.tensor([1.5, 2.0, 6.0])
    assert r.losses(outputs, y).tolist() == [0.25, 0.0, 4.0]
    assert float(r.loss(outputs, y)) == pytest.approx(4.25 / 3)
    assert r.counts(outputs, y).tolist() == [[2], [3]]
    assert has_accuracy(r)


def test_regression_without_a_tolerance_has_no_accuracy_and_counts_its_values():
    r = task.get("regression")()
    outputs = torch.tensor([[1.0], [2.0]])
    y = torch.tensor([1.0, 2.5])
    assert r.counts(outputs, y).tolist() == [[0], [2]]
    assert not has_accuracy(r)


def test_regression_refuses_outputs_of_another_width_than_the_targets():
    r = task.get("regression")()
    y = torch.zeros(4, 3)
    for wrong in (torch.zeros(4, 1), torch.zeros(4), torch.zeros(4, 2), torch.zeros(4, 3, 2)):
        for judge in (r.loss, r.losses, r.counts):
            with pytest.raises(ConfigError, match=r"targets of shape \(4, 3\)"):
                judge(wrong, y)
    assert float(r.loss(torch.ones(4, 3), y)) == 1.0
    assert float(r.loss(torch.ones(4, 3, 1), y)) == 1.0


@pytest.mark.parametrize("t", [2, 3, 4])
def test_logits_in_torchs_order_are_judged_like_those_with_the_classes_last(t):
    c = task.get("classification")()
    last = torch.randn(5, t, 3, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 3, (5, t), generator=torch.Generator().manual_seed(1))
    second = last.movedim(-1, 1)
    expected = torch.nn.functional.cross_entropy(second, y)
    assert float(c.loss(last, y)) == pytest.approx(float(expected))
    c.class_axis = 1  # read where there are as many classes as positions
    assert float(c.loss(second, y)) == pytest.approx(float(expected))
    counts = c.counts(second, y)
    assert counts.sum(1).tolist() == [int((last.argmax(-1) == y).sum()), 5 * t]
    assert c.losses(second, y).shape == (5,)


class Last(nn.Module):
    """(n, t, k) to (n, t, C) by a Linear head; `order` changes what it gives."""

    def __init__(self, order=None):
        super().__init__()
        self.head = nn.Linear(2, 4)
        self.order = order

    def features(self, x):
        return x

    def forward(self, x):
        outputs = self.head(x)
        return outputs if self.order is None else outputs.movedim(-1, 1)


@pytest.mark.parametrize("t", [3, 4])
def test_where_classes_and_positions_are_as_many_the_model_says_which_is_which(t):
    x = torch.randn(6, t, 2)
    y = torch.randint(0, 4, (6, t))
    last = Last()
    assert class_axis(last, x, y, last(x)) == -1
    turned = Last(order=1)
    if t == 3:
        assert class_axis(turned, x, y, turned(x)) == 1
        return
    with pytest.raises(ConfigError, match="give the module an attribute class_axis"):
        class_axis(turned, x, y, turned(x))
    turned.class_axis = 1
    assert class_axis(turned, x, y, turned(x)) == 1


def test_targets_without_a_label_are_left_out_as_torch_leaves_them_out():
    c = task.get("classification")()
    logits = torch.log(torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.2, 0.8], [0.1, 0.9]]]))
    y = torch.tensor([[0, -100], [1, 1]])  # three labels
    a = math.log(4)
    b = -math.log(0.8)
    d = -math.log(0.9)
    assert float(c.loss(logits, y)) == pytest.approx((a + b + d) / 3)
    assert c.losses(logits, y).tolist() == pytest.approx([a, (b + d) / 2])
    assert c.counts(logits, y).tolist() == [[0, 2], [1, 2]]


def test_samples_and_batches_without_any_label_have_a_loss_of_zero():
    c = task.get("classification")()
    logits = torch.randn(2, 3, 5, requires_grad=True)
    y = torch.tensor([[-100, -100, -100], [-100, 4, 0]])
    assert float(c.losses(logits, y)[0].detach()) == 0.0
    none = c.loss(logits[:1], y[:1])
    none.backward()
    assert float(none.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()
    assert c.counts(logits[:1], y[:1]).sum() == 0


def test_targets_without_a_label_are_of_no_class_that_a_client_has():
    y = torch.tensor([[0, -100], [2, 2]])
    client = SimpleNamespace(data=(y, y), classes=3)
    assert ClientHost.class_counts.func(client).tolist() == [1, 0, 2]


def test_the_gradient_of_sequences_is_that_of_all_labels_however_they_are_cut():
    module = nn.Embedding(4, 3)
    x = torch.tensor([[0, 1, 2], [3, 0, 1], [2, 2, 3]])
    y = torch.tensor([[0, -100, -100], [1, 2, 0], [2, 0, -100]])
    task_ = task.get("classification")()
    task_.loss(module(x), y).backward()
    for size in (1, 2, 3):
        config = from_mapping({"train": {"batch_size": size}})
        layout = Layout.of(module)
        initial = Tensors.of(module, layout)
        setting = Setting(layout, layout, (), initial, config, task_, 3, lambda seed: module)
        scratch = Scratch(lambda: copy.deepcopy(module), layout)
        host = ClientHost(setting, scratch, 0, 1, splits=Splits((x, y), (x, y)))
        found = host.gradient(initial)
        assert torch.allclose(found.x["weight"], module.weight.grad, atol=1e-6)
        assert found.run.loss == pytest.approx(float(task_.loss(module(x), y).detach()), rel=1e-5)

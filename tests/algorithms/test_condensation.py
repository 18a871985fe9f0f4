"""Condensation by gradient matching. Reduced setting throughout: real batches of 32, and few
iterations.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednet import seeds
from fednet.algorithms import condensation
from fednet.algorithms.condensation import Condensation, by_layer, condense, present
from fednet.errors import ConfigError
from fednet.tensors import Tensors

REDUCED = Condensation(iterations=5, real_batch=32)


class Conv(nn.Module):
    """Two blocks of a ConvNet with instance norm; BatchNorm on request."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else (lambda c: nn.GroupNorm(c, c))
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            norm(4),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            norm(4),
            nn.ReLU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.body(x))


def fresh(k, **options):
    with seeds.scope(0, f"net/{k}"):
        return Tensors.of(Conv(**options))


def data(classes=(0, 2, 3), n=40, seed=0):
    draw = seeds.rng(seed, "images")
    y = np.repeat(classes, n)
    x = draw.standard_normal((len(y), 1, 8, 8)) + y[:, None, None, None] / 2
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def rng(purpose):
    return seeds.rng(7, purpose)


def run(plan=REDUCED, xy=None, rng=rng, how=None, **options):
    x, y = data() if xy is None else xy
    net = Conv(**options)
    return condense(net, lambda k: fresh(k, **options), x, y, rng, plan, **(how or {}))[0]


def plainly(x, y, plan, how, **options):
    """Algorithm 1 as it is written: for each net one pass over real and one over synthetic images.
    Class by class, as each has random streams of its own.
    """
    net = Conv(**options).train()
    images = []
    for c in y.unique().tolist():
        real = x[y == c]
        start = rng(f"condense/start/{c}")
        batches = rng(f"condense/batch/{c}")
        image = torch.from_numpy(start.standard_normal((1, *x.shape[1:]), dtype=np.float32))
        optimizer = {k: v for k, v in how.items() if k != "compared"}
        sgd = torch.optim.SGD([image.requires_grad_()], plan.cond_lr, **optimizer)
        for k in range(plan.iterations):
            fresh(k, **options).into(net)
            weights = [p for p in net.parameters() if p.dim() > 1]
            batch = real
            if len(real) > plan.real_batch:
                rows = batches.choice(len(real), plan.real_batch, replace=False)
                batch = real[torch.from_numpy(rows)]
            labels = torch.full((len(batch),), c)
            g_real = torch.autograd.grad(F.cross_entropy(net(batch), labels), weights)
            loss = F.cross_entropy(net(image), labels[:1])
            d = torch.zeros(())
            for a, b in zip(torch.autograd.grad(loss, weights, create_graph=True), g_real):
                if "compared" in how:  # by layer
                    a = a.flatten()[None]
                    b = b.flatten()[None]
                else:
                    a = a.flatten(1)
                    b = b.flatten(1)
                norms = a.norm(dim=1) * b.norm(dim=1)
                d = d + (1 - (a * b).sum(1) / (norms + 1e-6)).sum()
            image.grad = torch.autograd.grad(d, image)[0]
            if image.grad.norm() > plan.clip_v:
                image.grad *= plan.clip_v / image.grad.norm()
            sgd.step()
        images.append(image.detach())
    return torch.cat(images)


@pytest.mark.parametrize(
    ("plan", "how", "batch_norm"),
    [
        (Condensation(iterations=10, real_batch=32, clip_v=0.1), {}, False),
        (
            Condensation(iterations=10, real_batch=32),
            {"momentum": 0.9, "weight_decay": 4e-5},
            False,
        ),
        (
            Condensation(iterations=10, real_batch=64, cond_lr=0.5),
            {"compared": by_layer},
            False,
        ),
        # By the batch, not by the running statistics of a net never run.
        (Condensation(iterations=5, real_batch=32), {}, True),
    ],
)
def test_it_gives_what_the_plain_loop_gives(plan, how, batch_norm):
    x, y = data()
    got = run(plan, (x, y), how=how, batch_norm=batch_norm)
    plain = plainly(x, y, plan, how, batch_norm=batch_norm)
    assert torch.allclose(got.x, plain, rtol=1e-4, atol=2e-4)
    begun = run(Condensation(iterations=0), (x, y))
    assert (got.x - begun.x).abs().max() > 0.05  # it went somewhere


@pytest.mark.parametrize(
    ("counts", "minimum", "classes"),
    [
        ([3, 0, 1, 2], 1, [0, 2, 3]),
        ([3, 0, 1, 2], 2, [0, 3]),
        ([3, 0, 1, 2], 4, []),
        ([0, 0], 0, []),
    ],
)
def test_a_class_with_too_few_samples_gets_no_image(counts, minimum, classes):
    assert present(counts, minimum) == classes
    y = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    if len(y):
        s = run(Condensation(iterations=1, cond_min=minimum), (torch.ones(len(y), 1, 8, 8), y))
        assert s.y.tolist() == classes
        assert s.x.shape == (len(classes), 1, 8, 8)


def test_a_class_does_not_depend_on_the_others_or_on_the_order_of_samples_of_others():
    x, y = data()
    whole = run(xy=(x, y))
    only = run(xy=(x[y == 2], y[y == 2]))
    assert torch.allclose(whole.x[1], only.x[0], atol=1e-5)
    backwards = torch.cat([torch.nonzero(y == c)[:, 0] for c in (3, 2, 0)])
    assert torch.equal(run(xy=(x[backwards], y[backwards])).x, whole.x)


@pytest.mark.parametrize("x", [{"a": torch.zeros(2, 3)}, torch.zeros(2, 3, dtype=torch.uint8)])
def test_samples_that_are_no_float_images_are_refused(x):
    with pytest.raises(ConfigError, match="one float tensor"):
        condensation.check(Conv(), x)


def test_classes_in_groups_are_the_same(monkeypatch):
    whole = run()
    floats = sum(p.numel() for p in Conv().parameters() if p.dim() > 1)
    for classes in (1, 2):  # at a time, of three
        monkeypatch.setattr(condensation, "GROUP", classes * floats)
        assert torch.allclose(run().x, whole.x, atol=1e-4)

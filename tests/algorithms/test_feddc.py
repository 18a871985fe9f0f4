"""FedDC and FedDC+. Reduced setting: K = 3, real batches of 8."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednet.algorithms.base import ClientFacts, Samples
from fednet.algorithms.feddc import FedDC, FedDCPlus
from fednet.tensors import mean
from tests.algorithms.small import CLASSES, Federation, Net, build, distance, same

REDUCED = {"iterations": 3, "real_batch": 8}
LABELS = [
    np.repeat([0, 2], 12),
    np.repeat([3, 1, 0], 9),
    np.repeat([1], 10),
    np.array([0] * 9 + [3] * 2 + [2]),
]


def fed(name="feddc", **options):
    return Federation(name, labels=LABELS, **{**REDUCED, **options})


def average(f):
    return mean((f.ups[i].x, f.ups[i].run.n) for i in range(4))


def test_feddc_plus_differs_in_the_optimizer_of_the_condensation():
    one, other = FedDC.Config(), FedDCPlus.Config()
    differing = {
        k: (getattr(one, k), getattr(other, k))
        for k in FedDC.Config.__struct_fields__
        if getattr(one, k) != getattr(other, k)
    }
    assert differing == {"cond_momentum": (0.0, 0.9), "cond_weight_decay": (0.0, 4e-5)}


def test_both_train_the_same_local_models_and_condense_differently():
    a, b = fed("feddc").rounds(1), fed("feddcplus").rounds(1)
    for i in range(4):
        assert same(a.ups[i].x, b.ups[i].x)
        assert a.ups[i].s.y.tolist() == b.ups[i].s.y.tolist()
        assert not torch.equal(a.ups[i].s.x, b.ups[i].s.x)


class Dropping(Net):
    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__(batch_norm)
        self.drop = nn.Dropout(0.5)

    def features(self, x):
        return self.drop(super().features(x))


def test_images_condensed_through_nets_that_draw_are_the_same_each_time_and_whoever_comes_before():
    f, g = (fed(kind=Dropping) for _ in range(2))
    alone = f.rounds(1, cohort=(1,)).ups[1].s
    assert torch.equal(g.rounds(1, cohort=(0, 1)).ups[1].s.x, alone.x)


def test_a_client_sends_one_image_a_class_it_has():
    f = fed().rounds(1)
    assert [f.ups[i].s.y.tolist() for i in range(4)] == [[0, 2], [0, 1, 3], [1], [0, 2, 3]]
    assert all(f.ups[i].s.x.shape == (len(f.ups[i].s), 1, 8, 8) for i in range(4))
    assert FedDC.Up.kinds() == {"state", "condensed", "statistics"}
    assert [fed(cond_min=3).rounds(1).ups[3].s.y.tolist()] == [[0]]


@pytest.mark.parametrize("minimum", [1, 3, 100])
def test_the_condensed_bytes_are_predicted_to_the_byte(minimum):
    f = fed(cond_min=minimum).rounds(1)
    for i in range(4):
        counts = np.bincount(LABELS[i], minlength=CLASSES)
        facts = ClientFacts(
            n=len(LABELS[i]),
            class_counts=counts,
            sample_nbytes=64,
            input_shape=(1, 8, 8),
            public_n=40,
        )
        s = f.ups[i].s
        assert f.algorithm.sizes(FedDC.Up, facts) == {"s": s.x.nbytes + s.y.nbytes}
    assert f.algorithm.sizes(FedDC.Down, facts) == {}


def test_once_sends_the_same_images_again_and_every_makes_new_ones():
    f = fed().rounds(1)
    first = f.ups[1].s
    f.rounds(1)
    assert f.ups[1].s.x is first.x
    assert same(f.ups[1].x, f.locals[1])
    g = fed(condense="every").rounds(1)
    assert torch.equal(g.ups[1].s.x, first.x)
    assert not torch.equal(g.rounds(1).ups[1].s.x, first.x)


def test_the_images_do_not_depend_on_the_global_model():
    a, b = (
        fed(condense="every", train={"lr": 0.5}).rounds(2),
        fed(condense="every", ft_epochs=0).rounds(2),
    )
    assert not same(a.downs[0].x, b.downs[0].x)
    assert torch.equal(a.ups[0].s.x, b.ups[0].s.x)


# -- fine-tuning -----------------------------------------------------------------------------------
def union(f):
    return torch.cat([f.ups[i].s.x for i in range(4)]), torch.cat([f.ups[i].s.y for i in range(4)])


@pytest.mark.parametrize("balance", ["none", "class"])
def test_one_epoch_is_one_full_batch_step_from_the_mean(balance):
    """class: each class of the union counts as much; their images are 3, 2, 2 and 2."""
    f = fed(ft_epochs=1, ft_lr=0.25, ft_balance=balance).rounds(1)
    theta, (x, y) = average(f), union(f)
    net = theta.into(build(0))
    loss = F.cross_entropy(net(x), y)
    if balance == "class":
        loss = torch.stack([F.cross_entropy(net(x[y == c]), y[y == c]) for c in range(4)]).mean()
    gradient = torch.autograd.grad(loss, list(net.parameters()))
    expected = theta.vector - 0.25 * torch.cat([g.flatten() for g in gradient])
    assert torch.allclose(f.server.x.vector, expected, atol=1e-6)
    assert f.io.reported["condensed_images"] == 9


def test_epochs_batch_and_learning_rate_of_the_fine_tuning():
    f = fed().rounds(1)
    tuned = {
        repr(o): fed(**o).rounds(1).server.x
        for o in ({"ft_epochs": 3}, {"ft_batch": 2}, {"ft_lr": 0.001})
    }
    assert all(distance(x, f.server.x) > 1e-6 for x in tuned.values())
    # The clients' lr by default.
    again = f.io.fit(average(f), Samples(*union(f)), epochs=10, lr=0.1, batch_size=256)
    assert same(f.server.x, again)


def test_where_nobody_has_enough_samples_the_mean_stands():
    f = fed(cond_min=100).rounds(1)
    assert same(f.server.x, average(f))


def test_batchnorm_is_fine_tuned_in_train_mode():
    f = Federation("feddc", labels=LABELS, batch_norm=True, kind=Net, ft_lr=0.0, **REDUCED).rounds(
        1
    )
    assert not torch.equal(f.server.x.buffers, average(f).buffers)
    assert torch.equal(f.server.x.vector, average(f).vector)


def test_old_condensed_sets_are_not_used_again():
    f = fed().rounds(1, (0, 1))
    f.rounds(1, (2,))
    assert f.io.reported["condensed_images"] == 1


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_mean_is_by_samples_or_uniform(weighting):
    f = fed(ft_epochs=0, weighting=weighting).rounds(1)
    expected = mean((f.ups[i].x, f.ups[i].run.n if weighting == "samples" else 1) for i in range(4))
    assert same(f.server.x, expected)

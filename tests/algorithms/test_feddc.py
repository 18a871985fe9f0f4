"""FedDC and FedDC+. Reduced setting: K = 3, real batches of 8."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from fednet.algorithms.base import ClientFacts, Samples
from fednet.algorithms.feddc import FedDC, FedDCPlus
from fednet.tensors import mean
from tests.algorithms.harness import CLASSES, begun, same

REDUCED = {"iterations": 3, "real_batch": 8}
LABELS = [
    np.repeat([0, 2], 12),
    np.repeat([3, 1, 0], 9),
    np.repeat([1], 10),
    np.array([0] * 9 + [3] * 2 + [2]),
]


def fed(name="feddc", **options):
    return begun(name, labels=LABELS, **{**REDUCED, **options})


def average(f):
    return mean((f.ups[i].x, f.ups[i].run.n) for i in range(4))


def test_feddc_plus_differs_in_the_optimizer_of_the_condensation():
    one = msgspec.to_builtins(FedDC.Config())
    optimizer = {"cond_momentum": 0.9, "cond_weight_decay": 4e-5}
    assert msgspec.to_builtins(FedDCPlus.Config()) == one | optimizer
    images = fed().rounds(1).ups[1].s.x
    without = dict.fromkeys(optimizer, 0.0)
    assert torch.equal(fed("feddcplus", **without).rounds(1).ups[1].s.x, images)
    for key, value in optimizer.items():
        changed = fed("feddcplus", **{**without, key: value}).rounds(1).ups[1].s.x
        assert not torch.equal(changed, images)


@pytest.mark.usefixtures("readings")
def test_a_cosine_a_layer_makes_other_images_than_one_an_output():
    images = fed().rounds(1).ups[1].s.x
    assert not torch.equal(fed("feddc-layer").rounds(1).ups[1].s.x, images)


def test_images_condensed_through_nets_that_draw_are_the_same_each_time_and_whoever_comes_before():
    f, g = (fed(model={"name": "pfl_cnn"}) for _ in range(2))
    alone = f.rounds(1, cohort=(1,)).ups[1].s
    assert torch.equal(g.rounds(1, cohort=(0, 1)).ups[1].s.x, alone.x)


@pytest.mark.parametrize(
    ("minimum", "classes"),
    [
        (1, [[0, 2], [0, 1, 3], [1], [0, 2, 3]]),
        (3, [[0, 2], [0, 1, 3], [1], [0]]),
        (100, [[], [], [], []]),
    ],
)
def test_a_client_sends_one_image_a_class_it_has_and_its_bytes_are_predicted(minimum, classes):
    f = fed(cond_min=minimum).rounds(1)
    assert [f.ups[i].s.y.tolist() for i in range(4)] == classes
    for i, labels in enumerate(LABELS):
        counts = np.bincount(labels, minlength=CLASSES)
        facts = ClientFacts(len(labels), counts, 1024, input_shape=(1, 16, 16), public_n=40)
        s = f.ups[i].s
        assert s.x.shape == (len(s), 1, 16, 16)
        assert f.algorithm.sizes(FedDC.Up, facts) == {"s": s.x.nbytes + s.y.nbytes}
    assert f.algorithm.sizes(FedDC.Down, facts) == {}


@pytest.mark.usefixtures("readings")
def test_once_sends_the_same_images_again_and_every_makes_new_ones():
    f = fed().rounds(1)
    first = f.ups[1].s
    f.rounds(1)
    assert f.ups[1].s.x is first.x
    assert same(f.ups[1].x, f.locals[1])
    g = fed("feddc-every").rounds(1)
    assert torch.equal(g.ups[1].s.x, first.x)
    assert not torch.equal(g.rounds(1).ups[1].s.x, first.x)


# -- fine-tuning -----------------------------------------------------------------------------------
def union(f):
    return torch.cat([f.ups[i].s.x for i in range(4)]), torch.cat([f.ups[i].s.y for i in range(4)])


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),  # the clients' rate
        ({"ft_epochs": 1, "ft_lr": 0.25}, {"epochs": 1, "lr": 0.25}),
        ({"ft_batch": 2}, {"batch_size": 2}),
    ],
)
def test_the_mean_is_tuned_on_all_images_with_the_settings_of_the_fine_tuning(options, settings):
    f = fed(**options).rounds(1)
    defaults = {"epochs": 10, "lr": 0.1, "batch_size": 256}
    again = f.io.fit(average(f), Samples(*union(f)), **{**defaults, **settings})
    assert same(f.server.x, again)
    assert not same(f.server.x, average(f))
    assert f.io.reported["condensed_images"] == 9


def test_the_mean_can_be_uniform():
    f = fed(ft_epochs=0, weighting="uniform").rounds(1)
    assert same(f.server.x, mean((f.ups[i].x, 1) for i in range(4)))

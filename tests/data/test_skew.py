"""Partitions of the field beside Dirichlet's, feature noise, and the measures of skew."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.data.augment import crop_reflect
from fednet.data.base import Data
from fednet.data.federation import Federation
from fednet.data.partitioners.dirichlet_client import dirichlet_client, draw_counts, sizes
from fednet.data.partitioners.labels import labels
from fednet.errors import ConfigError
from fednet.report.partition import measures
from fednet.seeds import rng


def table(y, parts):
    return np.stack([np.bincount(y[p], minlength=int(y.max()) + 1) for p in parts])


def once(parts, n):
    whole = np.concatenate(parts)
    return len(np.unique(whole)) == len(whole) and set(whole) <= set(range(n))


# -- labels ----------------------------------------------------------------------------------------
@given(seed=st.integers(0, 1000), clients=st.integers(1, 30), k=st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_every_client_holds_samples_of_exactly_k_classes(seed, clients, k):
    y = np.tile(np.arange(10), 40)
    held = table(y, parts := labels(y, clients, rng(seed, "partition"), per_client=k))
    assert once(parts, len(y))
    assert ((held > 0).sum(axis=1) == k).all()
    assert all(held[i, i % 10] > 0 for i in range(clients))


def test_a_class_is_divided_evenly_among_its_owners():
    y = np.repeat(np.arange(2), 30)
    # Two classes of two: each of four clients owns both, 30 samples are 8 + 8 + 7 + 7.
    held = table(y, labels(y, 4, rng(0, "partition"), per_client=2))
    assert held.tolist() == [[8, 8], [8, 8], [7, 7], [7, 7]]


def test_a_class_without_an_owner_is_used_by_nobody():
    y = np.repeat(np.arange(10), 5)
    parts = labels(y, 3, rng(0, "partition"), per_client=1)
    assert [sorted(set(y[p])) for p in parts] == [[0], [1], [2]]


def test_more_classes_than_there_are_or_owners_than_samples_are_refused():
    with pytest.raises(ConfigError, match="expected 1 to 3"):
        labels(np.arange(3), 2, rng(0, "p"), per_client=4)
    with pytest.raises(ConfigError, match="class 0 has 1 samples for 2 clients"):
        labels(np.array([0, 1, 1, 1, 1]), 4, rng(0, "p"), per_client=1)


# -- a Dirichlet draw for each client --------------------------------------------------------------
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(1, 20),
    alpha=st.floats(0.001, 100),
    sigma=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_every_client_has_its_size_and_no_sample_has_two_owners(seed, clients, alpha, sigma):
    y = np.repeat(np.arange(5), [10, 20, 30, 40, 50])
    draw = rng(seed, "partition")
    parts = dirichlet_client(y, clients, draw, alpha=alpha, sigma=sigma)
    assert once(parts, len(y))
    assert min(map(len, parts)) >= 1
    if sigma == 0:
        assert {len(p) for p in parts} == {len(y) // clients}


def test_a_class_that_is_used_up_leaves_a_client_its_others_and_then_what_is_left():
    q = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    # Client 1 may draw of classes 0 and 1, client 0 of class 0 alone: 3 of class 0 are too few for
    # its 5, so that it gets what nobody else draws.
    held = draw_counts(q, np.array([3, 2, 5]), np.array([5, 4]), rng(0, "p"))
    assert held.sum(axis=1).tolist() == [5, 4]
    assert held[:, 0].sum() == 3
    assert held[:, 1].sum() == 2
    assert held[:, 2].sum() == 4


def test_a_large_alpha_gives_every_client_the_whole():
    y = np.repeat(np.arange(10), 1000)
    many = table(y, dirichlet_client(y, 20, rng(0, "p"), alpha=1e6))
    assert abs(many / 500 - 0.1).max() < 0.06  # four standard deviations of a binomial


def test_log_normal_sizes_are_whole_and_leave_nobody_without():
    made = sizes(1000, 50, 2.0, rng(0, "p"))
    assert made.min() >= 1
    assert made.sum() <= 1000
    assert made.max() > 5 * np.median(made)


# -- features --------------------------------------------------------------------------------------
def federation(noise):
    x = torch.full((400, 1, 8, 8), 128, dtype=torch.uint8)
    y = torch.arange(400) % 2
    data = Data(train=(x, y), test=(x[:40], y[:40]), classes=2, mean=(0.5,), std=(0.25,))
    parts = [np.arange(100 * i, 100 * (i + 1)) for i in range(4)]
    return Federation(
        data, parts, [np.arange(10)] * 4, np.arange(0), np.arange(0), "iid", noise, seed=7
    )


def test_noise_grows_from_none_at_the_first_client_to_sigma_at_the_last():
    quiet, noisy = federation(0.0), federation(0.3)
    for client in range(4):
        added = noisy.site(client).train[0] - quiet.site(client).train[0]
        # 0.3 * client / 3 in units of 0..1, so 0.1, 0.2, 0.3 over std 0.25 as the model sees it
        assert added.std().item() == pytest.approx(0.4 * client, rel=0.03, abs=1e-9)
        assert torch.equal(noisy.site(client).train[0], noisy.site(client).train[0])
    train, test = noisy.site(3).train[0], noisy.site(3).test[0]
    assert not torch.equal(train[:10], test)
    assert test.std().item() == pytest.approx(1.2, rel=0.1)


def test_a_reflected_border_is_the_image_mirrored():
    x = torch.arange(64.0).view(1, 1, 8, 8)

    def first(seed):  # the offset that a generator draws
        return torch.randint(0, 9, (2, 1), generator=torch.Generator().manual_seed(seed)).view(-1)

    seed = next(s for s in range(1000) if first(s).tolist() == [0, 0])
    made = crop_reflect(x, torch.Generator().manual_seed(seed))
    # Cut at the upper left of the padded image: rows and columns 4, 3, 2, 1, 0, 1, 2, 3.
    at = [4, 3, 2, 1, 0, 1, 2, 3]
    assert made[0, 0].tolist() == [[8.0 * r + c for c in at] for r in at]


# -- measures --------------------------------------------------------------------------------------
def test_measures_of_two_clients_with_a_class_each():
    found = measures(np.array([[10, 0], [0, 10]]))
    assert found["emd"] == pytest.approx(1.0)  # |1 - .5| + |0 - .5|
    assert found["hellinger"] == pytest.approx(math.sqrt(1 - math.sqrt(0.5)))
    assert found["classes"] == pytest.approx(1.0)
    assert found["gini"] == pytest.approx(0.0)


def test_measures_of_equal_shares_and_unequal_sizes():
    found = measures(np.array([[1, 1], [3, 3]]))
    assert found["emd"] == found["hellinger"] == 0.0
    assert found["classes"] == pytest.approx(2.0)
    assert found["gini"] == pytest.approx(0.25)  # |2 - 6| / (2 * 2 * 4), worked by hand

"""Each scheme on its own: its invariants, and small cases worked by hand."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.data.partitioners.dirichlet import (
    dirichlet,
    iid,
    quantity,
    raise_to_least,
    shares_with_room,
)
from fednet.data.partitioners.dirichlet_client import dirichlet_client, draw_counts, sizes
from fednet.data.partitioners.given import file, for_test, natural
from fednet.data.partitioners.labels import labels, shards
from fednet.errors import ConfigError, DataError
from fednet.seeds import rng


class Fixed:
    """A generator whose Dirichlet draws are given, and whose permutations are the identity."""

    def __init__(self, *draws):
        self.draws = [np.array(d, dtype=float) for d in draws]

    def dirichlet(self, alpha):
        return self.draws.pop(0)

    def permutation(self, x):
        return np.arange(x) if isinstance(x, int) else np.array(x)


def flat(parts):
    return np.sort(np.concatenate(parts)).tolist()


def table(y, parts):
    return np.stack([np.bincount(y[p], minlength=int(y.max()) + 1) for p in parts])


@pytest.mark.parametrize(
    ("scheme", "options", "complete"),
    [
        (iid, {}, True),
        (quantity, {"alpha": 0.3, "min_samples": 2}, True),
        (dirichlet, {"alpha": 0.5}, True),
        (dirichlet, {"alpha": 5.0, "cap": True, "min_samples": 3}, True),
        (dirichlet_client, {"alpha": 0.1}, False),
        (dirichlet_client, {"alpha": 10.0, "sigma": 0.5}, False),
        (labels, {"per_client": 3}, False),
        (shards, {"per_client": 2}, False),
    ],
)
@given(counts=st.lists(st.integers(15, 40), min_size=5, max_size=6), clients=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_every_client_has_samples_and_no_sample_two_owners(
    scheme, options, complete, counts, clients
):
    y = rng(clients, "shuffle").permutation(np.repeat(np.arange(len(counts)), counts))
    parts = scheme(y, clients, rng(0, "partition"), **options)
    assert len(parts) == clients
    assert min(map(len, parts)) >= options.get("min_samples", 1)
    used = flat(parts)
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(len(y)))
    assert not complete or len(used) == len(y)
    again = scheme(y, clients, rng(0, "partition"), **options)
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]
    if scheme is labels:
        held = table(y, parts)
        assert ((held > 0).sum(axis=1) == 3).all()
        assert all(held[i, i % len(counts)] > 0 for i in range(clients))
    if scheme is shards or options == {"alpha": 0.1}:
        assert len(set(map(len, parts))) == 1
    if scheme is iid:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda y: dirichlet(y, 101, Fixed()), "100 samples cannot give each of 101 clients 1"),
        (lambda y: dirichlet(y, 2, Fixed(), alpha=0.0), "alpha: expected a number > 0"),
        (lambda y: shards(y, 2, Fixed(), per_client=2**62), "cannot fill 9223372036854775"),
        (lambda y: dirichlet_client(y, 2, Fixed(), sigma=1e8), "a number from 0 to 20"),
        (lambda y: labels(y, 2, Fixed(), per_client=4), "expected 1 to 2"),
        (
            lambda y: labels((np.arange(4) > 0) * 1, 4, rng(0, "p"), per_client=1),
            "class 0 has 1 sam",
        ),
        (lambda y: natural(None, 2, Fixed()), "needs the owner of each sample"),
        (lambda y: natural(y, 3, Fixed()), "3 clients want as many natural groups; there are 2"),
    ],
)
def test_what_the_data_cannot_fill_is_refused(made, says):
    with pytest.raises(ConfigError, match=says):
        made(np.repeat(np.arange(2), 50))


# -- Dirichlet -------------------------------------------------------------------------------------
def test_each_class_is_cut_at_the_floor_of_its_cumulated_shares():
    y = np.array([0] * 10 + [1] * 4)
    parts = dirichlet(y, 2, Fixed([0.29, 0.71], [0.5, 0.5]))
    # floor(0.29 * 10) = 2 zeros, floor(0.5 * 4) = 2 ones
    assert [p.tolist() for p in parts] == [[0, 1, 10, 11], [2, 3, 4, 5, 6, 7, 8, 9, 12, 13]]


def test_with_the_cap_a_client_that_holds_its_share_gets_no_more():
    y = np.array([0] * 6 + [1] * 6)
    draws = [0.9, 0.05, 0.05], [0.5, 0.25, 0.25]
    # n/N = 4. Without the cap client 0 holds 5 zeros and 3 ones; with it 5 >= 4, and the others
    # share the ones
    assert [len(p) for p in dirichlet(y, 3, Fixed(*draws))] == [8, 1, 3]
    assert [len(p) for p in dirichlet(y, 3, Fixed(*draws), cap=True)] == [5, 3, 4]
    just = Fixed([0.7, 0.2, 0.1], draws[1])  # 4 zeros are its share exactly
    assert [len(p) for p in dirichlet(y, 3, just, cap=True)] == [4, 4, 4]
    # Where the cap leaves nothing the uncapped shares are used.
    assert shares_with_room(np.array([0.6, 0.4, 0.0]), np.array([0, 0, 1])).tolist() == [
        0.6,
        0.4,
        0.0,
    ]


def test_a_try_that_leaves_a_client_too_little_is_repeated_from_scratch():
    y = np.array([0] * 4 + [1] * 4)
    nan = [np.nan, np.nan]  # as NumPy draws for a very small alpha: drawn again
    draws = [1.0, 0.0], [0.9, 0.1], nan, [0.5, 0.5], [0.5, 0.5]
    parts = dirichlet(y, 2, Fixed(*draws), min_samples=3)
    assert [p.tolist() for p in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_who_is_short_takes_of_its_own_class_from_whoever_holds_most_of_it():
    sizes = np.array([[9, 3, 0, 0], [1, 5, 0, 1]])
    shares = np.array([[9.0, 3.0, 0.4, 0.1], [1.0, 5.0, 0.2, 1.9]])
    found = raise_to_least(sizes, shares, 2)
    # client 2 takes two of class 0 from client 0; client 3 one of class 1 from client 1
    assert found.tolist() == [[7, 3, 2, 0], [1, 4, 0, 2]]
    sizes = np.array([[2, 0], [0, 0], [2, 0]])
    shares = np.array([[2, 0.5], [0, 0.9], [2, 0.1]])
    assert raise_to_least(sizes, shares, 2).tolist() == [
        [0, 2],
        [0, 0],
        [2, 0],
    ]  # it keeps two itself


def test_a_thousand_clients_all_get_samples_and_are_still_skewed():
    y = rng(0, "labels").permutation(np.repeat(np.arange(10), 600))
    parts = dirichlet(y, 1000, rng(0, "partition"), alpha=0.1)
    assert flat(parts) == list(range(len(y)))
    assert min(map(len, parts)) == 1
    # In the mean a client's largest class is most of what it holds.
    assert np.mean([np.bincount(y[p]).max() / len(p) for p in parts]) > 0.6
    sizes = quantity(y, 1000, rng(0, "partition"), alpha=0.3, min_samples=2)
    assert flat(sizes) == list(range(len(y)))
    assert min(map(len, sizes)) == 2


@pytest.mark.parametrize(
    ("clients", "alpha", "least", "digest"),
    [(10, 0.1, 5, "668fb86703110d78"), (120, 0.1, 1, "cfc6e21059c9523b")],
)
def test_a_draw_that_succeeds_is_not_repaired(clients, alpha, least, digest):
    y = rng(0, "labels").permutation(np.repeat(np.arange(10), 600))
    parts = dirichlet(y, clients, rng(3, "partition"), alpha=alpha, min_samples=least)
    assert hashlib.sha256(np.concatenate(parts).tobytes()).hexdigest()[:16] == digest


def test_a_class_that_is_used_up_leaves_a_client_its_others_and_then_what_is_left():
    q = np.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    # Client 1 may draw of classes 0 and 1, client 0 of class 0 alone: 3 of class 0 are too few for
    # its 5, so that it gets what nobody else draws.
    held = draw_counts(q, np.array([3, 2, 5]), np.array([5, 4]), rng(0, "p"))
    assert held.sum(axis=1).tolist() == [5, 4]
    assert held.sum(axis=0).tolist() == [3, 2, 4]


def test_a_large_alpha_gives_every_client_the_whole_and_a_large_sigma_unlike_sizes():
    y = np.repeat(np.arange(10), 1000)
    many = table(y, dirichlet_client(y, 20, rng(0, "p"), alpha=1e6))
    assert abs(many / 500 - 0.1).max() < 0.06  # four standard deviations of a binomial
    made = sizes(1000, 50, 2.0, rng(0, "p"))
    assert made.max() > 5 * np.median(made)


# -- numbers of classes ----------------------------------------------------------------------------
def test_a_class_is_divided_evenly_among_its_owners():
    y = np.repeat(np.arange(2), 30)
    # Two classes of two: each of four clients owns both, 30 samples are 8 + 8 + 7 + 7.
    held = table(y, labels(y, 4, rng(0, "partition"), per_client=2))
    assert held.tolist() == [[8, 8], [8, 8], [7, 7], [7, 7]]


def test_shards_are_cut_from_the_sorted_labels_and_the_remainder_is_unused():
    y = np.array([1, 0, 1, 0, 1, 0, 1, 0, 1])
    parts = shards(y, 2, Fixed(), per_client=2)
    # sorted: 1 3 5 7 | 0 2 4 6 8; four shards of floor(9 / 4) = 2; sample 8 is left over
    assert [p.tolist() for p in parts] == [[1, 3, 5, 7], [0, 2, 4, 6]]


def test_test_shards_have_the_clients_own_numbers():
    y = np.repeat(np.arange(10), 20)
    ty = np.repeat(np.arange(10), 6)
    parts = shards(y, 10, rng(0, "partition"))
    tests = shards.test(ty, 10, rng(0, "partition"), rng(0, "client_test"))
    assert [np.unique(y[p]).tolist() for p in parts] == [np.unique(ty[t]).tolist() for t in tests]
    with pytest.raises(ConfigError, match="19 test samples cannot fill 20 shards"):
        shards.test(ty[:19], 10, rng(0, "partition"), rng(0, "client_test"))


# -- the rest --------------------------------------------------------------------------------------
def test_quantity_skew_cuts_a_shuffled_pool_at_the_floor_of_cumulated_sizes():
    y = np.arange(10) % 2
    parts = quantity(y, 2, Fixed([0.29, 0.71]))
    assert [p.tolist() for p in parts] == [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9]]
    parts = quantity(np.zeros(100, dtype=int), 10, rng(0, "partition"), alpha=0.01, min_samples=9)
    assert sorted(map(len, parts)) == [*[9] * 9, 19]


def test_natural_groups_go_one_to_a_client_and_more_are_dealt_whole():
    groups = np.array([7, 3, 7, 5, 3])
    assert [p.tolist() for p in natural(groups, 3, rng(0, "partition"))] == [[1, 4], [3], [0, 2]]
    groups = np.repeat(np.arange(7), 3)
    parts = natural(groups, 3, rng(0, "partition"))
    assert flat(parts) == list(range(21))
    assert sorted(len(np.unique(groups[p])) for p in parts) == [2, 2, 3]


def test_a_file_names_indices_into_the_whole_training_set(tmp_path):
    path = tmp_path / "parts.json"
    pool = np.array([0, 2, 3, 5])
    path.write_text(json.dumps({"train": [[5, 0], [3]], "test": [[1], [0]]}))
    assert [p.tolist() for p in file(2, pool, path=str(path))] == [[3, 0], [2]]
    assert [t.tolist() for t in for_test(np.zeros(2), 2, path=str(path))] == [[1], [0]]
    path.write_text("[[0], [3]]")
    assert for_test(np.zeros(2), 2, path=str(path)) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[0], [4]]", "client 1 names sample 4, which is not in the training pool"),
        ("[[0]]", "1 lists under 'train' for 2 clients"),
        ("[[0], [0.5]]", "expected"),
        ("no json", "not a readable JSON file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "parts.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        file(2, np.array([0, 2, 3, 5]), path=str(path))

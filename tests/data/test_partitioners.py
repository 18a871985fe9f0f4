"""Each scheme on its own: its invariants, and small cases worked by hand."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fednet.data.partitioners.dirichlet import (
    capped,
    dirichlet,
    iid,
    proportions,
    quantity,
    repaired,
)
from fednet.data.partitioners.dirichlet_client import dirichlet_client
from fednet.data.partitioners.given import file, for_test, natural
from fednet.data.partitioners.labels import shards
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


def test_where_the_cap_leaves_nothing_the_uncapped_shares_are_used():
    p = np.array([0.6, 0.4, 0.0])
    assert capped(p, np.array([False, False, True])).tolist() == [0.6, 0.4, 0.0]
    assert capped(p, np.array([False, False, False])).tolist() == [0.6, 0.4, 0.0]
    assert capped(p, np.array([False, True, True])).tolist() == [0.0, 1.0, 0.0]


def test_a_draw_of_nan_or_zeros_is_drawn_again():
    assert proportions(Fixed([np.nan, np.nan], [0.0, 0.0], [0.25, 0.75]), 2, 1e-9).tolist() == [
        0.25,
        0.75,
    ]


def test_a_try_that_leaves_a_client_too_little_is_repeated_from_scratch():
    y = np.array([0] * 4 + [1] * 4)
    parts = dirichlet(y, 2, Fixed([1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5]), min_samples=3)
    assert [p.tolist() for p in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_who_is_short_takes_of_its_own_class_from_whoever_holds_most_of_it():
    sizes = np.array([[9, 3, 0, 0], [1, 5, 0, 1]])
    shares = np.array([[9.0, 3.0, 0.4, 0.1], [1.0, 5.0, 0.2, 1.9]])
    found = repaired(sizes, shares, 2)
    # client 2 takes two of class 0 from client 0; client 3 one of class 1 from client 1
    assert found.tolist() == [[7, 3, 2, 0], [1, 4, 0, 2]]
    assert sizes.tolist() == [[9, 3, 0, 0], [1, 5, 0, 1]]


def test_nobody_gives_what_it_needs_itself():
    sizes, shares = np.array([[2, 0], [0, 0], [2, 0]]), np.array([[2, 0.5], [0, 0.9], [2, 0.1]])
    assert repaired(sizes, shares, 2).tolist() == [[0, 2], [0, 0], [2, 0]]


def test_it_always_ends():
    y = np.repeat(np.arange(2), 50)
    parts = dirichlet(y, 20, rng(0, "partition"), alpha=0.001, min_samples=5)
    assert [len(p) for p in parts] == [5] * 20
    assert flat(parts) == list(range(100))
    with pytest.raises(ConfigError, match="100 samples cannot give each of 101 clients 1"):
        dirichlet(y, 101, rng(0, "partition"))


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
    [
        (10, 0.1, 5, "668fb86703110d78"),
        (50, 0.3, 10, "df87bae57c6bada6"),
        (100, 0.3, 3, "b35e917a32c88770"),
        (120, 0.1, 1, "cfc6e21059c9523b"),
    ],
)
def test_a_draw_that_succeeds_is_not_repaired(clients, alpha, least, digest):
    y = rng(0, "labels").permutation(np.repeat(np.arange(10), 600))
    parts = dirichlet(y, clients, rng(3, "partition"), alpha=alpha, min_samples=least)
    assert hashlib.sha256(np.concatenate(parts).tobytes()).hexdigest()[:16] == digest


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    clients=st.integers(1, 6),
    alpha=st.sampled_from([0.5, 1.0, 100.0]),
    cap=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_dirichlet_is_disjoint_complete_and_deterministic(counts, clients, alpha, cap, seed):
    y = np.repeat(np.arange(len(counts)), counts)
    y = rng(seed, "shuffle").permutation(y)
    assume(len(y) >= 8 * clients)
    parts = dirichlet(y, clients, rng(seed, "partition"), alpha=alpha, cap=cap)
    assert flat(parts) == list(range(len(y)))
    assert min(map(len, parts)) >= 1
    again = dirichlet(y, clients, rng(seed, "partition"), alpha=alpha, cap=cap)
    assert [p.tolist() for p in parts] == [p.tolist() for p in again]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: shards(np.zeros(9), 2, Fixed(), per_client=2**62), "cannot fill 9223372036854775"),
        (lambda: dirichlet_client(np.zeros(9), 2, Fixed(), sigma=1e8), "a number from 0 to 20"),
    ],
)
def test_what_no_data_could_fill_is_refused_before_it_is_drawn(made, says):
    with pytest.raises(ConfigError, match=says):
        made()


# -- shards ----------------------------------------------------------------------------------------
def test_shards_are_cut_from_the_sorted_labels_and_the_remainder_is_unused():
    y = np.array([1, 0, 1, 0, 1, 0, 1, 0, 1])
    parts = shards(y, 2, Fixed(), per_client=2)
    # sorted: 1 3 5 7 | 0 2 4 6 8; four shards of floor(9 / 4) = 2; sample 8 is left over
    assert [p.tolist() for p in parts] == [[1, 3, 5, 7], [0, 2, 4, 6]]


@given(
    clients=st.integers(1, 10),
    per_client=st.integers(1, 3),
    each=st.integers(3, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_shards_are_equal_and_disjoint(clients, per_client, each, seed):
    y = rng(seed, "shuffle").permutation(np.repeat(np.arange(10), each))
    parts = shards(y, clients, rng(seed, "partition"), per_client=per_client)
    assert {len(p) for p in parts} == {per_client * (len(y) // (clients * per_client))}
    assert len(set(flat(parts))) == sum(map(len, parts))


def test_test_shards_have_the_clients_own_numbers():
    y, ty = np.repeat(np.arange(10), 20), np.repeat(np.arange(10), 6)
    parts = shards(y, 10, rng(0, "partition"))
    tests = shards.test(ty, 10, rng(0, "partition"), rng(0, "client_test"))
    assert [np.unique(y[p]).tolist() for p in parts] == [np.unique(ty[t]).tolist() for t in tests]
    with pytest.raises(ConfigError, match="19 test samples cannot fill 20 shards"):
        shards.test(ty[:19], 10, rng(0, "partition"), rng(0, "client_test"))


# -- the rest --------------------------------------------------------------------------------------
def test_iid_parts_differ_by_one_at_most():
    parts = iid(np.zeros(11, dtype=int), 3, rng(0, "partition"))
    assert sorted(map(len, parts)) == [3, 4, 4]
    assert flat(parts) == list(range(11))


def test_quantity_skew_cuts_a_shuffled_pool_at_the_floor_of_cumulated_sizes():
    y = np.arange(10) % 2
    assert [p.tolist() for p in quantity(y, 2, Fixed([0.29, 0.71]))] == [
        [0, 1],
        [2, 3, 4, 5, 6, 7, 8, 9],
    ]
    parts = quantity(np.zeros(100, dtype=int), 10, rng(0, "partition"), alpha=0.01, min_samples=9)
    assert sorted(map(len, parts)) == [*[9] * 9, 19]


def test_natural_groups_go_one_to_a_client_in_ascending_order():
    groups = np.array([7, 3, 7, 5, 3])
    assert [p.tolist() for p in natural(groups, 3, rng(0, "partition"))] == [[1, 4], [3], [0, 2]]


def test_more_groups_than_clients_are_dealt_whole():
    groups = np.repeat(np.arange(7), 3)
    parts = natural(groups, 3, rng(0, "partition"))
    assert flat(parts) == list(range(21))
    assert sorted(len(np.unique(groups[p])) for p in parts) == [2, 2, 3]
    assert sum(len(np.unique(groups[p])) for p in parts) == 7


def test_natural_wants_groups_and_enough_of_them():
    with pytest.raises(ConfigError, match="this one has none"):
        natural(None, 2, rng(0, "partition"))
    with pytest.raises(ConfigError, match="3 clients want as many natural groups; there are 2"):
        natural(np.array([0, 1]), 3, rng(0, "partition"))


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
        ('{"clients": 3}', "expected"),
        ("[[0], [0.5]]", "expected"),
        ("no json", "not a readable JSON file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, says):
    path = tmp_path / "parts.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        file(2, np.array([0, 2, 3, 5]), path=str(path))

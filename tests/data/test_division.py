"""The division of a dataset: disjoint, complete, deterministic, and exact in its counts."""

from __future__ import annotations

import hashlib
import weakref

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.client.worker import Device
from fednet.config.schema import DataSection, PartitionSection, PublicSection
from fednet.data.base import Data
from fednet.data.division import split
from fednet.data.federation import Federation
from fednet.errors import ConfigError, DataError


def section(
    scheme="iid",
    tests="like_train",
    validation=0.0,
    public=None,
    pool="same",
    seed=None,
    **options,
):
    return DataSection(
        partition=PartitionSection(scheme=scheme, seed=seed, options=options),
        client_test=tests,
        validation=validation,
        public=PublicSection(**(public or {})),
        baseline_pool=pool,
    )


def data(train: list[int], test: list[int], groups=None, classes=None, test_groups=None) -> Data:
    """Samples whose only input is their own number: train 0, 1, ...; test 1000, 1001, ..."""
    x = np.arange(len(train), dtype=np.float32)[:, None]
    tx = 1000 + np.arange(len(test), dtype=np.float32)[:, None]
    return Data(
        train=(x, np.array(train)),
        test=(tx, np.array(test, dtype=np.int64)),
        groups=groups,
        test_groups=test_groups,
        classes=classes or max(train) + 1,
    )


def everything(federation: Federation) -> np.ndarray:
    return np.sort(np.concatenate([*federation.parts, federation.validation, federation.public]))


labels = st.lists(st.integers(0, 4), min_size=40, max_size=120).map(lambda y: [0, 1, 2, 3, 4, *y])


@given(
    y=labels,
    ty=st.lists(st.integers(0, 4), min_size=5, max_size=60),
    clients=st.integers(1, 5),
    seed=st.integers(0, 9),
    scheme=st.sampled_from([("iid", {}), ("dirichlet", {"alpha": 0.5})]),
    validation=st.sampled_from([0.0, 0.2]),
    fraction=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=25, deadline=None)
def test_parts_validation_and_public_are_disjoint_and_cover_the_pool(
    y, ty, clients, seed, scheme, validation, fraction
):
    cut = section(
        scheme[0], validation=validation, public={"samples": 0, "fraction": fraction}, **scheme[1]
    )
    d = data(y, ty, classes=5)
    federation = split(d, cut, clients, seed)
    assert everything(federation).tolist() == list(range(len(y)))
    assert min(map(len, federation.parts)) >= 1
    assert all((np.diff(p) > 0).all() for p in federation.parts)
    # classes are preserved, and every test sample is used exactly once
    held = np.bincount(
        np.array(y)[np.concatenate([federation.validation, federation.public])], minlength=5
    )
    assert (federation.table().sum(axis=0) + held == np.bincount(y, minlength=5)).all()
    assert np.sort(np.concatenate(federation.tests)).tolist() == list(range(len(ty)))
    again = split(d, cut, clients, seed)
    assert [federation.sha256(i) for i in range(clients)] == [
        again.sha256(i) for i in range(clients)
    ]
    assert all((a == b).all() for a, b in zip(federation.tests, again.tests))


def test_merge_split_tests_no_client_on_what_anyone_trains_on():
    d = data([0, 1] * 20, [0, 1] * 10, groups=[0, 1] * 20)
    federation = split(
        d, section(tests="merge_split", public={"samples": 4, "fraction": 0.0}), 4, 0
    )
    # 60 samples less 4 public ones are dealt 14 each, cut 10 and 4
    assert [len(p) for p in federation.parts] == [10] * 4
    assert [len(t) for t in federation.tests] == [4] * 4
    assert everything(federation).tolist() == list(range(federation.data.n_train))
    trained = set(federation.data.train[0].flatten().tolist())
    tested = set(federation.data.test[0].flatten().tolist())
    assert not trained & tested
    assert len(trained | tested) == 60
    assert all(v < 1000 for v in federation.only(federation.public).train[0].flatten().tolist())
    assert federation.data.groups is None
    with pytest.raises(ConfigError, match=r"merge_split also of each test sample, Data\(test_gro"):
        split(d, section("natural", tests="merge_split"), 2, 0)


def test_under_natural_a_client_tests_on_the_samples_of_its_owners():
    d = data([0, 1, 0, 1, 0], [0, 1, 1, 0], groups=list("babac"), test_groups=list("cbad"))
    federation = split(d, section("natural"), 3, 0)
    assert [p.tolist() for p in federation.parts] == [[1, 3], [0, 2], [4]]
    assert [t.tolist() for t in federation.tests] == [[2], [1], [0]]  # nobody has that of d
    fewer = split(d, section("natural"), 2, 0)  # whole owners
    assert sorted(map(len, fewer.tests)) == [1, 2]
    assert [len(t) for t in split(d, section("natural", tests="none"), 3, 0).tests] == [0] * 3
    with pytest.raises(DataError, match="test_groups: none of these owners is in groups"):
        data([0, 1], [0, 1], groups=list("ab"), test_groups=["a ", "b "])


def test_under_merge_split_an_owner_keeps_its_training_and_test_samples():
    both = data([0, 1] * 4, [0, 1] * 2, groups=[5, 6] * 4, test_groups=[6, 5] * 2)
    only_training = data([0, 1] * 4, [], groups=[5, 6] * 4)
    for d, tests in ((both, {1001, 1003}), (only_training, set())):
        federation = split(d, section("natural", tests="merge_split"), 2, 0)
        kept = federation.data
        x = kept.train[0].flatten().numpy()
        tx = kept.test[0].flatten().numpy()
        mine = {*x[federation.parts[0]], *tx[federation.tests[0]]}
        assert mine == {0, 2, 4, 6, *tests}  # all that owner 5 has
        assert kept.groups[federation.parts[0]].unique().tolist() == [5]
        assert kept.test_groups[federation.tests[0]].unique().tolist() == [5]


@pytest.mark.parametrize(
    ("y", "ty", "held", "tested"),
    [
        # client 0 holds 3 of 4 zeros and no one: 6 of 8 test zeros, none of the ones
        ([0] * 4 + [1] * 4, [0] * 8 + [1] * 4, [[3, 0], [1, 4]], [[6, 0], [2, 4]]),
        # a class nobody trains on is divided by size
        ([0] * 4, [1] * 8, [[3, 0], [1, 0]], [[0, 6], [0, 2]]),
    ],
)
def test_like_train_follows_the_realised_share_of_each_class(y, ty, held, tested):
    d = data(y, ty, groups=np.array([0, 0, 0, 1, 1, 1, 1, 1][: len(y)]), classes=2)
    federation = split(d, section("natural"), 2, 0)
    assert federation.table().tolist() == held
    assert federation.test_table().tolist() == tested


def test_no_client_tests_on_its_own_where_client_test_is_none():
    federation = split(data([0, 1] * 4, [0, 1]), section(tests="none"), 2, 0)
    assert [len(t) for t in federation.tests] == [0, 0]


def test_public_samples_are_class_balanced():
    d = data([0] * 50 + [1] * 10 + [2] * 10, [0, 1, 2])
    federation = split(d, section(public={"samples": 16, "fraction": 0.0}), 2, 0)
    assert np.bincount(d.labels()[federation.public]).tolist() == [6, 5, 5]
    assert federation.only(federation.public).n_train == 16


def test_public_fraction_keeps_class_proportions_by_largest_remainder():
    d = data([0] * 37 + [1] * 25 + [2] * 13, [0, 1, 2])
    # 0.1 of 75 is 7: shares 3.45, 2.33, 1.21 -> 3, 2, 1, and the missing one to the largest
    # remainder, class 0
    federation = split(d, section(public={"samples": 0, "fraction": 0.1}), 2, 0)
    assert np.bincount(d.labels()[federation.public]).tolist() == [4, 2, 1]


def test_baseline_pool_decides_what_a_method_without_a_public_set_trains_on():
    d = data([0, 1] * 20, [0, 1])
    public = {"samples": 10, "fraction": 0.0}
    with_public = split(d, section(public=public), 2, 0, uses_public=True)
    same = split(d, section(public=public), 2, 0, uses_public=False)
    full = split(d, section(public=public, pool="full"), 2, 0, uses_public=False)
    assert [with_public.sha256(i) for i in range(2)] == [same.sha256(i) for i in range(2)]
    assert sum(map(len, full.parts)) == 40
    assert full.only(full.public) is None


def test_the_partitions_own_seed_replaces_the_runs():
    d = data([0, 1, 2, 3] * 10, [0, 1, 2, 3])
    fixed = [split(d, section(seed=7), 3, run).sha256(0) for run in (0, 1)]
    free = [split(d, section(), 3, run).sha256(0) for run in (0, 1, 7)]
    assert fixed[0] == fixed[1] == free[2]
    assert free[0] != free[1]


def test_sha256_is_of_sorted_little_endian_int64_indices():
    federation = split(data([0, 0, 0], [0]), section(), 1, 0)
    expected = hashlib.sha256(b"\0" * 8 + b"\1" + b"\0" * 7 + b"\2" + b"\0" * 7).hexdigest()
    assert federation.sha256(0) == expected == federation.to_json()["sha256"][0]


def test_a_site_holds_its_slice_as_model_inputs():
    x = torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1) * 51
    y = torch.tensor([0, 1, 1, 0])
    d = Data(
        train=(x, y),
        test=(x[:2], y[:2]),
        classes=2,
        mean=(0.2,),
        std=(0.5,),
        groups=torch.tensor([0, 1, 1, 1]),
    )
    federation = split(d, section("natural"), 2, 0)
    site = federation.site(1)
    # 51, 102, 153 are 0.2, 0.4, 0.6 of 255
    torch.testing.assert_close(site.train[0].flatten(), torch.tensor([0.0, 0.4, 0.8]))
    assert (site.n, site.class_counts.tolist(), site.train[1].tolist()) == (3, [1, 2], [1, 1, 0])


def test_values_have_no_classes_to_be_skewed_by():
    d = Data(train=(np.zeros((6, 2)), np.arange(6.0)), test=(np.zeros((3, 2)), np.arange(3.0)))
    with pytest.raises(ConfigError, match="wants one class a sample"):
        split(d, section("dirichlet"), 2, 0)
    federation = split(d, section("iid"), 2, 0)
    assert federation.table().tolist() == [[3], [3]]
    assert federation.test_table().tolist() == [[1], [2]]


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"scheme": "dirichlett"}, "Did you mean 'dirichlet'"),
        ({"scheme": "dirichlet", "alfa": 1}, "Did you mean data.partition.alpha"),
        (
            {"public": {"samples": 0, "fraction": 0.01}},
            r"data\.public\.fraction: 0\.01 of 16 samples is not one",
        ),
        (
            {"public": {"samples": 20, "fraction": 0.0}},
            r"public.samples: 20 wants 10 of class 0, which has 8",
        ),
    ],
)
def test_an_impossible_section_says_what_is_allowed(broken, says):
    with pytest.raises(ConfigError, match=says):
        split(data([0, 1] * 8, [0, 1]), section(**broken), 2, 0)


def test_on_the_cpu_a_clients_inputs_are_freed_after_its_task():
    x = torch.arange(40, dtype=torch.uint8).view(10, 1, 2, 2)
    d = Data(train=(x, torch.zeros(10, dtype=torch.int64)), classes=2, mean=(0.2,), std=(0.5,))
    federation = split(d, section(tests="none"), 1, 0)
    device = Device("cpu", federation.site)
    site = device.site(0)
    assert site.train[0] is site.train[0]
    assert torch.equal(site.train[0], d.inputs(x))
    inputs = weakref.ref(site.train[0])
    del site
    assert inputs() is None


def test_feature_noise_grows_from_client_to_client_in_units_of_the_raw_inputs():
    """Sigma 0.5 of three clients: 0, 0.25 and 0.5."""
    noisy = msgspec.structs.replace(section(), feature_noise=0.5)
    n = 3000
    std = (0.5, 0.1)
    grey = torch.full((n, 2, 3, 3), 51, dtype=torch.uint8)  # 0.2
    y = torch.arange(n) % 2
    federation = split(
        Data(train=(grey, y), test=(grey, y), classes=2, mean=(0.2, 0.2), std=std), noisy, 3, 7
    )
    for client, sigma in enumerate((0.0, 0.25, 0.5)):
        x = federation.site(client).train[0]
        found = x.std(dim=(0, 2, 3)).tolist()
        assert found == pytest.approx([sigma / std[0], sigma / std[1]], rel=0.05, abs=1e-6)
        assert torch.equal(x, federation.site(client).train[0])
    raw = {"a": torch.zeros(n, 3), "b": torch.zeros(n, 3), "place": torch.ones(n, 3).long()}
    site = split(Data(train=(raw, y), test=(raw, y), classes=2), noisy, 3, 7).site(2)
    x = site.train[0]
    test = site.test[0]
    for noised in (x, test):
        assert float(noised["a"].std()) == pytest.approx(0.5, rel=0.05)
    for one, other in ((x["a"], x["b"]), (x["a"], test["a"])):  # each has draws of its own
        assert not torch.equal(one[:100], other[:100])
    assert (x["place"] == 1).all()
    alone = split(Data(train=(raw, y), test=(raw, y), classes=2), noisy, 1, 7).site(0)
    assert not alone.train[0]["a"].any()

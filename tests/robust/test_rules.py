"""Robust rules and attacks, value for value against ByzFL 0.0.11, and cases worked by hand.

The values below are what `byzfl.aggregators` and `byzfl.attacks` return for the same rows in
float64 (`Median()`, `TrMean(f)`, `Krum(f)`, `MultiKrum(f)`, `GeometricMedian(0.1, 3)`,
`Average()(Clipping(1.5)(rows))`, `ALittleIsEnough(1.5)`, `InnerProductManipulation(2.0)`).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.config import from_mapping
from fednet.robust import attacks, rules
from fednet.robust.stack import Stack
from fednet.tensors import Layout, Tensors

NINE = [
    [-0.752, 0.855, 0.415, -0.538],
    [-0.336, 0.914, -0.281, -0.557],
    [0.033, 3.21, -0.728, 0.632],
    [-1.243, 0.683, 0.751, -0.632],
    [-0.617, -0.463, 1.142, -0.29],
    [-0.662, -0.134, 0.267, 0.006],
    [-0.187, 1.366, -0.58, -1.028],
    [-0.443, 0.28, -0.37, -1.191],
    [10.86, 18.96, -0.35, -4.86],
]
SIX = [*NINE[:5], [-6.62, -1.34, 2.67, 0.06]]
BYZFL = {
    9: {
        "median": [-0.443, 0.855, -0.281, -0.557],
        "trimmed_mean": [-0.449, 0.8196, -0.0638, -0.609],
        "krum": [-0.752, 0.855, 0.415, -0.538],
        "multi_krum": [-0.6057142857142858, 0.5001428571428572, 0.192, -0.6042857142857143],
        "rfa": [-0.5226947923212589, 0.8349485509382834, 0.09882474465487373, -0.583776455295815],
        "clip": [-0.36701165393900337, 0.653540276396075, 0.11083586623900257, -0.4457817255145998],
        "alie": [6.458340904327011, 12.04974699492864, 0.9941970044887849, 1.4098240102918513],
        "ipm": [-1.4784444444444447, -5.704666666666666, -0.0591111111111111, 1.8795555555555552],
    },
    6: {
        "median": [-0.6845, 0.769, 0.583, -0.414],
        "trimmed_mean": [-0.737, 0.49725, 0.50675, -0.33125],
        "krum": [-0.752, 0.855, 0.415, -0.538],
        "multi_krum": [-0.583, 1.0398, 0.2598, -0.277],
        "rfa": [-0.8647909756677948, 0.7753278930486677, 0.45844419488949484, -0.493888027457646],
        "clip": [-0.6897346738033638, 0.5099628109519315, 0.3591232669714439, -0.273233710434659],
        "alie": [2.1624483555604286, 2.953848270652815, 2.455582962128563, 0.5120626858944969],
        "ipm": [3.1783333333333332, -1.2863333333333333, -1.323, 0.4416666666666667],
    },
}


def byzfl_krum(rows, f, keep):
    """ByzFL's scores sum over one reply more than the paper's."""
    return rules.lowest(rules.scores(rows, len(rows) - f - 1), keep)


OURS = {
    "median": lambda rows, f: rules.median(rows),
    "trimmed_mean": rules.trimmed_mean,
    "krum": lambda rows, f: rules.mean(rows[byzfl_krum(rows, f, 1)]),
    "multi_krum": lambda rows, f: rules.mean(rows[sorted(byzfl_krum(rows, f, len(rows) - f))]),
    "rfa": lambda rows, f: rules.geometric_median(rows, 3, 0.1),
    "clip": lambda rows, f: rules.norm_bound(rows, 1.5),
    "alie": lambda rows, f: attacks.colluding(rows, "alie", 1.5),
    "ipm": lambda rows, f: attacks.colluding(rows, "ipm", 2.0),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("given_rows", "f"), [(NINE, 2), (SIX, 1)])
def test_every_rule_and_attack_gives_the_values_of_byzfl(name, given_rows, f):
    rows = torch.tensor(given_rows, dtype=torch.float64)
    expected = torch.tensor(BYZFL[len(rows)][name], dtype=torch.float64)
    torch.testing.assert_close(OURS[name](rows, f), expected, rtol=0, atol=1e-12)


def test_krum_as_the_paper_has_it_sums_over_one_neighbour_less():
    # On a line at 0, 1, 3, 7, f = 0: nearest m - f - 2 = 2 of each, squared distances:
    # 0: 1 + 9; 1: 1 + 4; 3: 4 + 9; 7: 16 + 36.
    rows = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert rules.scores(rows, 2) == [10.0, 5.0, 13.0, 52.0]
    assert rules.krum(rows, 0) == [1]
    assert rules.krum(rows, 0, keep=3) == [1, 0, 2]


def test_with_few_replies_krum_still_takes_the_nearest_to_another():
    # m - f - 2 is 0: the one nearest counts.
    assert rules.krum(torch.tensor([[0.0], [9.0], [8.0]]), 1) == [1]


def test_without_a_bound_the_median_norm_is_one():
    # Norms 1, 2, 9: the last is scaled to 2.
    assert rules.norm_bound(torch.tensor([[1.0], [2.0], [9.0]]), None).item() == 5 / 3


@settings(deadline=None)
@given(st.integers(0, 2**16), st.integers(1, 9))
def test_a_minority_as_large_as_it_likes_moves_the_robust_rules_no_further_than_the_honest(seed, m):
    f = (m - 1) // 2
    draws = torch.Generator().manual_seed(seed)
    honest = torch.randn(m - f, 3, generator=draws)
    rows = torch.cat([honest, torch.full((f, 3), 1e9)])
    low = honest.min(dim=0).values.double()
    high = honest.max(dim=0).values.double()
    for made in (rules.median(rows), rules.trimmed_mean(rows, f)):
        assert bool(((made >= low) & (made <= high)).all())


# -- a stack ---------------------------------------------------------------------------------------
LAYOUT = Layout.of(torch.nn.Linear(3, 1, bias=False))


def tensors(*values):
    return Tensors.zeros(LAYOUT).with_vector(torch.tensor(values))


def config(**sections):
    return from_mapping({"algorithm": "fedavg", **sections})


def aggregated(rows, x=None, malicious=(), **sections):
    stack = Stack(x)
    for row in rows:
        stack = stack.add(tensors(*row), 2.0)
    return stack.aggregate(config(**sections), malicious).mean().vector.tolist()


def test_a_stack_gives_what_the_rule_makes_of_the_updates():
    x = tensors(1.0, 1.0, 1.0)
    rows = [[2.0, 1.0, 0.0], [4.0, 1.0, 0.0], [90.0, 1.0, 90.0]]
    assert aggregated(rows, x, aggregation={"rule": "median"}) == [4.0, 1.0, 0.0]
    # Norms of the updates: sqrt(2), sqrt(10), large; bound 1 leaves directions alone.
    made = aggregated(rows, x, aggregation={"rule": "norm_bound", "bound": 1.0})
    by_hand = [
        1 + (1 / 2**0.5 + 3 / 10**0.5 + 89 / (89**2 * 2) ** 0.5) / 3,
        1.0,
        1 + (-1 / 2**0.5 - 1 / 10**0.5 + 89 / (89**2 * 2) ** 0.5) / 3,
    ]
    assert made == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        # 29 of 100 are left out at either end, although the product of the floats is a little less
        # than 29: the mean of 29 ... 70.
        ({"rule": "trimmed_mean", "tolerate": 0.29}, 49.5),
        ({"rule": "multi_krum", "tolerate": 0.29}, 35.0),  # of the 71 that are close together
    ],
)
def test_so_many_replies_are_tolerated_as_the_share_says(section, expected):
    rows = [[float(k) if k < 71 else 1e6 * k, 0.0, 0.0] for k in range(100)]
    assert aggregated(rows, None, aggregation=section)[0] == expected


def test_buffers_are_the_median_of_the_replies_that_count_in_float64():
    slots = Layout.of(torch.nn.BatchNorm1d(1)).slots
    layout = Layout(tuple(s for s in slots if s.name != "bias"))
    stack = Stack()
    # Krum takes one of the three that are close; the median, without a choice, of all four.
    for update, mean, batches in [
        (1.0, 1.0, 5),
        (1.5, 1 + 2**-23, 7),
        (1.75, 3.0, 6),
        (90.0, 8.0, 9),
    ]:
        whole = Tensors(
            layout,
            torch.tensor([update]),
            torch.tensor([mean, 2.0]),
            torch.tensor([batches]),
        )
        stack = stack.add(whole, 2.0)
    every = stack.aggregate(config(aggregation={"rule": "median"}), ())
    assert every.buffers.dtype == torch.float64
    assert every.buffers.tolist() == [8 * (1 + 2**-23 + 3.0) / 2, 16.0]
    assert every.counters.tolist() == [9]
    one = stack.aggregate(config(aggregation={"rule": "krum", "tolerate": 0.25}), ())
    assert one.buffers.tolist() == [8 * (1 + 2**-23), 16.0]
    assert one.counters.tolist() == [7]
    bare = Stack().add(tensors(1.0, 1.0, 1.0)).aggregate(config(aggregation={"rule": "median"}), ())
    assert (bare.buffers.dtype, len(bare.buffers)) == (torch.float64, 0)


def test_those_that_know_all_send_what_the_honest_make():
    # Updates 1 and 3; ipm with factor 2 sends -4: the mean of 1, 3, -4 is 0.
    faults = {"malicious": {"clients": 0.3, "attack": "ipm", "strength": 2}}
    rows = [[1.0, 0.0, 0.0], [5.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    assert aggregated(rows, None, {1}, faults=faults) == [0.0, 0.0, 0.0]


def test_a_scale_and_a_base_are_a_stacks_as_a_sums():
    stack = Stack().add(tensors(4.0, 2.0, 0.0), scale=0.5, less=tensors(2.0, 0.0, 0.0))
    made = stack.aggregate(config(aggregation={"rule": "median"}), ())
    assert made.mean().vector.tolist() == [1.0, 1.0, 0.0]
    assert made.count == 1


# -- attacks of one client -------------------------------------------------------------------------
def test_a_turned_sign_is_taken_from_where_the_client_began():
    turned = config(faults={"malicious": {"clients": 0.5, "attack": "sign_flip", "strength": 2}})
    y = tensors(3.0, 0.0, 1.0)
    x = tensors(1.0, 0.0, 2.0)
    assert attacks.attacked_vector(y, x, turned, 1, 0).vector.tolist() == [-3.0, 0.0, 4.0]
    assert attacks.attacked_vector(y, None, turned, 1, 0).vector.tolist() == [-6.0, 0.0, -2.0]


def test_noise_differs_by_round_and_client_and_repeats():
    noisy = config(faults={"malicious": {"clients": 0.5, "attack": "gaussian", "strength": 0.1}})
    x = tensors(1.0, 2.0, 3.0)
    made = [
        attacks.attacked_vector(x, x, noisy, *at).vector for at in ((1, 0), (1, 1), (2, 0), (1, 0))
    ]
    assert torch.equal(made[0], made[3])
    assert len({tuple(v.tolist()) for v in made}) == 3
    noisier = config(faults={"malicious": {"clients": 0.5, "attack": "gaussian", "strength": 0.2}})
    twice = attacks.attacked_vector(x, x, noisier, 1, 0).vector
    torch.testing.assert_close(twice - x.vector, 2 * (made[0] - x.vector))


def test_malicious_clients_are_drawn_once_and_rounded_down():
    some = config(clients=10, faults={"malicious": {"clients": 0.35}})
    assert len(attacks.malicious(some)) == 3
    # 29 of 100: the product of the floats is 28.999999999999996.
    assert (
        len(attacks.malicious(config(clients=100, faults={"malicious": {"clients": 0.29}}))) == 29
    )
    assert attacks.malicious(config()) == frozenset()
    assert attacks.flipped_labels(torch.tensor([0, 1, 9]), 10).tolist() == [9, 8, 0]

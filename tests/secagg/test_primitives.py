"""The arithmetic: a field, fixed point, and what is shared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.secagg import decoding, field, fixed, primitives
from fednet.secagg.fixed import FixedPoint

Q = field.Q


def test_products_of_matrices_are_those_of_integers():
    rng = np.random.default_rng(0)
    a = rng.integers(0, Q, (5, 40), dtype=np.uint64)
    b = rng.integers(0, Q, (40, 3), dtype=np.uint64)
    a[0] = b[:, 0] = Q - 1  # the largest there are
    exact = [[sum(int(x) * int(y) for x, y in zip(row, col)) % Q for col in b.T] for row in a]
    assert field.product(a, b).tolist() == exact


def test_the_lagrange_matrix_passes_a_polynomial_on():
    # p(x) = 3 + 2 x + 5 x^2: at 1, 2, 3 it is 10, 27, 54; at 0 and 4 it is 3 and 91.
    values = np.array([[10], [27], [54]], dtype=np.uint64)
    assert field.product(field.lagrange((1, 2, 3), (0, 4, 2)), values)[:, 0].tolist() == [3, 91, 27]


def test_what_is_not_below_q_is_drawn_again():
    given_out = iter([(Q + 2).to_bytes(4, "little") + (7).to_bytes(4, "little"), b"\x09\0\0\0"])
    assert field.uniform(2, lambda n: next(given_out)).tolist() == [9, 7]


@pytest.mark.parametrize("secret", [bytes(32), bytes([255] * 32), bytes(range(32))])
def test_any_t_shares_give_the_secret_back_and_fewer_do_not(secret):
    rows = field.as_rows(field.split_secret(secret, 5, 3))
    for order in itertools.permutations(range(5)):
        points = [i + 1 for i in order]
        assert decoding.fit(points, rows[list(order)], 3) == (secret, [])
    assert decoding.fit([1, 2, 3], rows[:3], 2)[0] != secret  # of another polynomial


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 12), st.integers(0, 8), st.integers(0, 2**32), st.data())
def test_wrong_shares_are_located_up_to_half_of_those_that_are_not_needed(t, more, seed, data):
    n = t + more
    rng = np.random.default_rng(seed)
    rows = field.as_rows(field.split_secret(rng.bytes(32), n, t))
    points = [int(p) for p in rng.permutation(np.arange(1, n + 1))]
    rows = rows[np.array(points) - 1]
    wrong = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=more // 2)))
    for i in wrong:  # in one limb at least
        limb = rng.integers(field.LIMBS)
        rows[i, limb] = (int(rows[i, limb]) + int(rng.integers(1, Q))) % Q
    assert decoding.locate_errors(points, rows, t) == wrong


@pytest.mark.parametrize(("n", "t", "wrong"), [(5, 4, [2]), (6, 4, [0, 5]), (9, 4, [3, 7])])
def test_the_secret_is_among_those_without_the_wrong_shares(n, t, wrong):
    secret = bytes(range(32))
    rows = field.as_rows(field.split_secret(secret, n, t))
    rows[wrong, 0] = (rows[wrong, 0] + np.uint64(1)) % np.uint64(Q)
    found = dict(decoding.secrets_without(range(1, n + 1), rows, len(wrong)))
    assert found[tuple(wrong)] == secret


def test_fixed_point_by_hand():
    point = FixedPoint(bits=4, clip=7.0)  # L = 7: an integer is a unit
    assert point.encode(np.array([0.4, 2.6, -9.0, 7.0])).tolist() == [0, 3, -7, 7, 1]
    assert point.count_outside(np.array([0.4, 2.6, -9.0, 7.0])) == 1
    weighted = FixedPoint(bits=4, clip=7.0, most=10)
    assert weighted.encode(np.array([7.0, 4.0]), 5).tolist() == [4, 2, 5]  # 3.5 to the even number
    assert weighted.encode(np.array([7.0]), 99).tolist() == [7, 10]
    assert weighted.encode(np.array([7.0]), -3).tolist() == [0, 0]
    total, weights = weighted.decode(np.array([6, 4, 15]))
    assert (total.tolist(), weights) == ([60.0, 40.0], 15)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 40),
    st.integers(2, 30),
    st.floats(1e-3, 1e3),
    st.integers(1, 1000),
    st.integers(0, 2**32),
)
def test_the_mean_is_within_the_stated_error(clients, bits, clip, most, seed):
    rng = np.random.default_rng(seed)
    point = FixedPoint(bits, clip, most)
    weights = rng.integers(1, most + 1, clients)
    x = rng.uniform(-1.2 * clip, 1.2 * clip, (clients, 5))
    total, weight = point.decode(sum(point.encode(row, int(w)) for row, w in zip(x, weights)))
    exact = (np.clip(x, -clip, clip) * weights[:, None]).sum(0) / weights.sum()
    assert weight == weights.sum()
    error = clients * clip * most / (2 * point.levels * weight)
    assert np.abs(total / weight - exact).max() <= error * (1 + 1e-9)


@pytest.mark.parametrize("width", range(1, 9))
def test_residues_lie_in_so_many_bytes_and_come_back(width):
    modulus = 1 << (8 * width)
    half = modulus // 2
    values = np.array([0, 1, -1, half - 1, -half + 1], dtype=np.int64)
    data = fixed.pack(fixed.residues(values, modulus), width)
    assert len(data) == 5 * width
    assert np.array_equal(fixed.lift(fixed.unpack(data, width), modulus), values)


def test_what_was_sealed_is_opened_by_its_key_and_under_its_name_alone():
    text = primitives.encrypt(bytes(32), b"a share", b"from 1 to 2")
    assert primitives.decrypt(bytes(32), text, b"from 1 to 2") == b"a share"
    assert primitives.decrypt(bytes(32), text, b"from 1 to 3") is None
    assert primitives.decrypt(b"1" * 32, text, b"from 1 to 2") is None


@pytest.mark.parametrize(
    ("total", "most", "clients", "can_be"),
    [
        # 4 bits: entries of at most 7 for the largest weight, each off by one half at most
        ([21, -21, 3], 1, 3, True),
        ([25, 0, 3], 1, 3, False),
        ([0, -25, 3], 1, 3, False),
        ([7, 0, 2], 1, 3, False),  # of three clients one counts nothing
        ([7, -7, 5], 5, 3, True),
        ([11, 0, 5], 5, 3, False),
        ([0, 0, 16], 5, 3, False),
        ([0, 0, -1], 5, 3, False),
        ([-(2**63), 0, 5], 5, 3, False),
    ],
)
def test_a_sum_that_no_honest_vectors_have_is_told(total, most, clients, can_be):
    point = FixedPoint(bits=4, clip=1.0, most=most)
    assert point.possible(np.array(total, dtype=np.int64), clients) == can_be


def test_the_residue_half_way_is_positive():
    assert fixed.lift(np.array([128, 129], dtype=np.uint64), 256).tolist() == [128, -127]

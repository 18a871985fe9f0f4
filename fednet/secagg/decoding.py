"""Shares of a secret of which some are wrong.

The shares of a secret are the values of polynomials of degree t - 1, one a limb: a word of a
Reed-Solomon code. Of n shares, up to (n - t) / 2 wrong ones can be located by the shares alone
(`locate_errors`). With a digest of the secret up to n - t can be left out by trial
(`secrets_without`): at least t right ones must remain, and the digest tells whether they did.

points: at which the shares are, all different, none 0. rows: (n, LIMBS), the shares.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from fednet.secagg.field import (
    LIMB,
    LIMBS,
    Array,
    Q,
    lagrange,
    product,
    secret_of,
    uniform,
    weights,
)

_Q = np.uint64(Q)


def fit(points: Sequence[int], rows: Array, t: int) -> tuple[bytes | None, list[int]]:
    """Returns the secret that the first t shares give, None if none, and the indices of the shares
    that are not on their polynomials.
    """
    values = product(lagrange(tuple(points[:t]), (0, *points[t:])), rows[:t])
    off = np.flatnonzero((values[1:] != rows[t:]).any(axis=1)) + t
    return secret_of(values[0]), [int(i) for i in off]


def locate_errors(points: Sequence[int], rows: Array, t: int) -> list[int] | None:
    """Returns the indices of the wrong shares, if they are at most (n - t) / 2 of all n; else None,
    or in rare cases other indices.

    A sum of the limbs with secret random coefficients is decoded instead of each limb: a share of
    which one limb is wrong has a right sum with a probability of 1 / q.
    """
    x = np.array(points, dtype=np.uint64)
    word = product(rows, uniform(LIMBS)[:, None])[:, 0]
    # sum_i w_i x_i^k p(x_i) = 0 for a polynomial p of degree < t and k < n - t
    terms = word * np.array(weights(points), dtype=np.uint64) % _Q
    syndromes = list[int]()
    for _ in range(len(points) - t):
        syndromes.append(int(terms.sum()) % Q)
        terms = terms * x % _Q
    locator = _shortest_recurrence(syndromes)
    values = np.zeros(len(points), dtype=np.uint64)
    for coefficient in locator:
        values = (values * x + np.uint64(coefficient)) % _Q
    wrong = [int(i) for i in np.flatnonzero(values == 0)]
    count = len(locator) - 1
    return wrong if len(wrong) == count and 2 * count <= len(points) - t else None


def _shortest_recurrence(sequence: Sequence[int]) -> list[int]:
    """Returns c, c_0 = 1, of the shortest linear recurrence sum_i c_i s_(k - i) = 0 of a sequence
    (Massey, "Shift-register synthesis and BCH decoding", IEEE Trans. Inf. Theory 15, 1969,
    Algorithm for LFSR synthesis). Of syndromes its roots are the points of the errors.
    """
    current = [1]
    before = [1]
    length = 0
    shift = 1
    last = 1
    for k in range(len(sequence)):
        difference = sum(c * sequence[k - i] for i, c in enumerate(current)) % Q
        if not difference:
            shift += 1
            continue
        kept = list(current)
        factor = difference * pow(last, -1, Q) % Q
        current += [0] * (len(before) + shift - len(current))
        for i, c in enumerate(before):
            current[i + shift] = (current[i + shift] - factor * c) % Q
        if 2 * length > k:
            shift += 1
            continue
        length = k + 1 - length
        shift = 1
        last = difference
        before = kept
    return (current + [0] * length)[: length + 1]


def secrets_without(
    points: Sequence[int], rows: Array, count: int
) -> Iterator[tuple[tuple[int, ...], bytes]]:
    """Yields the indices of `count` shares, at least one, and the secret that all others give, for
    each choice of them that gives one.

    With L_i the Lagrange coefficients of all points for the value at 0, the value without the
    points a, b, ... is sum_i L_i (1 - x_i / a) (1 - x_i / b) ... y_i.
    """
    x = np.array(points, dtype=np.uint64)[:, None]
    terms = lagrange(tuple(points), (0,))[0][:, None] * rows % _Q
    moments = np.zeros((count + 1, LIMBS), dtype=np.uint64)
    for k in range(count + 1):
        moments[k] = terms.sum(axis=0) % _Q
        terms = terms * x % _Q
    inverse = np.array([_Q - np.uint64(pow(p, -1, Q)) for p in points], dtype=np.uint64)  # -1 / a
    for chosen in itertools.combinations(range(len(points)), count - 1):
        left = moments
        for i in chosen:
            left = (left[:-1] + inverse[i] * left[1:] % _Q) % _Q
        first = chosen[-1] + 1 if chosen else 0
        limbs = (left[0] + inverse[first:, None] * left[1] % _Q) % _Q
        for j in np.flatnonzero((limbs >> np.uint64(LIMB) == 0).all(axis=1)):
            secret = secret_of(limbs[j])
            if secret is not None:
                yield (*chosen, first + int(j)), secret

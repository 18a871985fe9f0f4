"""Clients that agree on what they deal, hand on and report: nobody else is blamed for it, and the
sum is found where it can be.

The shares of the last step are made by hand, as they come to the server.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from fednet.secagg import BelowThreshold, Terms, field, primitives
from fednet.secagg.evidence import COLLUDERS, Evidence
from fednet.secagg.field import LIMBS, Q
from fednet.secagg.messages import NONE

ODD = bytes(4 * (LIMBS - 1)) + (1).to_bytes(4, "little")


@dataclass
class Case:
    """A round of n clients: the ids of the colluding ones, of those that answer in the last step,
    and how many shares give a secret.
    """

    n: int
    t: int
    liars: tuple[int, ...]
    answering: tuple[int, ...]

    def honest(self, count: int, first: int = 0) -> list[int]:
        """That many honest ones that answer, beginning with the given one of them."""
        found = [c for c in self.answering if c not in self.liars]
        return (found[first:] + found[:first])[:count]


def plus(share: bytes, differences: Sequence[int]) -> bytes:
    """A share with something added to each limb."""
    row = np.frombuffer(share, "<u4").astype(np.uint64)
    return ((row + np.array(differences, dtype=np.uint64)) % np.uint64(Q)).astype("<u4").tobytes()


def zero_at(points: Sequence[int], x: int) -> int:
    """The value at x of a polynomial that is 0 at these points."""
    value = 1
    for point in points:
        value = value * (x - point) % Q
    return value


# A lie: the share that a liar hands on, of its true one. A point is the client's id plus 1.
Lie = Callable[[Case, int, int, bytes], bytes]


def same_secret(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    """On another polynomial with the same secret, with t - 2 honest shares."""
    points = [0, *(c + 1 for c in case.honest(case.t - 2))]
    return plus(share, [zero_at(points, liar + 1)] * LIMBS)


def same_secret_elsewhere(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    """The same, with other honest shares at each dealer."""
    points = [0, *(c + 1 for c in case.honest(case.t - 2, dealer % case.n))]
    return plus(share, [zero_at(points, liar + 1)] * LIMBS)


def other_secret(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    """On a polynomial with another secret, with t - 1 honest shares."""
    points = [c + 1 for c in case.honest(case.t - 1)]
    return plus(share, [zero_at(points, liar + 1)] * LIMBS)


def alone(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    """Each on another polynomial with the same secret."""
    first = case.liars.index(liar)
    points = [0, *(c + 1 for c in case.honest(case.t - 2, first))]
    return plus(share, [zero_at(points, liar + 1) * (first + 1) % Q] * LIMBS)


def anything(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    return field.uniform(LIMBS).astype("<u4").tobytes()


def one_limb(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    return plus(share, [0] * (LIMBS - 1) + [1])


def complaint(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    return NONE


def one_complains(case: Case, dealer: int, liar: int, share: bytes) -> bytes:
    tell = complaint if liar == case.liars[0] else same_secret
    return tell(case, dealer, liar, share)


LIES: list[Lie] = [
    same_secret,
    same_secret_elsewhere,
    other_secret,
    alone,
    anything,
    one_limb,
    complaint,
    one_complains,
]


# What a colluding dealer gives the honest holders.
def dealt_well(shares: list[bytes], holder: int) -> bytes:
    return shares[holder]


def dealt_badly_to_some(shares: list[bytes], holder: int) -> bytes:
    """The last two holders get others than the first ones."""
    return plus(shares[holder], [1] * LIMBS) if holder >= len(shares) - 2 else shares[holder]


def dealt_badly_to_half(shares: list[bytes], holder: int) -> bytes:
    return plus(shares[holder], [1] * LIMBS) if holder % 2 else shares[holder]


DEALT = [dealt_well, dealt_badly_to_some, dealt_badly_to_half]


def play(case: Case, lie: Lie, dealt: Callable[[list[bytes], int], bytes]) -> tuple[set[int], int]:
    """The blamed clients, and of how many honest ones the secret is not found."""
    terms = Terms("secagg", tuple(range(case.n)), case.t / case.n, 1, 1, b"")
    assert terms.share_threshold(0) == case.t
    shares: dict[int, dict[int, bytes]] = {at: {} for at in case.answering}
    secrets = {dealer: bytes([dealer]) * field.SECRET for dealer in range(case.n)}
    for dealer, secret in secrets.items():
        true = field.split_secret(secret, case.n, case.t)
        for at in case.answering:
            if at in case.liars and dealer not in case.liars:
                shares[at][dealer] = lie(case, dealer, at, true[at])
            elif dealer in case.liars and at not in case.liars:
                shares[at][dealer] = dealt(true, at)
            else:
                shares[at][dealer] = true[at]
    evidence = Evidence(terms, shares)
    blamed = set[int]()
    lost = 0
    for dealer, secret in secrets.items():
        try:
            found = evidence.reconstruct(
                dealer, "seed", primitives.commitment, primitives.commitment(secret)
            )
            assert found == secret
        except BelowThreshold as void:  # the round ends here; all that follows may come before
            blamed |= void.blamed.keys()
            lost += dealer not in case.liars
    return blamed | evidence.blamed().keys(), lost


def cases(n: int, colluders: int) -> Iterator[Case]:
    """For each threshold and number of answers: liars of low, of high and of mixed ids."""
    for threshold in (0.51, 0.66, 0.9):
        t = max(2, math.ceil(threshold * n))
        for answers in range(t, min(n, t + 6) + 1):
            every = range(n)
            for liars in {tuple(every[:colluders]), (*every[: colluders - 1], n - 1)}:
                honest = [c for c in every if c not in liars]
                come = sorted([*liars, *honest[n - answers :]])
                yield Case(n, t, liars, tuple(come))


@pytest.mark.parametrize("n", [*range(3, 13), 20, 31])
def test_two_colluders_get_nobody_else_blamed(n):
    """And with two answers more than needed, the secrets of all others are found."""
    some = [c for c in cases(n, COLLUDERS) if n <= 12 or len(c.answering) == c.t + 2]
    for case, lie, dealt in itertools.product(some, LIES, DEALT):
        blamed, lost = play(case, lie, dealt)
        assert blamed <= set(case.liars), (case, lie.__name__, dealt.__name__)
        if len(case.answering) >= case.t + COLLUDERS:
            assert lost == 0, (case, lie.__name__, dealt.__name__)


@pytest.mark.parametrize(("n", "t"), [(9, 5), (12, 8), (20, 14), (50, 33)])
def test_two_colluders_that_hand_on_wrong_shares_of_all_are_blamed(n, t):
    """Where t + 3 clients have answered: t + 1 right shares and the secret show which are wrong."""
    case = Case(n, t, (1, 4), tuple(range(t + 3)))
    for lie in (same_secret, other_secret, anything, one_limb):
        assert play(case, lie, dealt_well) == ({1, 4}, 0)


def test_one_client_that_hands_on_wrong_shares_is_blamed_where_t_and_two_have_answered():
    for n, t in [(6, 4), (10, 7)]:
        assert play(Case(n, t, (1,), tuple(range(t + 2))), anything, dealt_well) == ({1}, 0)


def test_three_colluders_can_get_others_blamed():
    """What is promised of two is not so of three: t - 2 honest shares and theirs are enough."""
    case = Case(10, 7, (0, 1, 2), tuple(range(10)))
    blamed, lost = play(case, same_secret, dealt_well)
    assert blamed == {8, 9}
    assert lost == 0


def test_many_wrong_shares_are_borne_where_half_of_them_are_more_than_needed():
    case = Case(50, 33, (2, 9, 20, 21, 22, 33, 40, 48), tuple(range(50)))
    assert play(case, anything, dealt_well) == (set(case.liars), 0)

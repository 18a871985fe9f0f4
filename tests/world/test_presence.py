"""Who is there at a second: worked by hand."""

from __future__ import annotations

import math

from fednet.world.presence import Presence, cyclic, joined


def test_a_client_is_there_from_the_first_second_up_to_and_without_the_second() -> None:
    p = Presence(((10.0, 20.0), (30.0, 31.0)))
    assert [p.until(t) for t in (9.9, 10, 19.9, 20, 30.5, 31)] == [None, 20, 20, None, 31, None]


def test_the_next_coming_is_now_where_it_is_there_and_never_after_its_last() -> None:
    p = Presence(((10.0, 20.0), (30.0, 31.0)))
    assert [p.next(t) for t in (0, 15, 20, 31)] == [10, 15, 30, math.inf]


def test_a_trace_with_a_period_comes_again() -> None:
    p = Presence(((10.0, 20.0),), period=100.0)
    assert [p.until(t) for t in (115, 120, 1015)] == [120, None, 1020]
    assert [p.next(t) for t in (0, 21, 121)] == [10, 110, 210]


def test_a_spell_that_goes_on_over_the_end_of_the_period_is_one() -> None:
    p = cyclic([(90, 110), (40, 50)], 100.0)
    assert p.spells == ((0, 10), (40, 50), (90, 100))
    assert [p.until(t) for t in (95, 105, 5)] == [110, 110, 10]


def test_what_touches_is_one_spell_and_what_has_no_length_is_none() -> None:
    assert joined([(5, 7), (1, 3), (3, 4), (9, 9), (6, 8)]) == ((1, 4), (5, 8))


def test_who_is_always_there_never_leaves() -> None:
    assert Presence(((0.0, math.inf),)).until(1e9) == math.inf
    assert cyclic([(3, 103)], 100.0).until(50) == math.inf


def test_the_share_of_the_time_that_it_is_there() -> None:
    assert cyclic([(10, 20), (30, 35)], 100.0).share() == 0.15

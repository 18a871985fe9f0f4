"""Who of a round's clients is in time, why others are not, and when the round closes: by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.protocol.tasks import DEADLINE, LEFT, end_of
from fednet.server.schedule import Cohort
from fednet.server.sources import Order

FIRST = "not among the first 2"

# By client: the second at which its reply is there, and that at which it leaves.
TABLE = {
    "all": ({0: (1, inf), 1: (3, inf)}, inf, None, {}, 3),
    "nobody is asked": ({}, inf, None, {}, 0),
    "a deadline": ({0: (1, inf), 1: (9, inf)}, 5, None, {1: DEADLINE}, 5),
    "at the deadline": ({0: (1, inf), 1: (5, inf)}, 5, None, {}, 5),
    "leaves": ({0: (1, inf), 1: (9, 4)}, inf, None, {1: LEFT}, 4),
    "leaves before all": ({0: (3, inf), 1: (9, 1)}, inf, None, {1: LEFT}, 3),
    "done as it leaves": ({0: (1, inf), 1: (4, 4)}, inf, None, {}, 4),
    "leaves before the deadline": ({0: (1, inf), 1: (9, 4)}, 5, None, {1: LEFT}, 4),
    "leaves at the deadline": ({0: (1, inf), 1: (9, 5)}, 5, None, {1: LEFT}, 5),
    "leaves after the deadline": ({0: (1, inf), 1: (9, 7)}, 5, None, {1: DEADLINE}, 5),
    "the first two": ({0: (3, inf), 1: (1, inf), 2: (2, inf)}, inf, 2, {0: FIRST}, 2),
    "of three at once the smaller ids": (
        {3: (2, inf), 1: (2, inf), 2: (2, inf), 0: (1, inf)},
        inf,
        2,
        {2: FIRST, 3: FIRST},
        2,
    ),
    "fewer than the first two": ({0: (1, inf), 1: (9, 4)}, inf, 2, {1: LEFT}, 4),
    "closed before the deadline": ({0: (1, inf), 1: (2, inf), 2: (10, inf)}, 5, 2, {2: FIRST}, 2),
    "closed at the deadline": ({0: (1, inf), 1: (5, inf), 2: (9, inf)}, 5, 2, {2: DEADLINE}, 5),
    "left before the close": ({0: (1, inf), 1: (3, inf), 2: (9, 2)}, inf, 2, {2: LEFT}, 3),
    "leaves at the close": ({0: (1, inf), 1: (3, inf), 2: (9, 3)}, inf, 2, {2: LEFT}, 3),
    "leaves after the close": ({0: (1, inf), 1: (3, inf), 2: (9, 4)}, inf, 2, {2: FIRST}, 3),
    "leaves after the close and is late": (
        {0: (1, inf), 1: (3, inf), 2: (9, 6)},
        5,
        2,
        {2: FIRST},
        3,
    ),
    "leaves before the close and is late": (
        {0: (1, inf), 1: (3, inf), 2: (9, 2)},
        2.5,
        2,
        {1: DEADLINE, 2: LEFT},
        2.5,
    ),
}


def closed(ends: dict[int, tuple[float, str]], first: int | None) -> Cohort:
    """The exchange of clients whose tasks ended so, at that second and for that reason without a
    reply.
    """
    cohort = Cohort(sorted(ends), first)
    order = Order()
    for client, (at, reason) in ends.items():
        order.expect(client, 0.0)
        order.set_end(client, at, reason)
    while not cohort.closed:
        event = order.next(cohort.next_wakeup())
        assert event is not None
        at, client, reason = event
        assert client is not None
        cohort.take_event(at, client, reason)
    return cohort


@pytest.mark.parametrize("case", TABLE)
def test_who_is_in_time(case: str) -> None:
    clients, deadline, first, dropped, closes = TABLE[case]
    ends = {c: end_of(reply, leaves, deadline) for c, (reply, leaves) in clients.items()}
    cohort = closed(ends, first)
    assert cohort.dropped == dropped
    assert set(cohort.replied) == clients.keys() - dropped.keys()
    assert cohort.at == closes


def test_a_lost_client_is_waited_for_unless_the_round_closes_before() -> None:
    lost = {2: (3.0, "lost")}
    assert closed({0: (1.0, ""), **lost}, 2).at == 3.0
    assert closed({0: (1.0, ""), 1: (2.0, ""), **lost}, 2).at == 2.0
    assert closed({0: (1.0, ""), 1: (2.0, ""), **lost}, None).dropped == {2: "lost"}


SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0])


@settings(max_examples=200, deadline=None)
@given(
    ends=st.dictionaries(st.integers(0, 7), st.tuples(SECONDS, st.sampled_from(["", "", LEFT]))),
    first=st.sampled_from([None, 1, 2, 4]),
)
def test_nobody_who_came_later_is_preferred_and_everybody_is_accounted_for(
    ends: dict[int, tuple[float, str]], first: int | None
) -> None:
    cohort = closed(ends, first)
    assert sorted([*cohort.replied, *cohort.dropped]) == sorted(ends)
    came = sorted((at, client) for client, (at, reason) in ends.items() if not reason)
    assert cohort.replied == [client for _, client in came][:first]
    closes = max((at for at, _ in ends.values()), default=0.0)
    if first is not None and len(came) >= first:
        closes = came[first - 1][0]
    assert cohort.at == closes
    for client, reason in cohort.dropped.items():
        at, why = ends[client]
        assert reason == (why if why and at <= closes else f"not among the first {first}")

"""Who counts on the virtual clock, how long a phase takes, and what its time goes to: by hand."""

from __future__ import annotations

import pytest

from fednet.experiment.clock import VirtualClock
from tests.rooms import small


def clock(**round_) -> VirtualClock:
    section = {"deadline": 10.0, **round_}
    share = 0.5 if "ask" in round_ else 1.0  # with ask the first two of four count
    link = {"clock": "virtual", "step_ms": 1}
    return VirtualClock(small(clients=4, link=link, round=section, rounds=1, participation=share))


TIED = {3: 2.0, 1: 2.0, 2: 2.0, 0: 1.0}


def test_of_replies_that_come_at_once_the_smaller_ids_are_the_first() -> None:
    late = clock(ask=2.0).late(TIED)
    assert late == {2: "not among the first 2", 3: "not among the first 2"}


@pytest.mark.parametrize(
    ("times", "lost", "seconds"),
    [
        (TIED, False, 2.0),
        # Who is lost is not waited for once the first are there, and else for `round.lost.closed`.
        ({0: 1.0, 1: 2.0}, True, 2.0),
        ({0: 1.0}, True, 3.0),
        ({0: 1.0, 1: 50.0}, False, 10.0),
    ],
)
def test_a_phase_that_closes_on_the_first_takes_as_long_as_these(times, lost, seconds) -> None:
    assert clock(ask=2.0).span(times, lost) == seconds


def test_the_time_of_a_phase_is_that_of_the_last_client_and_of_several_the_smallest_id() -> None:
    parts = {c: {"sending": 0.5 + 0.1 * c, "training": 1.5 - 0.1 * c} for c in (1, 2, 3)}
    parts[0] = {"sending": 0.25, "training": 0.75}
    assert clock().split(parts, TIED, 2.5) == {"sending": 0.6, "training": 1.4, "waiting": 0.5}
    # client 1 comes too late: what the phase went to is that of the last who counts
    late = {**TIED, 1: 11.0}
    assert clock().split(parts, late, 10.0) == {"sending": 0.7, "training": 1.3, "waiting": 8.0}

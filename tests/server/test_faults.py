"""The plan of faults: what strikes whom follows from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednet import config as configuration
from fednet.server.faults import Faults
from fednet.wire.messages import Fault


def plan_of(*schedule: Mapping[str, Any], struck: Any = (), seed: int = 0, **random: float) -> Any:
    """The plan of a run with these exact faults, and random ones at these rates."""
    faults = {"schedule": [*schedule], "random": random}
    config = {"seed": seed, "clients": 10, "participation": 1.0, "faults": faults}
    checked = configuration.from_mapping(config, where="the test")
    return Faults(checked, set(struck), lambda round, kind: None, usual=0, exchanges=1)


CORRUPT = {"round": 2, "client": 3, "kind": "corrupt"}


def test_an_exact_schedule_strikes_that_client_in_that_round_and_nobody_else() -> None:
    plan = plan_of({"round": 2, "client": 3, "kind": "delay", "seconds": 0.5}, CORRUPT)
    assert plan.strike(2, 3) == [Fault("delay", 0.5), Fault("corrupt")]
    assert [(t, c) for t in range(1, 5) for c in range(10) if plan.strike(t, c)] == [(2, 3)]


def test_random_faults_strike_at_their_rate_and_the_same_ones_again() -> None:
    def hits(plan: Faults) -> list[tuple[int, int]]:
        every = ((t, c) for t in range(1, 401) for c in range(10))
        return [at for at in every if Fault("duplicate") in plan.strike(*at)]

    found = hits(plan_of(seed=1, duplicate=0.25))
    assert abs(len(found) / 4000 - 0.25) < 0.025
    # Another kind shifts nobody's luck.
    assert hits(plan_of(seed=1, duplicate=0.25, corrupt=0.5)) == found
    assert hits(plan_of(seed=2, duplicate=0.25)) != found


def test_of_the_faults_that_lose_a_reply_only_the_earliest_strikes() -> None:
    plan = plan_of(drop_before_sending=1.0, drop_before_training=1.0, crash=1.0, slow=1.0)
    assert plan.strike(1, 0) == [Fault("drop_before_training"), Fault("slow", 2.0)]


def test_a_crashed_client_is_away_for_its_rounds_and_cannot_crash_meanwhile() -> None:
    crash = {"client": 4, "kind": "crash", "rounds": 2}
    plan = plan_of(*({"round": t, **crash} for t in (1, 3, 5)))
    assert [t for t in range(1, 10) if plan.away(t, 4)] == [2, 3, 6, 7]
    assert not any(plan.away(t, 5) for t in range(1, 10))


def test_what_has_struck_does_not_strike_again_and_a_lost_reply_stays_lost() -> None:
    dropped = {"round": 2, "client": 5, "kind": "drop_before_sending"}
    struck = (2, 3, "corrupt"), (2, 5, "drop_before_sending")
    faults = plan_of(CORRUPT, dropped, struck=struck)
    assert faults.of(2, 0, 3) == []
    assert faults.out(2, 0, range(10)) == {5: "lost: drop_before_sending"}
    assert faults.out(3, 0, range(10)) == {}

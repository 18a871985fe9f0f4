"""The plan of faults: what strikes whom follows from the configuration alone."""

from __future__ import annotations

from typing import Any

from fednet import config as configuration
from fednet.experiment.faults import Faults
from fednet.wire.messages import Fault


def config(seed: int = 0, **faults: Any) -> configuration.Config:
    return configuration.from_mapping(
        {"seed": seed, "clients": 10, "participation": 1.0, "faults": faults}, where="the test"
    )


def plan_of(config: configuration.Config, struck: Any = ()) -> Faults:
    return Faults(config, set(struck), lambda round, kind: None, usual=0, exchanges=1)


def test_an_exact_schedule_strikes_that_client_in_that_round_and_nobody_else() -> None:
    plan = plan_of(
        config(
            schedule=[
                {"round": 2, "client": 3, "kind": "delay", "seconds": 0.5},
                {"round": 2, "client": 3, "kind": "corrupt"},
            ]
        )
    )
    assert plan.strike(2, 3) == [Fault("delay", 0.5), Fault("corrupt")]
    assert [(t, c) for t in range(1, 5) for c in range(10) if plan.strike(t, c)] == [(2, 3)]


def test_random_faults_strike_at_their_rate_and_the_same_ones_again() -> None:
    plan = plan_of(config(seed=1, random={"duplicate": 0.25}))
    hits = [(t, c) for t in range(1, 401) for c in range(10) if plan.strike(t, c)]
    assert abs(len(hits) / 4000 - 0.25) < 0.025
    # Another kind shifts nobody's luck.
    again = plan_of(config(seed=1, random={"duplicate": 0.25, "corrupt": 0.5}))
    assert [
        (t, c) for t in range(1, 401) for c in range(10) if Fault("duplicate") in again.strike(t, c)
    ] == hits
    other = plan_of(config(seed=2, random={"duplicate": 0.25}))
    assert [(t, c) for t in range(1, 401) for c in range(10) if other.strike(t, c)] != hits


def test_of_the_faults_that_lose_a_reply_only_the_earliest_strikes() -> None:
    plan = plan_of(
        config(
            random={
                "drop_before_sending": 1.0,
                "drop_before_training": 1.0,
                "crash": 1.0,
                "slow": 1.0,
            }
        )
    )
    assert plan.strike(1, 0) == [Fault("drop_before_training"), Fault("slow", 2.0)]


def test_a_crashed_client_is_away_for_its_rounds_and_cannot_crash_meanwhile() -> None:
    crash = {"client": 4, "kind": "crash", "rounds": 2}
    plan = plan_of(
        config(schedule=[{"round": 1, **crash}, {"round": 3, **crash}, {"round": 5, **crash}])
    )
    assert [t for t in range(1, 10) if plan.away(t, 4)] == [2, 3, 6, 7]
    assert not any(plan.away(t, 5) for t in range(1, 10))


def test_what_has_struck_does_not_strike_again_and_a_lost_reply_stays_lost() -> None:
    faults = plan_of(
        config(
            schedule=[
                {"round": 2, "client": 3, "kind": "corrupt"},
                {"round": 2, "client": 5, "kind": "drop_before_sending"},
            ]
        ),
        {(2, 3, "corrupt"), (2, 5, "drop_before_sending")},
    )
    assert faults.of(2, 0, 3) == []
    assert faults.out(2, 0, range(10)) == {5: "lost: drop_before_sending"}
    assert faults.out(3, 0, range(10)) == {}

"""Clients of a site that does not come back are taken out of a run (`round.gone`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednet.errors import ConfigError, Stopped
from tests.rooms import hashes, lines, run

CHANGES: dict[str, Any] = {
    "clients": 6,
    "participation": 0.5,
    "rounds": 5,
    "algorithm": "scaffold",
    "evaluate": {"clients": "all"},
}


def selected(directory: Path) -> list[list[int]]:
    return [row["selected"] for row in lines(directory / "rounds.jsonl")]


def stopped_after_two(out: Path) -> None:
    def stop(record) -> None:
        if record.round == 2:
            raise Stopped("enough")

    with pytest.raises(Stopped):
        run(out, callback=stop, **CHANGES)


def test_a_client_that_is_gone_is_neither_selected_nor_evaluated_from_that_round_on(
    tmp_path: Path,
) -> None:
    whole = run(tmp_path / "whole", **CHANGES)
    less = run(tmp_path / "less", round={"gone": {"2,4": 3}}, **CHANGES)
    assert selected(less)[:2] == selected(whole)[:2]
    assert any({2, 4} & set(cohort) for cohort in selected(whole)[2:])
    assert all(len(cohort) == 3 and not {2, 4} & set(cohort) for cohort in selected(less)[2:])
    judged: dict[int, set[int]] = {}
    for row in lines(less / "clients.jsonl"):
        judged.setdefault(row["round"], set()).add(row["client"])
    assert judged == {t: {*range(6)} - ({2, 4} if t > 2 else set()) for t in range(1, 6)}


def test_it_can_be_said_when_the_run_is_resumed_and_gives_the_same_bits(tmp_path: Path) -> None:
    gone = {"round": {"gone": {"2,4": 3}}, **CHANGES}
    stopped_after_two(tmp_path / "cut")
    resumed = run(tmp_path / "cut", resume=True, **gone)
    assert hashes(resumed) == hashes(run(tmp_path / "whole", **gone))


def test_updates_without_rounds_ask_no_client_that_is_gone(tmp_path: Path) -> None:
    directory = run(
        tmp_path,
        clients=4,
        participation=0.5,
        rounds=8,
        algorithm="fedbuff",
        schedule={"mode": "async", "buffer": 1},
        link={"clock": "virtual", "step_ms": 1.0},
        round={"gone": {"2,3": 3}},
    )
    completed = [row["completed"] for row in lines(directory / "rounds.jsonl")]
    assert any({2, 3} & set(clients) for clients in completed[:3])
    assert not any({2, 3} & set(clients) for clients in completed[5:])


def test_what_is_over_stays_as_it_was(tmp_path: Path) -> None:
    stopped_after_two(tmp_path)
    with pytest.raises(ConfigError, match=r"round\.gone: client 4 .*round 2 .*expected 3 or later"):
        run(tmp_path, resume=True, round={"gone": {"4": 2}}, **CHANGES)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"round": {"gone": {"9": 3}}}, "round.gone.9"),
        ({"round": {"gone": {"1": 1}}}, "round.gone.*>= 2"),
        ({"round": {"gone": {"0,1": 2, "2-5": 3}}}, "round.gone: leaves 0 of .* from round 3 on"),
        ({"round": {"gone": {"1": 3}}, "availability": {"trace": "phones"}}, "availability.trace"),
        ({"round": {"gone": {"1": 3}}, "privacy": {"clip": 1.0, "noise": 1.0}}, "privacy.noise"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        run(tmp_path, **{**CHANGES, "algorithm": "fedavg", **changes})

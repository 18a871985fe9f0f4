"""What is refused where training waits for nobody."""

from __future__ import annotations

import pytest

from fednet import config
from tests.rooms import lines, run


def load(**changes):
    return config.from_mapping({"schedule": "async", "algorithm": "fedbuff", **changes})


@pytest.mark.parametrize(
    ("algorithm", "schedule", "found"),
    [
        ("fedbuff", {}, ("async", 5)),  # half of the ten that train at a time
        ("ca2fl", {"buffer": 3}, ("async", 3)),
        ("fedasync", {}, ("async", 1)),
        ("fedbuff", {"mode": "semi-sync", "every": 60}, ("semi-sync", None)),
        ("fedbuff", {"mode": "async", "buffer": 7}, ("async", 7)),
        ("fedavg", {}, ("sync", None)),
    ],
)
def test_a_method_without_rounds_waits_for_nobody_where_no_mode_is_given(
    algorithm, schedule, found
):
    assert load(clients=40, clients_per_round=9).buffer == 4
    made = config.from_mapping(
        {"algorithm": algorithm, "clients": 10, "participation": 1.0, "schedule": schedule}
    )
    assert (made.schedule.mode, made.buffer) == found
    written = config.from_mapping(config.to_mapping(made))
    assert written.schedule == made.schedule


def test_that_a_method_waits_for_nobody_is_said(tmp_path):
    directory = run(tmp_path, algorithm={"name": "fedbuff"}, participation=1.0)
    (said,) = [e["text"] for e in lines(directory / "events.jsonl") if e["type"] == "remark"]
    assert "3 clients train at a time and every 1 replies are an update" in said
    assert all("staleness" in r for r in lines(directory / "rounds.jsonl"))

"""What is refused where training waits for nobody."""

from __future__ import annotations

import re

import pytest

from fednet import config
from fednet.errors import ConfigError
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "sync"}, "schedule.mode: fedbuff makes an update from replies as they come"),
        ({"schedule": {"mode": "sync", "buffer": 3}}, "schedule.buffer: only applies to async"),
        ({"schedule": {"mode": "async", "every": 3}}, "schedule.every: only applies to semi-sync"),
        ({"schedule": "semi-sync"}, "semi-sync needs every"),
        ({"schedule": {"mode": "async", "buffer": 11}}, "more than the 10 clients"),
        ({"round": {"ask": 1.5}}, "round.ask"),
        ({"evaluate": {"clients": "all"}}, "evaluate.clients"),
        ({"privacy": {"clip": 1.0, "noise": 1.0}}, "privacy.noise"),
        ({"faults": {"random": {"crash": 0.1}}}, "drop_before_training"),
        ({"algorithm": "scaffold"}, "scaffold does not support asynchronous training"),
        ({"algorithm": {"name": "fedga"}}, "fedga has 2 exchanges a round; expected sync"),
        ({"algorithm": "fedasync"}, "schedule.buffer: fedasync makes an update of each reply"),
        ({"schedule": "asink"}, "Did you mean async"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(changes, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(**changes)

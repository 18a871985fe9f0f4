"""The ways of a workload and the parts of `card`: run at a tiny size; no time is tested."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fednet.config import from_mapping
from tests.bench import card, ways
from tests.bench.workloads import SCALES, WORKLOADS

TINY = replace(WORKLOADS["W6"], clients=4, per_round=2, samples=4, batch_size=2, rounds=1)


@pytest.mark.parametrize("work", [*WORKLOADS.values(), *SCALES.values()], ids=lambda w: w.name)
def test_a_workload_takes_the_steps_of_the_plain_loop_beside_it(work):
    train = from_mapping(work.config("run", 1)).train
    assert (train.epochs, train.steps, train.batch_size) == (1, work.steps, work.batch_size)
    assert (train.optimizer, train.lr, train.momentum) == ("sgd", work.lr, 0.0)


def test_a_way_that_fails_costs_no_other(monkeypatch, tmp_path):
    plan = ways.Plan(TINY, pfl="/nowhere/python")
    monkeypatch.setattr(ways, "_fednet", lambda plan, folder, workers: {"seconds": 2.0})
    monkeypatch.setattr(ways, "_plain", lambda plan, channels_last: {"seconds": 1.0})
    records = list(ways.measure(plan, 2, tmp_path))
    assert [r["way"] for r in records if "failed" in r] == ["pfl", "pfl"]
    told = list(ways.lines(records))
    assert (
        "fednet in process            2.000 [2.000 2.000] s a round, 2.00 of the plain" in told[0]
    )
    assert "not measured" in told[-1]


@pytest.mark.long
def test_the_plain_loop_is_timed_and_watched(tmp_path):
    found = ways.ways(ways.Plan(TINY))["plain loop"](tmp_path)
    assert len(found["all_seconds"]) == 1
    assert found["seconds"] > 0
    assert found["pss_mb"] > 10


def test_parts_of_the_card_are_apart_and_within_their_time(monkeypatch, tmp_path):
    monkeypatch.setattr(card, "PARTS", {k: replace(card.PARTS[k], seconds=0.2) for k in ("tcp",)})
    records: list[Any] = list(card.bench("cpu", ["tcp"], tmp_path, 60.0))
    assert records[0]["failed"] == "stopped after 0 s"
    assert records[-1]["part"] == "tcp"


def test_a_part_prints_its_records(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(card, "FEDDC", {"tf32": {}})
    card.main("feddc", "cpu", str(tmp_path))
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["train"]["graphs"] for r in records] == [True]
    assert all(r["apart_ms"] > 0 for r in records)
    assert not any("failed" in r for r in records)

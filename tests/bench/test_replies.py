from __future__ import annotations

import pytest

from fednet.errors import CannotGoOn
from fednet.files import Lines
from tests.bench import replies


def test_fake_clients_take_part_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(replies, "REPLIES", 12)
    found = replies.measure(4, tmp_path / "run")
    assert found["a_second"] > 0
    assert found["clients_ms"] > 0
    record = {"connections": 4, "repeat": 1, **{k: replies.spread([v]) for k, v in found.items()}}
    assert "4 connections, 1 runs" in next(replies.lines([record]))


def test_a_run_that_loses_clients_is_no_measure(tmp_path):
    rounds = Lines(tmp_path / "rounds.jsonl")
    rounds.append({"round": 1, "completed": [0, 1], "dropped": {"2": "lost"}})
    rounds.flush()
    replies._complete(tmp_path, 2)
    with pytest.raises(CannotGoOn, match=r"2 of 3 clients completed round 1.*\(lost\)"):
        replies._complete(tmp_path, 3)

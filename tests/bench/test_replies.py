from __future__ import annotations

import pytest

from tests.bench import replies


@pytest.mark.long
def test_fake_clients_take_part_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr(replies, "REPLIES", 12)
    found = replies.measure(4, tmp_path / "run")
    assert found["a_second"] > 0
    assert found["clients_ms"] > 0
    record = {"connections": 4, "repeat": 1, **{k: replies.spread([v]) for k, v in found.items()}}
    assert "4 connections, 1 runs" in replies.line(record)

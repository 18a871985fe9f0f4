"""Planned faults beside the record of another run."""

from __future__ import annotations

from pathlib import Path

from fednet.server.faults import Faults
from tests.rooms import hashes, lines, run, small

STRIKES = {"schedule": [{"round": 1, "client": 1, "kind": "delay", "seconds": 0.01}]}


def test_no_planned_fault_strikes_in_a_replay_but_those_on_record(tmp_path: Path) -> None:
    first = run(tmp_path / "first", faults=STRIKES)
    assert [e["client"] for e in lines(first / "events.jsonl") if e["type"] == "fault"] == [1]
    again = run(tmp_path / "again", faults={**STRIKES, "replay": str(first)})
    assert [e for e in lines(again / "events.jsonl") if e["type"] == "fault"] == []
    assert hashes(again) == hashes(first)


def test_a_replay_hands_out_no_fault(tmp_path: Path) -> None:
    first = run(tmp_path, rounds=1)
    planned = {"schedule": [{"round": 1, "client": 1, "kind": "drop_before_sending"}]}

    def handed_out(**more: str) -> list[str]:
        config = small(rounds=1, faults={**planned, **more})
        faults = Faults(config, set(), lambda round, kind: None, usual=0, exchanges=1)
        return [fault.kind for fault in faults.of(1, 0, 1)]

    assert handed_out() == ["drop_before_sending"]
    assert handed_out(replay=str(first)) == []

"""What a report says of the world around a run: worked by hand over records made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fednet.report import costs, figures, metrics, open_run
from tests.report import fake_run


def made(
    tmp_path: Path, rows: list[dict[str, Any]], wire: list[dict[str, Any]], **more: Any
) -> Any:
    folder = tmp_path / "run"
    folder.mkdir()
    text = json.dumps(fake_run.config("run", {"name": "fedavg"}, 0, len(rows), 4, **more))
    (folder / "config.yaml").write_text(text)
    for name, found in (("rounds", rows), ("wire", wire)):
        fake_run.jsonl(folder / f"{name}.jsonl", found)
    return open_run(folder)


def row(number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {"round": number, "test_accuracy": accuracy, "seconds": 10.0, **more}


def message(number: int, size: int, useful: bool, reason: str | None = None) -> dict[str, Any]:
    found = {"round": number, "client": 0, "direction": "up", "type": "reply", "bytes": size}
    return {**found, "kinds": {"delta": size}, "useful": useful, "reason": reason}


def test_the_highest_accuracies_that_were_reached_with_what_they_took(tmp_path: Path) -> None:
    rows = [row(1, 0.4), row(2, 0.76), row(3, 0.74), row(4, 0.81)]
    wire = [message(t, 10**6, True) for t in (1, 2, 3, 4)]
    run = made(tmp_path, rows, wire)
    assert metrics.to_accuracy(run) == [
        {"accuracy": a, "rounds": t, "mb": t, "seconds": 10.0 * t}
        for a, t in ((0.6, 2.0), (0.7, 2.0), (0.75, 2.0), (0.8, 4.0))
    ]


def test_bytes_of_no_use_stand_by_their_reason_the_most_first(tmp_path: Path) -> None:
    wire = [
        message(1, 100, True),
        message(1, 30, False, "left"),
        message(1, 50, False, "not among the first 2"),
        message(2, 40, False, "left"),
        {**message(2, 7, False, "late"), "type": "pull", "kinds": {}},  # what asked for a payload
        {**message(2, 9, False), "type": "beat", "kinds": {}},  # nobody could use it better
    ]
    run = made(tmp_path, [row(1, 0.4), row(2, 0.5)], wire)
    assert list(costs.wasted(run).items()) == [
        ("left", 70),
        ("not among the first 2", 50),
        ("late", 7),
    ]
    (figure,) = figures.traffic(run)
    assert "Not used, by reason: left 70 B, not among the first 2 50 B, late 7 B." in figure.note


def test_who_was_there_is_drawn_where_a_trace_says_it(tmp_path: Path) -> None:
    rows = [row(t, 0.5, here=5 - t, selected=[0, 1, 2], completed=[0, 1]) for t in (1, 2)]
    run = made(tmp_path, rows, [])
    (figure,) = [f for f in figures.details(run) if f.name == "availability"]
    assert figure.legend == 3
    other = tmp_path / "other"
    other.mkdir()
    plain = made(other, [row(1, 0.5, selected=[0], completed=[0])], [])
    assert not [f for f in figures.details(plain) if f.name == "availability"]

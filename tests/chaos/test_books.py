"""The record of bytes of a run whose server or client was killed or stopped: nothing that was sent
is missing, and what counts is useful.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednet.errors import Stopped
from fednet.report import costs
from fednet.report.read import open_run
from fednet.server.rounds import Rounds
from tests.books import read_book
from tests.processes import Federation, crashes, finished, lines, planned
from tests.rooms import run, summary

VIRTUAL = {
    "clock": "virtual",
    "up_mbps": 8.0,
    "step_ms": 10.0,
    "per_client": {"2": {"up_mbps": 0.002}},
}
LARGE = {"name": "mlp", "hidden": [16384]}  # 5 MB, so two parts


def booked(rows: list[dict[str, Any]]) -> dict[str, int]:
    return {d: sum(r["bytes"] for r in rows if r["direction"] == d) for d in ("up", "down")}


def agree(directory: Path) -> None:
    """The summary, wire.jsonl, the declarations and the report say the same."""
    said = summary(directory)
    rows = lines(directory / "wire.jsonl")
    both = booked(rows)
    assert {way: said["bytes"][way] for way in both} == both
    assert said["bytes"]["total"] == sum(both.values())
    assert said["useful"] == said["predicted"]
    measured = costs.compare_prediction(open_run(directory), said["predicted"])
    by_kind = {
        way: {kind: cost["measured"] for kind, cost in kinds.items()}
        for way, kinds in measured.items()
    }
    assert by_kind == said["useful"]


def beside_kernel(fed: Federation, *servers: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Return for each of these servers, which stopped or ended, the bytes that it says it recorded,
    and the kernel's count. Check that the first are the rows of that server.
    """
    found = []
    for server, event in zip(servers, fed.events("kernel"), strict=True):
        recorded = {"up": event["booked_up"], "down": event["booked_down"]}
        own = [r for r in fed.lines("wire.jsonl") if r["incarnation"] == server]
        assert recorded == booked(own)
        found.append((recorded, {"up": event["received"], "down": event["sent"]}))
    return found


def sent_task(directory: Path) -> bool:
    """Whether the server has sent the payload of a task, or is about to."""
    accounts = read_book(directory).open_accounts.values()
    return any(a.type == "task" and a.kinds for mine in accounts for a in mine.values())


def received_by_clients(fed: Federation) -> int:
    return sum(booked(lines(p))["down"] for p in fed.path.glob("state/*/wire*.jsonl"))


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_before_it_is_decided_who_was_in_time_changes_nothing_useful(
    tmp_path, monkeypatch, late
):
    changes = {"link": VIRTUAL, "rounds": 3, "round": {"deadline": 0.8 if late else None}}
    take_event = Rounds.take_event
    last_of_round_2 = iter([False] * 5 + [True])  # three events a round, one of each client

    def stopped(*arguments):
        if next(last_of_round_2, False):
            raise Stopped("stopped: SIGTERM; continue with --resume.")
        take_event(*arguments)

    monkeypatch.setattr(Rounds, "take_event", stopped)
    with pytest.raises(Stopped):
        run(tmp_path, **changes)
    directory = run(tmp_path, resume=True, **changes)
    again = [r for r in lines(directory / "wire.jsonl") if r["round"] == 2 and r["type"] == "task"]
    assert sorted(r["client"] for r in again) == [0, 1, 2]  # each task was sent once
    assert [r["client"] for r in again if not r["useful"]] == ([2] if late else [])
    agree(directory)


@pytest.mark.parametrize("link", [{}, VIRTUAL], ids=["real", "virtual"])
def test_what_a_killed_server_had_sent_is_recorded_by_the_next(tmp_path, link):
    faults = crashes((2, "receiving"))
    fed = finished(tmp_path, model=LARGE, link=link, faults=faults, rounds=2)
    rows = fed.lines("wire.jsonl")
    taken = [r for r in rows if r["incarnation"] == 1 and r["round"] == 2]
    assert len({r["client"] for r in taken if r["type"] == "task" and r["kinds"]}) >= 2
    assert booked(rows)["down"] >= received_by_clients(fed)
    agree(fed.path)
    ((recorded, kernel),) = beside_kernel(fed, 2)
    assert recorded == kernel


def test_a_stopped_server_records_all_that_was_sent(tmp_path):
    """Also what it has not settled, since the next one continues with it."""
    late = planned("delay", client=3, seconds=5.0)
    with Federation(tmp_path, model=LARGE, rounds=2, faults=late) as fed:
        fed.client("0-2")
        fed.begin("3")

        def answered() -> bool:
            rows = [r for p in fed.path.glob("state/*/wire*.jsonl") for r in lines(p)]
            return sum(r["round"] == 2 and r["type"] == "reply" for r in rows) >= 3

        fed.until(answered)
        fed.last.terminate()
        fed.status()
        fed.server(resume=True)
        fed.finish()
        for recorded, kernel in beside_kernel(fed, 1, 2):
            assert recorded["up"] == kernel["up"]
        agree(fed.path)


def test_what_a_killed_client_was_sent_is_recorded_as_lost(tmp_path):
    changes = {"model": LARGE, "algorithm": "scaffold", "rounds": 2}
    with Federation(tmp_path, **changes, round={"lost": {"closed": 30.0}}) as fed:
        first = fed.client("0-3")
        fed.server()
        fed.until(lambda: sent_task(fed.path))
        fed.lose(first)
        fed.client("0-3")
        assert fed.status() == 0
        down = [r for r in fed.lines("wire.jsonl") if r["type"] == "task" and not r["useful"]]
        assert any(r["bytes"] > 1_000_000 for r in down)
        assert all(r.get("lost") for r in down)
        assert fed.summary()["useful"] == fed.summary()["predicted"]

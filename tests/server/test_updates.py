"""Runs that wait for nobody, in one process: what makes an update, what is recorded, and what a
resume and a replay give.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fednet.records.manifest import read_manifest
from fednet.server.clients import Clients
from fednet.server.rounds import Rounds
from fednet.server.watch import Watch
from tests.rooms import lines, lost
from tests.server.test_rounds import hashes
from tests.server.test_rounds import run as run_any

# Client 3 takes as long as seven steps of the others.
SLOW = {"clock": "virtual", "step_ms": 10, "up_mbps": 8.0, "per_client": {"3": {"step_ms": 70}}}
ASYNC: dict[str, Any] = {
    "algorithm": "fedbuff",
    "schedule": {"mode": "async", "buffer": 2},
    "rounds": 8,
    "participation": 0.75,
    "link": SLOW,
}
EACH = {"mode": "async", "buffer": 1}


def run(out: Path, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    return run_any(out, **{**ASYNC, **changes})


def test_updates_come_without_the_slow_client_and_its_reply_counts_late(tmp_path: Path) -> None:
    path, records = run(tmp_path)
    assert [r["round"] for r in records] == list(range(1, 9))
    assert all(len(r["completed"]) == len(r["staleness"]) == 2 for r in records)
    late = [s for r in records for c, s in zip(r["completed"], r["staleness"]) if c == 3]
    quick = [s for r in records for c, s in zip(r["completed"], r["staleness"]) if c != 3]
    assert late
    assert min(late) >= 2
    assert sum(quick) / len(quick) < 1
    steps = 3 * 0.01  # of 40 samples in batches of 16
    assert records[0]["seconds_virtual"] == pytest.approx(steps, abs=0.02)
    # Tasks overlap: how long an update's replies took is no split of its time.
    assert not any(r.get("seconds_virtual_by_phase") or r.get("training_s") for r in records)
    assert not any(r["seconds_by_phase"]["training"] for r in records)
    rows = lines(path / "wire.jsonl")
    booked = {(r["round"], r["client"]): r.get("staleness") for r in rows if r["type"] == "reply"}
    for record in records:
        for client, stale in zip(record["completed"], record["staleness"]):
            assert booked[record["round"] - stale, client] == stale


def replies_at_both_ends(path: Path) -> list[dict[str, Any]]:
    """The rows of replies in the server's book, whose rows of tasks and replies are those of the
    clients' book.
    """
    (theirs,) = path.glob("state/*/wire*.jsonl")
    crossed = [
        sorted((r["type"], r["round"], r["client"], r["bytes"]) for r in book if r["client"] >= 0)
        for book in (lines(path / "wire.jsonl"), lines(theirs))
    ]
    assert crossed[0] == crossed[1]
    return [r for r in lines(path / "wire.jsonl") if r["type"] == "reply"]


def test_what_came_and_is_in_no_update_is_in_the_book_too(tmp_path: Path) -> None:
    path, records = run(tmp_path, participation=1.0, rounds=4)
    replies = replies_at_both_ends(path)
    counted = sum(len(r["completed"]) for r in records)
    assert len(replies) > counted
    assert sum(r["useful"] for r in replies) == counted
    assert [r["reason"] for r in replies if r["client"] == 3] == ["left out"]


def test_a_lost_client_costs_its_patience_and_another_is_asked(tmp_path: Path) -> None:
    _, records = run(tmp_path, faults=lost((1, 0), (1, 1)), rounds=3)
    dropped = {c: why for r in records for c, why in r["dropped"].items()}
    struck = {str(c) for c in (0, 1) if c in records[0]["selected"]}
    assert struck
    assert dropped == dict.fromkeys(struck, "lost: drop_before_sending")
    assert all(len(r["completed"]) == 2 for r in records)


def test_a_deadline_holds_for_each_task_by_itself(tmp_path: Path) -> None:
    path, records = run(tmp_path, round={"deadline": 0.1, "lost": {"closed": 0.02}})
    assert {why for r in records for why in r["dropped"].values()} == {"deadline"}
    assert {c for r in records for c in r["dropped"]} == {"3"}
    assert not any(3 in r["completed"] for r in records)
    late = [r for r in replies_at_both_ends(path) if r["client"] == 3]
    assert len(late) > 1
    assert {(r["useful"], r["reason"]) for r in late} == {(False, "left out")}


def test_semi_synchronous_updates_come_every_so_many_seconds(tmp_path: Path) -> None:
    schedule = {"mode": "semi-sync", "every": 0.1}
    _, records = run(tmp_path, schedule=schedule, participation=1.0)
    assert [r["seconds_virtual"] for r in records] == pytest.approx([0.1] * 8)
    late = [s for r in records for c, s in zip(r["completed"], r["staleness"]) if c == 3]
    assert late
    assert set(late) == {2}  # three periods
    assert all({0, 1, 2} <= set(r["completed"]) for r in records)
    assert records[2]["completed"] == [3, 0, 1, 2]  # in the order in which they came


@pytest.mark.parametrize(
    "changes",
    [
        *({"algorithm": name, "schedule": EACH} for name in ("fedasync", "ca2fl", "moon")),
        {"wire": {"up": {"delta": ["topk(0.2)"]}, "down": {"state": ["qsgd(8)"]}}},
    ],
    ids=str,
)
def test_a_run_goes_on_after_a_stop_with_the_same_bits(tmp_path: Path, changes: Any) -> None:
    _, whole = run(tmp_path / "whole", **changes)
    for until in (3, 5, 8):
        _, parts = run(tmp_path / "parts", rounds=until, resume=until > 3, **changes)
    assert hashes(parts) == hashes(whole)
    keys = ("selected", "completed", "staleness", "dropped", "seconds_virtual", "useful")
    assert [[r[k] for k in keys] for r in parts] == [[r[k] for k in keys] for r in whole]


def test_a_task_that_goes_on_after_a_stop_takes_the_time_of_its_bytes(tmp_path: Path) -> None:
    link = {"clock": "virtual", "step_ms": 1, "up_mbps": 8.0, "down_mbps": 0.05}
    changes = {"link": {**link, "per_client": {"3": {"down_mbps": 0.01}}}}
    _, whole = run(tmp_path / "whole", rounds=6, **changes)
    for until in (1, 2, 3, 6):
        path, parts = run(tmp_path / "parts", rounds=until, resume=until > 1, **changes)
        if until < 6:
            assert read_manifest(path / "checkpoint")[0].under_way
    assert [r["seconds_virtual"] for r in parts] == [r["seconds_virtual"] for r in whole]


def test_the_order_in_which_replies_came_repeats_a_run_to_the_bit(tmp_path: Path) -> None:
    real = {"link": {"clock": "real"}, "participation": 1.0}
    path, first = run(tmp_path / "first", **real)
    _, again = run(tmp_path / "again", faults={"replay": str(path)}, **real)
    assert hashes(again) == hashes(first)
    assert [(r["completed"], r["staleness"]) for r in again] == [
        (r["completed"], r["staleness"]) for r in first
    ]


def test_a_client_that_leaves_in_the_middle_of_its_task_is_lost_there(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n0,0,0.01\n0,0.2,9\n1,0,9\n2,0,9\n3,0.1,9\n")
    there = {"availability": {"trace": str(trace)}, "rounds": 16}
    _, records = run(tmp_path, **there)
    assert records[0]["dropped"] == {"0": "left"}
    assert records[0]["here"] == 3
    seconds = 0.0
    comes = {}
    for record in records:
        for client in record["selected"]:
            comes.setdefault(client, []).append(seconds)
        seconds += record["seconds_virtual"]
    assert min(comes[3]) <= 0.1 <= seconds
    assert [s > 0.1 for s in comes[0]] == [False] + [True] * (len(comes[0]) - 1)
    assert sum(r["completed"].count(3) for r in records) >= 1
    _, again = run(tmp_path / "again", **there)
    assert hashes(again) == hashes(records)


def test_a_task_that_is_resumed_has_the_time_that_is_left_of_its_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients leave after 10,000 s. As the run goes on its clock shows 4,000 s more."""
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n" + "".join(f"{c},0,10000\n" for c in range(4)))
    real = {
        "availability": {"trace": str(trace)},
        "link": {"clock": "real"},
        "participation": 1.0,
    }
    run(tmp_path, rounds=2, **real)
    begin = Rounds.begin
    hand_out = Clients.open
    left = []

    def later(self: Rounds) -> None:
        assert self.records.resumed is not None
        self.records.resumed.progress.at += 4000
        begin(self)

    def handed(self: Clients, phase: Any, specs: Any, *more: Any) -> None:
        left.extend(spec.leaves.at - time.monotonic() for spec in specs)
        hand_out(self, phase, specs, *more)

    monkeypatch.setattr(Rounds, "begin", later)
    monkeypatch.setattr(Clients, "open", handed)
    run(tmp_path, rounds=3, resume=True, **real)
    assert left
    assert left == pytest.approx([6000] * len(left), abs=1000)


def test_with_nothing_stale_an_update_is_a_round(tmp_path: Path) -> None:
    """As many in a buffer as train at once, all of one speed."""
    same = {"link": {"clock": "virtual", "step_ms": 10}, "participation": 1.0, "rounds": 3}
    whole = {"mode": "async", "buffer": 4}
    _, one = run(tmp_path / "sync", algorithm="fedavg", schedule="sync", **same)
    _, two = run(tmp_path / "async", algorithm="fedavg", schedule=whole, **same)
    assert hashes(two) == hashes(one)
    assert [set(r["staleness"]) for r in two] == [{0}] * 3


def test_what_ended_while_clients_are_awaited_is_kept_for_the_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer clients than `min_results` are there as a round begins: they are waited for, with tasks
    under way that end meanwhile.
    """
    looks: list[int] = []
    present = Watch.present

    def missing(self: Watch, among: range | None = None) -> int:
        looks.append(self._awaiting)
        return 0 if len(looks) % 40 < 20 else present(self, among)

    monkeypatch.setattr(Watch, "present", missing)
    _, records = run(
        tmp_path,
        participation=1.0,
        round={"join": None},
        rounds=12,
        link={"clock": "real"},
    )
    assert max(looks) > 3  # clients were awaited in the middle of the run
    for client in range(4):
        assert any(client in r["completed"] for r in records[-4:])


def test_a_client_that_lost_a_task_and_completed_a_later_one_is_replayed(tmp_path: Path) -> None:
    faults = lost((1, 0), (1, 1), (2, 0), (2, 1))
    real = {
        "link": {"clock": "real"},
        "schedule": {"mode": "semi-sync", "every": 0.05},
        "participation": 1.0,
        "round": {"lost": {"closed": 0.02}},
    }
    path, first = run(tmp_path / "first", faults=faults, **real)
    dropped = {int(c): r["round"] for r in first for c in r["dropped"]}
    assert set(dropped) == {0, 1}
    for client, round in dropped.items():
        assert any(client in r["completed"] for r in first if r["round"] > round)
    _, again = run(tmp_path / "again", faults={"replay": str(path)}, **real)
    assert hashes(again) == hashes(first)


def test_replies_of_a_void_update_are_on_record_and_replayed(tmp_path: Path) -> None:
    """Two of three replies are lost, where an update needs two."""
    virtual = {
        "schedule": {"mode": "semi-sync", "every": 0.1},
        "participation": 1.0,
        "round": {"min_results": 2, "lost": {"closed": 0.05}},
    }
    path, first = run(tmp_path / "first", faults=lost((2, 0), (2, 1)), **virtual)
    (void,) = [r for r in first if r["void"]]
    assert void["dropped"]["2"] == "the update was discarded"
    assert void["completed"] == []
    assert any(2 in r["completed"] for r in first if r["round"] > void["round"])
    real = {"link": {"clock": "real"}, "faults": {"replay": str(path)}}
    _, again = run(tmp_path / "again", **virtual, **real)
    assert hashes(again) == hashes(first)

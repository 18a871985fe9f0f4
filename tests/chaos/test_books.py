"""The books of a run whose server or client was killed or stopped: nothing that left is missing,
and what counts is of use.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from fednet.errors import Stopped
from fednet.report import costs
from fednet.report.read import open_run
from fednet.server.phases import Phases
from tests.federation import Federation
from tests.rooms import lines, run, summary

VIRTUAL = {
    "clock": "virtual",
    "up_mbps": 8.0,
    "step_ms": 10.0,
    "per_client": {"2": {"up_mbps": 0.002}},
}
LARGE = {"name": "mlp", "hidden": [16384]}  # 5 MB, so five parts


def booked(rows: list[dict]) -> dict[str, int]:
    return {d: sum(r["bytes"] for r in rows if r["direction"] == d) for d in ("up", "down")}


def crossed(rows: list[dict], incarnation: int) -> dict[str, int]:
    """Bytes to and from one server process."""
    own = [r for r in rows if r["incarnation"] == incarnation]
    local = {d: sum(r.get("local", 0) for r in own if r["direction"] == d) for d in ("up", "down")}
    return {d: n - local[d] for d, n in booked(own).items()}


def beside_kernel(told: dict) -> dict[str, int]:
    """What an event `kernel` says was booked."""
    return {"up": told["booked_up"], "down": told["booked_down"]}


def agrees(directory: Path) -> None:
    """The summary, the book, the declarations and the report say the same."""
    said, rows = summary(directory), lines(directory / "wire.jsonl")
    both = booked(rows)
    assert {k: said["bytes"][k] for k in ("up", "down", "total")} == {
        **both,
        "total": sum(both.values()),
    }
    assert said["useful"] == said["predicted"]
    measured = costs.predicted(open_run(directory), said["predicted"])
    assert {
        d: {k: v["measured"] for k, v in kinds.items()} for d, kinds in measured.items()
    } == said["useful"]
    numbers = [(r["incarnation"], r["number"]) for r in rows if "number" in r]
    assert len(numbers) == len(set(numbers))


def test_the_summary_has_the_bytes_of_the_whole_book(tmp_path: Path) -> None:
    agrees(run(tmp_path, evaluate={"clients": "all"}))


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_before_it_is_decided_who_was_in_time_takes_nothing_from_what_is_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    changes = {"link": VIRTUAL, "rounds": 3, "round": {"deadline": 0.8 if late else None}}
    decide, stops = Phases._decide, iter([False, True])

    def stopped(self, phase, outcomes, clock):
        if next(stops, False):
            raise Stopped("stopped: SIGTERM; go on with --resume.")
        decide(self, phase, outcomes, clock)

    monkeypatch.setattr(Phases, "_decide", stopped)
    with pytest.raises(Stopped):
        run(tmp_path, **changes)
    directory = run(tmp_path, resume=True, **changes)
    again = [r for r in lines(directory / "wire.jsonl") if r["round"] == 2 and r["type"] == "task"]
    assert sorted(r["client"] for r in again) == [0, 1, 2]  # each task crossed once
    assert [r["client"] for r in again if not r["useful"]] == ([2] if late else [])
    agrees(directory)


@pytest.mark.parametrize("link", [{}, VIRTUAL], ids=["real", "virtual"])
def test_what_a_killed_server_had_under_way_is_in_the_book_of_the_next(
    tmp_path: Path, link: dict
) -> None:
    crash = {"schedule": [{"round": 2, "kind": "server_crash", "at": "receiving"}]}
    with Federation(tmp_path, model=LARGE, link=link, faults=crash, rounds=2) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        rows = fed.lines("wire.jsonl")
        taken = [r for r in rows if r["incarnation"] == 1 and r["round"] == 2 and "number" in r]
        assert len({r["client"] for r in taken if r["type"] == "task" and r["kinds"]}) >= 2
        # Whatever reached a client is in the server's book.
        books = [lines(p) for p in fed.path.glob("state/*/wire*.jsonl")]
        received = sum(booked(book)["down"] for book in books)
        assert booked(rows)["down"] >= received
        agrees(fed.path)
        (told,) = fed.events("kernel")
        assert beside_kernel(told) == crossed(rows, 2)
        assert crossed(rows, 2) == {"up": told["received"], "down": told["sent"]}


def test_a_stopped_server_tells_the_kernels_count_beside_all_that_crossed(tmp_path: Path) -> None:
    """Also what it has not settled, since the next one goes on with it."""
    late = {"schedule": [{"round": 2, "client": 3, "kind": "delay", "seconds": 5.0}]}
    with Federation(tmp_path, model=LARGE, rounds=2, faults=late) as fed:
        fed.client("0-2")
        fed.client("3")
        first = fed.server()

        def answered() -> int:
            books = [lines(p) for p in fed.path.glob("state/*/wire*.jsonl")]
            return sum(r["round"] == 2 and r["type"] == "reply" for book in books for r in book)

        fed.until(lambda: answered() >= 3)
        first.terminate()
        fed.status(first)
        fed.server(resume=True)
        fed.finish()
        rows = fed.lines("wire.jsonl")
        stopped, ended = fed.events("kernel")
        for incarnation, told in ((1, stopped), (2, ended)):
            assert beside_kernel(told) == crossed(rows, incarnation)
            assert beside_kernel(told)["up"] == told["received"]
        agrees(fed.path)


def test_what_a_killed_client_was_sent_is_marked_as_lost(tmp_path: Path) -> None:
    with Federation(
        tmp_path, model=LARGE, algorithm="scaffold", rounds=2, round={"lost": {"closed": 30.0}}
    ) as fed:
        server = fed.server()
        first = fed.client("0-3")
        pulled = fed.path / "checkpoint" / "flight.jsonl"
        fed.until(
            lambda: pulled.exists() and b'"type":"task","kinds":{"state"' in pulled.read_bytes()
        )
        first.kill()
        fed.client("0-3")
        assert fed.status(server) == 0
        down = [r for r in fed.lines("wire.jsonl") if r["type"] == "task" and not r["useful"]]
        assert any(r["bytes"] > 1_000_000 for r in down)
        assert all(r.get("lost") for r in down)
        said = json.loads((fed.path / "summary.json").read_text())
        assert said["useful"] == said["predicted"]
        assert first.poll() in (None, -signal.SIGKILL)


@pytest.mark.parametrize("at", ["receiving", "checkpointing", "recording", "between"])
def test_a_book_in_sums_misses_nothing_of_a_server_that_was_killed(tmp_path: Path, at: str) -> None:
    crash = {"schedule": [{"round": t, "kind": "server_crash", "at": at} for t in (1, 2)]}
    changes = {"faults": crash, "link": VIRTUAL, "algorithm": "scaffold", "rounds": 3}
    with Federation(tmp_path, record={"wire": "sums"}, **changes) as fed:
        fed.client("0-1")
        fed.client("2-3")
        fed.server()
        fed.finish()
        rows = fed.lines("wire.jsonl")
        assert all("messages" in r for r in rows)
        # The second may have ended with what the first had received, before anybody came to it.
        assert {1, 3} <= {r["incarnation"] for r in rows}
        assert len(fed.events("started")) == 3
        books = [lines(p) for p in fed.path.glob("state/*/wire*.jsonl")]
        assert booked(rows)["down"] >= sum(booked(book)["down"] for book in books)
        agrees(fed.path)
        assert not list((fed.path / "checkpoint").glob("book-*"))

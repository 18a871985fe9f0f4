"""Clients that come and go at times of a trace, over real processes: the same bits in any placement
and whoever is killed on the virtual clock; on the real one a task is cancelled when its client
leaves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fednet.errors import CannotGoOn
from fednet.records.manifest import read_manifest
from tests.processes import Federation, crashes, finished, in_process

# A task takes a little over 1 s (20 steps of 50 ms): client 1 leaves in the middle of round 3, and
# is back before round 6; client 3 comes for round 4.
SPELLS = {0: [(0, 1000)], 1: [(0, 2.9), (5.2, 1000)], 2: [(0, 1000)], 3: [(2.5, 1000)]}
SAME = ("round", "second", "here", "selected", "completed", "dropped", "seconds_virtual")


def trace(file: Path, spells: dict[int, list[tuple[float, float]]]) -> dict[str, Any]:
    """Write when clients are there, and return the section that names the file."""
    file.write_text("".join(f"{c},{a},{b}\n" for c, own in spells.items() for a, b in own))
    return {"trace": str(file)}


def devices(file: Path, step_ms: list[int]) -> dict[str, Any]:
    file.write_text("".join(f"{c},{ms}\n" for c, ms in enumerate(step_ms)))
    return {"trace": str(file)}


def virtual(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": "scaffold",
        "rounds": 6,
        "train": {"steps": 20},
        "link": {"clock": "virtual", "trace": "lte"},
        "availability": trace(tmp_path / "trace.csv", SPELLS),
        "devices": devices(tmp_path / "devices.csv", [50, 51, 52, 53]),
        "round": {"ask": 1.3},
        "participation": 0.75,
        **changes,
    }


def facts(fed: Federation) -> list[Any]:
    return [fed.hashes(), *({key: r.get(key) for key in SAME} for r in fed.rounds())]


def cancelled(fed: Federation, round: int) -> bool:
    """Whether the task of client 1 in this round was recorded as such."""
    rows = fed.lines("wire.jsonl")
    (task,) = [
        row for row in rows if (row["round"], row["client"], row["type"]) == (round, 1, "task")
    ]
    return (task["useful"], task["reason"]) == (False, "left")


def test_a_client_that_leaves_in_the_middle_is_lost_there_and_may_come_back(tmp_path):
    fed = in_process(tmp_path, **virtual(tmp_path, round={"ask": 1.0}, participation=1.0))
    rounds = fed.rounds()
    asked = [1 in r["selected"] for r in rounds]
    (lost,) = [r["round"] for r in rounds if r["dropped"].get("1") == "left"]
    assert asked[0]
    assert not asked[lost]  # the round after is without it
    assert asked[-1]
    for r in rounds:  # asked are those that the trace has there
        here = [c for c, own in SPELLS.items() if any(a <= r["second"] < b for a, b in own)]
        assert (r["selected"], r["here"]) == (here, len(here))
    assert cancelled(fed, lost)


def test_a_run_whose_clients_have_left_for_good_ends_with_all_saved(tmp_path):
    gone = trace(tmp_path / "gone.csv", {c: [(0, 3)] for c in range(4)})
    changes = virtual(tmp_path, availability=gone)
    with pytest.raises(CannotGoOn, match=r"there are never 1 clients at once \(availability.trace"):
        in_process(tmp_path / "run", **changes)
    fed = Federation(tmp_path / "run", **changes)
    done = len(fed.rounds())
    last = fed.rounds()[-1]
    assert 0 < done < 6
    assert last["second"] + last["seconds_virtual"] >= 3  # the round in which they left too
    assert read_manifest(fed.path / "checkpoint")[0].round == done


def test_processes_clients_started_apart_and_kills_give_the_bits_of_one_process(tmp_path):
    changes = virtual(tmp_path)
    one = in_process(tmp_path / "one", **changes)
    assert any("left" in r["dropped"].values() for r in one.rounds())
    with Federation(tmp_path / "workers", **changes) as fed:
        fed.supervisor(2)
        fed.finish()
        assert facts(fed) == facts(one)
    faults = crashes((2, "spooling"), (3, "aggregating"), (5, "recording"))
    fed = finished(tmp_path / "apart", "3", "0,2", "1", **changes, faults=faults)
    assert facts(fed) == facts(one)
    assert len(fed.events("started")) == 4
    with Federation(tmp_path / "killed", **changes) as fed:
        first = fed.client("0-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) >= 2)
        os.kill(first.pid, signal.SIGKILL)
        fed.client("0-3")
        assert fed.status() == 0, fed.output()
        assert fed.hashes() == one.hashes()


def test_on_the_real_clock_the_task_of_a_client_that_leaves_is_cancelled(tmp_path):
    """Its device would take ten minutes; it leaves after five seconds, and the round ends."""
    spells: dict[int, list[tuple[float, float]]] = {
        0: [(0, 1000)],
        1: [(0, 5)],
        2: [(0, 1000)],
        3: [(0, 0)],
    }
    shape = {
        "rounds": 2,
        "train": {"steps": 10},
        "availability": trace(tmp_path / "trace.csv", spells),
        "devices": devices(tmp_path / "devices.csv", [0, 60000, 0, 0]),
    }
    fed = finished(tmp_path / "real", "0-3", **shape)
    first, second = fed.rounds()
    assert (first["selected"], first["completed"]) == ([0, 1, 2], [0, 2])
    assert first["dropped"] == {"1": "left"}
    assert second["selected"] == [0, 2]
    assert second["second"] >= 5
    assert cancelled(fed, 1)
    fed.check()


def test_a_run_on_the_real_clock_is_repeated_by_its_records(tmp_path):
    """Who had left when its turn came depends on the machine; `faults.replay` forces what was."""
    spells: dict[int, list[tuple[float, float]]] = {
        0: [(0, 1000)],
        1: [(0, 0.02), (0.5, 1000)],
        2: [(0, 1000)],
        3: [(0.1, 1000)],
    }
    shape = {"algorithm": "scaffold", "availability": trace(tmp_path / "trace.csv", spells)}
    first = in_process(tmp_path / "first", **shape)
    again = in_process(tmp_path / "again", **shape, faults={"replay": str(first.path)})
    assert [r["selected"] for r in again.rounds()] == [r["selected"] for r in first.rounds()]
    assert again.completed() == first.completed()
    assert again.hashes() == first.hashes()

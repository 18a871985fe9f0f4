"""Clients that are there in seconds, over real processes: the same bits whatever the placement and
whoever is killed on the virtual clock, and on the real one a task that is called off where its
client leaves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import fednet
from tests.federation import Federation, settings

# A task takes a little over 1 s (20 steps of 50 ms): client 1 leaves in the middle of round 3, and
# is back before round 6; client 3 comes for round 4.
TRACE = "client,from,to\n0,0,1000\n1,0,2.9\n1,5.2,1000\n2,0,1000\n3,2.5,1000\n"
SAME = ("round", "second", "here", "selected", "completed", "dropped", "seconds_virtual")


def virtual(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    trace, devices = tmp_path / "trace.csv", tmp_path / "devices.csv"
    trace.write_text(TRACE)
    devices.write_text("client,step_ms\n" + "".join(f"{c},{50 + c}\n" for c in range(4)))
    return {
        "algorithm": "scaffold",
        "rounds": 6,
        "train": {"steps": 20},
        "link": {"clock": "virtual", "trace": "lte"},
        "availability": {"trace": str(trace)},
        "devices": {"trace": str(devices)},
        "round": {"ask": 1.3},
        "participation": 0.75,
        **changes,
    }


def reckoned(fed: Federation) -> list[dict[str, Any]]:
    return [{key: r.get(key) for key in SAME} for r in fed.rounds()]


def alone(tmp_path: Path, **changes: Any) -> Federation:
    """The same in one process."""
    fed = Federation(tmp_path / "alone", **virtual(tmp_path, **changes))
    fednet.run(settings(**virtual(tmp_path, **changes)), out=fed.out, in_process=True)
    return fed


def test_a_client_that_leaves_in_the_middle_is_lost_there_and_may_come_back(tmp_path: Path) -> None:
    fed = alone(tmp_path, round={"ask": 1.0}, participation=1.0)
    rounds = fed.rounds()
    asked = [1 in r["selected"] for r in rounds]
    lost = [r for r in rounds if r["dropped"].get("1") == "left"]
    assert len(lost) == 1
    assert asked[0]
    assert not asked[lost[0]["round"]]  # the round after is without it
    assert asked[-1]
    for r in rounds:  # asked are those that the trace has there
        at = r["second"]
        here = [c for c, spells in _spells().items() if any(a <= at < b for a, b in spells)]
        assert (r["selected"], r["here"]) == (here, len(here))
    (task,) = [
        row
        for row in fed.lines("wire.jsonl")
        if (row["round"], row["client"], row["type"]) == (lost[0]["round"], 1, "task")
    ]
    assert (task["useful"], task["reason"]) == (False, "left")


def _spells() -> dict[int, list[tuple[float, float]]]:
    found: dict[int, list[tuple[float, float]]] = {}
    for line in TRACE.splitlines()[1:]:
        client, a, b = line.split(",")
        found.setdefault(int(client), []).append((float(a), float(b)))
    return found


@pytest.mark.long
def test_processes_clients_started_apart_and_three_kills_give_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    one = alone(tmp_path)
    assert any("left" in r["dropped"].values() for r in one.rounds())
    with Federation(tmp_path / "workers", **virtual(tmp_path)) as fed:
        fed.supervisor(2)
        fed.finish()
        assert fed.hashes() == one.hashes()
        assert reckoned(fed) == reckoned(one)
    crashes = [
        {"round": r, "kind": "server_crash", "at": at}
        for r, at in ((2, "spooling"), (3, "aggregating"), (5, "recording"))
    ]
    with Federation(tmp_path / "apart", **virtual(tmp_path, faults={"schedule": crashes})) as fed:
        for ids in ("3", "0,2", "1"):
            fed.client(ids)
        fed.server()
        fed.finish()
        assert fed.hashes() == one.hashes()
        assert reckoned(fed) == reckoned(one)
        assert sum(e["incarnation"] > 1 for e in fed.events("started")) == 3


@pytest.mark.long
def test_three_kills_in_an_hour_of_phones_give_the_bits_of_one_process(tmp_path: Path) -> None:
    changes = {
        "rounds": 1000,
        "clients": 60,
        "participation": 0.067,
        "data": {"samples": 600},
        "train": {"steps": 300, "batch_size": 4},
        "link": {"clock": "virtual", "trace": "wifi"},
        "availability": {"trace": "phones"},
        "devices": {"trace": "phones"},
        "evaluate": {"every": 0, "clients": "none"},
        "stop": {"seconds": 3600},
        "checkpoint": {"every": 5},
    }
    one = Federation(tmp_path / "alone", **changes)
    fednet.run(settings(**changes), out=one.out, in_process=True)
    second = [r["second"] for r in one.rounds()]
    assert len(second) > 20
    assert 3000 < second[-1] <= 3600  # an hour of it
    crashes = [
        {"round": r, "kind": "server_crash", "at": at}
        for r, at in ((4, "spooling"), (9, "aggregating"), (15, "recording"))
    ]
    with Federation(tmp_path / "killed", **changes, faults={"schedule": crashes}) as fed:
        fed.supervisor(2)
        fed.finish()
        assert fed.hashes() == one.hashes()
        assert reckoned(fed) == reckoned(one)
        assert sum(e["incarnation"] > 1 for e in fed.events("started")) == 3


@pytest.mark.long
def test_a_killed_client_does_not_change_who_was_there(tmp_path: Path) -> None:
    one = alone(tmp_path)
    with Federation(tmp_path / "killed", **virtual(tmp_path)) as fed:
        first = fed.client("0-3")
        fed.server()
        fed.until(lambda: len(fed.rounds()) >= 2)
        os.kill(first.pid, signal.SIGKILL)
        fed.client("0-3")
        assert fed.status() == 0, fed.output()
        assert fed.hashes() == one.hashes()


@pytest.mark.long
def test_on_the_real_clock_the_task_of_a_client_that_leaves_is_called_off(
    tmp_path: Path,
) -> None:
    """Its device would take ten minutes; it leaves after eight seconds, and the round ends."""
    trace, devices = tmp_path / "trace.csv", tmp_path / "devices.csv"
    trace.write_text("0,0,1000\n1,0,8\n2,0,1000\n3,0,0\n")
    devices.write_text("0,0\n1,60000\n2,0\n3,0\n")
    shape: dict[str, Any] = {
        "rounds": 2,
        "train": {"steps": 10},
        "availability": {"trace": str(trace)},
        "devices": {"trace": str(devices)},
    }
    with Federation(tmp_path / "real", **shape) as fed:
        fed.client("0-3")
        fed.server()
        fed.finish()
        first, second = fed.rounds()
        assert (first["selected"], first["completed"]) == ([0, 1, 2], [0, 2])
        assert first["dropped"] == {"1": "left"}
        assert second["selected"] == [0, 2]
        assert second["second"] >= 8
        (task,) = [
            row
            for row in fed.lines("wire.jsonl")
            if (row["round"], row["client"], row["type"]) == (1, 1, "task")
        ]
        assert (task["useful"], task["reason"]) == (False, "left")
        fed.check()


def test_a_run_on_the_real_clock_is_repeated_by_its_records(tmp_path: Path) -> None:
    """Who had left when its turn came depends on the machine; `faults.replay` forces what was."""
    trace = tmp_path / "trace.csv"
    trace.write_text("0,0,1000\n1,0,0.02\n1,0.5,1000\n2,0,1000\n3,0.1,1000\n")
    shape: dict[str, Any] = {"algorithm": "scaffold", "availability": {"trace": str(trace)}}
    made = []
    for name, more in (("first", {}), ("again", {"faults": {"replay": str(tmp_path / "first")}})):
        mapping = settings(name=name, **shape, **more)
        made.append(fednet.run(mapping, out=tmp_path, in_process=True))
    first, again = made
    assert [r.selected for r in again.rounds] == [r.selected for r in first.rounds]
    assert [r.completed for r in again.rounds] == [r.completed for r in first.rounds]
    assert [r.model_sha256 for r in again.rounds] == [r.model_sha256 for r in first.rounds]


@pytest.mark.slow
def test_the_real_clock_agrees_with_the_virtual_reckoning(tmp_path: Path) -> None:
    """On an idle machine within a fifth: what the virtual clock leaves out is the server's own work
    and the small messages.
    """
    devices = tmp_path / "devices.csv"
    devices.write_text("client,step_ms\n0,100\n1,150\n2,200\n3,250\n")
    shape: dict[str, Any] = {
        "train": {"steps": 20},
        "devices": {"trace": str(devices)},
        "link": {"up_mbps": 0.1, "down_mbps": 0.2, "latency_ms": 50},
    }
    spent = {}
    for clock in ("virtual", "real"):
        changes = {**shape, "link": {**shape["link"], "clock": clock}}
        with Federation(tmp_path / clock, **changes) as fed:
            for ids in "0123":
                fed.client(ids)
            fed.server()
            fed.finish()
            key = "seconds_virtual" if clock == "virtual" else "seconds"
            spent[clock] = sum(r[key] for r in fed.rounds()[1:])
    assert spent["real"] == pytest.approx(spent["virtual"], rel=0.2), spent

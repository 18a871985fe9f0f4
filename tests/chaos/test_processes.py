"""Processes die or are stopped: their tasks are given to others, they are started again, nothing is
left behind.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fednet.wire import messages as m
from tests.processes import Federation, crashes, planned, undisturbed

# The reply of client 1 in round 2 is kept back, once, so that there is a moment in which to kill.
# It changes no bit.
TRAIN: dict[str, Any] = {"algorithm": "scaffold", "train": {"epochs": 20}}
SLOW = {**TRAIN, "faults": planned("delay", seconds=2)}
LARGE: dict[str, Any] = {"algorithm": "scaffold", "model": {"name": "mlp", "hidden": [900, 900]}}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def busy(fed: Federation) -> int:
    """Wait until client 1 has its task of round 2; return the process that has it."""
    (fault,) = fed.until(lambda: fed.events("fault"))
    return next(int(e["pid"]) for e in fed.events("joined") if e["worker"] == fault["worker"])


def server_pid(fed: Federation) -> int:
    return int(json.loads((fed.path / "server.json").read_text())["pid"])


def run(out: Path, workers: int = 2, **changes: Any) -> Federation:
    """Start `fednet run`, and wait until client 1 is busy in round 2."""
    fed = Federation(out, **{**SLOW, **changes})
    fed.supervisor(workers)
    busy(fed)
    return fed


def ended_well(fed: Federation, killed: int = 0) -> None:
    assert fed.status() == 0, fed.output()
    assert fed.hashes() == undisturbed(**TRAIN)
    fed.check(killed)


def test_a_killed_worker_is_started_again_and_its_large_task_given_to_another(tmp_path):
    """Each client's payload is on record, and the totals are the kernel's. A message to a broken
    connection is recorded in full, as lost, of which the kernel may have sent a part.
    """
    with run(tmp_path, **LARGE, train={}) as fed:
        os.kill(busy(fed), signal.SIGKILL)
        assert fed.status() == 0
        assert fed.hashes() == undisturbed(**LARGE)
        assert len({e["pid"] for e in fed.events("joined")}) == 3
        fed.check(killed=1)
        assert all(r["useful"] == r["predicted"] for r in fed.rounds())
        rows = fed.lines("wire.jsonl")
        last = fed.events("kernel")[-1]
        lost = sum(r["bytes"] for r in rows if r.get("lost"))
        assert last["received"] == last["booked_up"]
        assert 0 <= last["booked_down"] - last["sent"] <= lost
        up = [r for r in rows if r["direction"] == "up" and r["useful"]]
        # Four replies in each of three rounds, of over 4 MiB: in parts.
        assert sum(sum(r["kinds"].values()) for r in up) > 12 * m.PART


def test_a_killed_server_is_started_again_by_fednet_run(tmp_path):
    with run(tmp_path) as fed:
        os.kill(server_pid(fed), signal.SIGKILL)
        ended_well(fed)
        assert [e["incarnation"] for e in fed.events("started")] == [1, 2]


def test_the_death_of_fednet_run_itself_ends_its_processes(tmp_path):
    with run(tmp_path) as fed:
        pids = {server_pid(fed), *(e["pid"] for e in fed.events("joined"))}
        fed.lose(fed.last)
        fed.until(lambda: not any(alive(pid) for pid in pids))
        fed.supervisor(resume=True)
        ended_well(fed, killed=2)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 4), (signal.SIGINT, 130)])
def test_a_signal_stops_cleanly_and_resume_finishes_with_the_same_bits(tmp_path, number, status):
    with run(tmp_path) as fed:
        pids = {server_pid(fed), *(e["pid"] for e in fed.events("joined"))}
        began = time.monotonic()
        os.kill(fed.last.pid, number)
        assert fed.status() == status
        assert time.monotonic() - began < 10  # what is promised, not what it takes
        assert not any(alive(pid) for pid in pids)
        assert "continue with --resume" in fed.output()
        assert len(fed.rounds()) < 3
        fed.supervisor(1, resume=True)
        ended_well(fed)


def test_until_stops_with_status_4_and_a_finished_run_resumes_to_nothing(tmp_path):
    with Federation(tmp_path, **TRAIN, faults=planned("delay", seconds=6)) as fed:
        fed.supervisor(2, "--until", "4s", resume=True)  # there is no checkpoint yet: it starts
        assert fed.status() == 4
        fed.supervisor(resume=True)
        ended_well(fed)
        started = len(fed.events("started"))
        fed.supervisor(resume=True)
        ended_well(fed)
        assert len(fed.events("started")) == started


def test_a_killed_client_joins_again_with_its_state_and_gets_its_task_again(tmp_path):
    with Federation(tmp_path, **SLOW, round={"lost": {"closed": 20}}) as fed:
        one = fed.client("0-1")
        fed.begin("2-3")
        assert busy(fed) == one.pid
        fed.lose(one)
        fed.client("0-1")
        ended_well(fed, killed=1)
        assert fed.completed() == [[0, 1, 2, 3]] * 3


def test_a_restarted_server_uses_what_was_trained_while_it_was_away(tmp_path):
    with Federation(tmp_path, **SLOW) as fed:
        fed.begin("0-3")
        busy(fed)
        fed.lose(fed.last)
        fed.server(resume=True)
        ended_well(fed)
        assert [(r["attempt"], r["useful"]) for r in fed.replies(1)] == [(0, True)]


def test_a_server_whose_clients_are_all_gone_waits_for_one_to_come_back(tmp_path):
    rules = {"join": None, "lost": {"closed": 0.2}}
    with Federation(tmp_path, rounds=30, round=rules) as fed:
        one = fed.client("0-3")
        fed.server()
        fed.until(fed.rounds)
        one.kill()

        def waits() -> bool:
            assert fed.last.poll() is None, fed.last.said()
            status = json.loads((fed.path / "status.json").read_text())
            return bool(status.get("missing") == [[0, 3]])

        fed.until(waits)
        fed.client("0-3")
        assert fed.status() == 0
        assert sum(r["void"] for r in fed.rounds()) <= 2
        assert len(fed.rounds()) == 30


@pytest.mark.timeout(120)
def test_two_processes_with_states_of_their_own_share_the_clients(tmp_path):
    """A task goes to the process that has the state from which it starts."""
    with Federation(tmp_path, algorithm="scaffold", clients=5) as fed:
        fed.server()
        for name in ("a", "b"):
            fed.client("0-3", state=tmp_path / name)
        fed.until(lambda: len(fed.events("ready")) == 2)
        fed.client("4")  # the first round waits for all clients, and so for both
        fed.finish()
    assert fed.hashes() == undisturbed(algorithm="scaffold", clients=5)
    assert [r["dropped"] for r in fed.rounds()] == [{}] * 3
    evaluated = [c["client"] for c in fed.lines("clients.jsonl") if c.get("final")]
    assert evaluated == [0, 1, 2, 3, 4]


def test_events_of_connections_to_a_resumed_server_are_of_the_last_completed_round(tmp_path):
    """Without `round.join` the server waits for them before it opens a round."""
    changes = {
        "rounds": 4,
        "round": {"join": None},
        "stop": {"megabytes": 1000},  # so no round opens before the one before it is recorded
        "faults": crashes((3, "broadcasting")),
    }
    with Federation(tmp_path, **changes) as fed:
        fed.begin("0-3")
        fed.finish()
        events = fed.events()
    _, second = [i for i, event in enumerate(events) if event["type"] == "started"]
    connected = [
        [e["round"] for e in part if e["type"] in ("joined", "rejoined", "ready")]
        for part in (events[:second], events[second:])
    ]
    assert connected == [[0, 0], [2, 2]]

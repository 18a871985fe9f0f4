"""Processes die or are asked to stop: their tasks are given on, they are started anew, nothing is
left behind.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.federation import Federation

# Each run has a moment that lasts: the reply of client 1 in round 2 is kept back, once. It changes
# no bit.
SLOW = {
    "train": {"epochs": 20},
    "faults": {"schedule": [{"round": 2, "client": 1, "kind": "delay", "seconds": 4}]},
}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False


def busy(fed: Federation) -> int:
    """Waits until client 1 has been handed its task of round 2; returns the process that has it."""
    (fault,) = fed.until(lambda: fed.events("fault"))
    return next(int(e["pid"]) for e in fed.events("joined") if e["worker"] == fault["worker"])


def server_pid(fed: Federation) -> int:
    return int(json.loads((fed.path / "server.json").read_text())["pid"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    with Federation(
        tmp_path_factory.mktemp("calm"), algorithm="scaffold", train=SLOW["train"]
    ) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
    return fed


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_killed_in_training_is_started_anew_and_its_task_given_on(
    tmp_path: Path, calm: Federation, workers: int
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW, round={"lost": {"closed": 3}}) as fed:
        fed.supervisor(workers=workers)
        os.kill(busy(fed), signal.SIGKILL)
        assert fed.status() == 0
        assert len({e["pid"] for e in fed.events("joined")}) == workers + 1
        assert fed.hashes() == calm.hashes()
        fed.check(killed=1)


def test_a_client_killed_in_training_rejoins_with_its_state_and_gets_its_task_again(
    tmp_path: Path, calm: Federation
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW, round={"lost": {"closed": 20}}) as fed:
        fed.server()
        one = fed.client("0-1")
        fed.client("2-3")
        assert busy(fed) == one.pid
        fed.lose(one)
        fed.client("0-1")
        fed.finish()
        assert [r["completed"] for r in fed.rounds()] == [[0, 1, 2, 3]] * 3
        assert fed.hashes() == calm.hashes()


@pytest.mark.parametrize("mode", ["sync", "semi-sync"])
def test_a_server_whose_clients_are_all_gone_waits_for_one_to_come_back(
    tmp_path: Path, mode: str
) -> None:
    rules = {"join": None, "lost": {"closed": 0.2}}
    schedule = {"mode": mode} | ({"every": 0.5} if mode == "semi-sync" else {})
    algorithm = "fedavg" if mode == "sync" else "fedbuff"
    with Federation(
        tmp_path, algorithm=algorithm, rounds=30, round=rules, schedule=schedule
    ) as fed:
        fed.server()
        one = fed.client("0-3")
        fed.until(lambda: fed.rounds())
        one.kill()
        missing = [[0, 3]]

        def waits() -> bool:
            assert fed.last.returncode is None, fed.last.said()
            return json.loads((fed.path / "status.json").read_text()).get("missing") == missing

        fed.until(waits)
        fed.client("0-3")
        assert fed.status() == 0
        assert sum(r["void"] for r in fed.rounds()) <= 2
        assert len(fed.rounds()) == 30


def test_a_server_killed_under_fednet_run_is_started_anew(tmp_path: Path, calm: Federation) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW) as fed:
        fed.supervisor(workers=2)
        busy(fed)
        os.kill(server_pid(fed), signal.SIGKILL)
        assert fed.status() == 0
        assert [e["incarnation"] for e in fed.events("started")] == [1, 2]
        assert len(fed.events("first_task")) == 2
        assert fed.hashes() == calm.hashes()
        fed.check()


def test_a_restarted_server_uses_what_was_trained_while_it_was_away(
    tmp_path: Path, calm: Federation
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW) as fed:
        fed.client("0-3")
        fed.server()
        busy(fed)
        fed.last.kill()
        fed.status()
        fed.server(resume=True)
        fed.finish()
        assert fed.hashes() == calm.hashes()
        fed.check()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 4),
        pytest.param(signal.SIGUSR1, 4, marks=pytest.mark.slow),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_stops_cleanly_and_resume_finishes_with_the_same_bits(
    tmp_path: Path, calm: Federation, number: int, status: int
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW) as fed:
        fed.supervisor(workers=2)
        busy(fed)
        pids = {server_pid(fed), *(e["pid"] for e in fed.events("joined"))}
        began = time.monotonic()
        os.kill(fed.last.pid, number)
        assert fed.status() == status
        assert time.monotonic() - began < 10  # what is promised, not what it takes
        assert not any(alive(pid) for pid in pids)
        assert "go on with --resume" in fed.output()
        assert len(fed.rounds()) < 3
        fed.supervisor(workers=1, resume=True)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        fed.check()


def test_until_stops_with_status_4_and_a_finished_run_resumes_to_nothing(
    tmp_path: Path, calm: Federation
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW) as fed:
        fed.supervisor(resume=True, until_s=3.0)  # there is no checkpoint yet: it starts
        assert fed.status() == 4
        fed.supervisor(resume=True)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        started = len(fed.events("started"))
        fed.supervisor(resume=True)
        assert fed.status() == 0
        assert len(fed.events("started")) == started


def test_the_death_of_fednet_run_itself_takes_its_processes_along(
    tmp_path: Path, calm: Federation
) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW) as fed:
        fed.supervisor(workers=2)
        busy(fed)
        pids = {server_pid(fed), *(e["pid"] for e in fed.events("joined"))}
        fed.last.kill()
        fed.status()
        fed.until(lambda: not any(alive(pid) for pid in pids))
        fed.supervisor(resume=True)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()


def test_where_memory_runs_out_a_worker_goes_first_then_the_server_and_fednet_run_last(
    tmp_path: Path,
) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    with Federation(tmp_path, algorithm="fedavg", **SLOW) as fed:
        process = fed.supervisor(workers=1)
        worker, before = busy(fed), score(os.getpid())
        scores = [score(process.pid), score(server_pid(fed)), score(worker)]
    assert scores == [before, min(1000, before + 250), min(1000, before + 500)]


def test_more_rounds_are_added_to_a_finished_run(tmp_path: Path, calm: Federation) -> None:
    with Federation(tmp_path, algorithm="scaffold", **SLOW, rounds=2) as fed:
        fed.supervisor()
        assert fed.status() == 0
        fed.supervisor(resume=True, rounds=3)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()


def test_what_a_resume_may_not_change_is_listed(tmp_path: Path) -> None:
    with Federation(tmp_path, algorithm="fedavg", rounds=1) as fed:
        fed.supervisor()
        assert fed.status() == 0
        fed.supervisor(
            resume=True, seed=1, train={"epochs": 2, "batch_size": 16, "lr": 0.05}, rounds=2
        )
        assert fed.status() == 2
        assert "--resume: seed, train.epochs differ" in fed.output()

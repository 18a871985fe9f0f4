"""A model whose payloads cross in parts: they lie in memory that the processes of a run share, once
for all clients of a process. Whoever is killed, the bits are the same and no memory is left.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fednet.files import read_lines
from tests.chaos.test_processes import SLOW, alive, busy, server_pid
from tests.federation import Federation
from tests.processes import ROOT

BIG = {"model": {"name": "mlp", "hidden": [512, 512]}, "algorithm": "scaffold"}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    with Federation(tmp_path_factory.mktemp("calm"), **BIG, link={"transport": "tcp"}) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
    assert not any("local" in row for row in fed.lines("wire.jsonl"))
    return fed


def accounted(fed: Federation) -> None:
    """The books have each client's payload, say what lay in memory, and agree with the kernel."""
    for record in fed.rounds():
        assert record["useful"] == record["predicted"]
    (*_, last) = fed.events("kernel")
    if len(fed.events("started")) == 1:  # the next also books what the one that was killed had sent
        assert (last["sent"], last["received"]) == (last["booked_down"], last["booked_up"])
    down = [r for r in fed.lines("wire.jsonl") if r["direction"] == "down" and r["useful"]]
    assert any("shared" in row for row in down)
    assert any(row.get("local", 0) > 1 << 20 for row in down)
    assert not (fed.path / "checkpoint" / "uploads").exists()


def test_calm_runs_have_the_same_bits_and_costs_by_memory_and_by_tcp(
    tmp_path: Path, calm: Federation
) -> None:
    with Federation(tmp_path, **BIG) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
    assert fed.hashes() == calm.hashes()
    accounted(fed)
    # replies are not asked for in parts: they lie in files that the server reads
    pulls = [r for r in fed.lines("wire.jsonl") if r["type"] == "pull"]
    assert pulls
    assert all(r["direction"] == "up" for r in pulls)
    for one, other in zip(fed.rounds(), calm.rounds()):
        assert one["useful"] == other["useful"]
        assert one["bytes_down"] < one["bytes_down_per_client"]
        # references and heartbeats apart
        assert abs(one["bytes_down_per_client"] / other["bytes_down_per_client"] - 1) < 1e-3


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_process_killed_amid_payloads_changes_no_bit(
    tmp_path: Path, calm: Federation, who: str
) -> None:
    with Federation(tmp_path, **BIG, faults=SLOW["faults"]) as fed:
        fed.supervisor(workers=2)
        worker = busy(fed)
        os.kill(worker if who == "worker" else server_pid(fed), signal.SIGKILL)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        fed.check(killed=1)
        accounted(fed)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["broadcasting", "spooling", "receiving", "aggregating"])
def test_a_server_killed_at_each_point_changes_no_bit(
    tmp_path: Path, calm: Federation, at: str
) -> None:
    plan = {"schedule": [{"round": 2, "kind": "server_crash", "at": at}]}
    with Federation(tmp_path, **BIG, faults=plan) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        fed.check()
        accounted(fed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["drop_during_upload", "corrupt", "duplicate", "disconnect"])
def test_planned_faults_strike_payloads_in_memory_as_on_the_wire(tmp_path: Path, kind: str) -> None:
    plan = {"schedule": [{"round": 2, "client": 1, "kind": kind}]}
    found = []
    for transport in ("memory", "tcp"):
        with Federation(
            tmp_path / transport, **BIG, faults=plan, link={"transport": transport}
        ) as fed:
            fed.supervisor(workers=2)
            assert fed.status() == 0
            found.append((fed.hashes(), fed.faults(), [r["completed"] for r in fed.rounds()]))
    assert found[0] == found[1]


def test_when_all_are_killed_their_memory_goes_and_a_resume_has_the_same_bits(
    tmp_path: Path, calm: Federation
) -> None:
    there = set(os.listdir("/dev/shm"))
    with Federation(tmp_path, **BIG, faults=SLOW["faults"]) as fed:
        fed.supervisor(workers=2)
        busy(fed)
        pids = {server_pid(fed), *(e["pid"] for e in fed.events("joined"))}
        assert set(os.listdir("/dev/shm")) <= there  # it has no name
        os.kill(fed.last.pid, signal.SIGKILL)
        fed.until(lambda: not any(alive(pid) for pid in pids))
        fed.all.remove(fed.last)
        fed.supervisor(workers=2, resume=True)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        accounted(fed)


def test_servers_that_are_killed_leave_the_memory_to_the_next(
    tmp_path: Path, calm: Federation
) -> None:
    """What a dead server held, or had sent, counts as free again: the last round's payloads lie in
    memory as the first's do.
    """
    crashes = [
        {"round": round, "kind": "server_crash", "at": at}
        for round in (1, 2, 3)
        for at in ("broadcasting", "receiving")
    ]
    with Federation(tmp_path, **BIG, faults={"schedule": crashes}) as fed:
        fed.supervisor(workers=2)
        assert fed.status() == 0
        assert fed.hashes() == calm.hashes()
        assert len(fed.events("started")) > 3
        last = [r for r in fed.lines("wire.jsonl") if r["round"] == 3 and r["useful"]]
        up = [r for r in last if r["type"] == "reply"]
        assert len(up) == 4
        assert all(r["local"] > 0.9 * sum(r["kinds"].values()) for r in up)


def namespace() -> list[str] | None:
    """The words that run a command with mounts of its own; None where that may not be."""
    tried = (["unshare", "-m"], ["unshare", "-rm"])
    small = "mount -t tmpfs -o size=4k small /dev/shm"
    for words in tried if shutil.which("unshare") else ():
        if not subprocess.run([*words, "sh", "-c", small], capture_output=True).returncode:
            return [*words, "sh", "-c", f'{small}; yes > /dev/shm/full; exec "$0" "$@"']
    return None


def test_a_full_dev_shm_is_no_matter(tmp_path: Path, calm: Federation) -> None:
    if (words := namespace()) is None:
        pytest.skip("no mounts can be made here")
    mapping = {**calm.mapping, "link": {}}
    (tmp_path / "config.yaml").write_text(json.dumps(mapping))
    run = [sys.executable, "-m", "fednet.cli.main", "run", "config.yaml", "--out", "."]
    done = subprocess.run(
        [*words, *run, "--workers", "2", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rounds = list(read_lines(tmp_path / "run" / "rounds.jsonl"))
    assert [r["model_sha256"] for r in rounds] == [r["model_sha256"] for r in calm.rounds()]
    assert any(r.get("local", 0) > 1 << 20 for r in read_lines(tmp_path / "run" / "wire.jsonl"))

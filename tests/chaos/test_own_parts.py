"""Methods of a user's own that end their process, under `fednet run`: the client that does so fails
with the reason, the others continue, and the run ends by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednet.protocol.tasks import DEATHS
from tests.processes import Federation

pytestmark = pytest.mark.timeout(180)
METHOD = """
import ctypes, os, signal, threading, time
import fednet
from fednet.algorithms.fedavg import FedAvg

@fednet.algorithm("deadly")
class Deadly(FedAvg):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        if threading.current_thread().name.startswith("fednet-train"):
            {early}

    def client_update(self, phase, client, down, host):
        if host.client_id == 1 and host.round == 1:
            {at_a_task}
        return super().client_update(phase, client, down, host)
"""
# Closes all sockets of the process: libzmq aborts it. Not before the reply of the client that this
# worker trained last has left, or that one is thought to be at work.
CLOSED = "time.sleep(0.2); os.closerange(3, 4096)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
# Holds the interpreter: the connection stays open, and nothing more is said over it.
MUTE = "ctypes.PyDLL(None).sleep(1000)"
LOST = f"failed: its worker was lost {DEATHS} times at this task"


def run(
    tmp_path: Path, workers: int, early: str = "pass", at_a_task: str = "pass", **changes: Any
) -> Federation:
    file = tmp_path / "deadly.py"
    file.write_text(METHOD.format(early=early, at_a_task=at_a_task))
    with Federation(tmp_path, algorithm="deadly", rounds=2, **changes) as fed:
        fed.supervisor(workers, "--load", file)
        fed.status()
    return fed


@pytest.mark.parametrize(("end", "workers"), [(CLOSED, 1), (KILLED, 2)], ids=["closed", "killed"])
def test_a_client_that_ends_its_worker_fails_and_the_others_continue(tmp_path, end, workers):
    fed = run(tmp_path, workers, at_a_task=end)
    assert fed.status() == 0, fed.output()
    assert [r["dropped"] for r in fed.rounds()] == [{"1": LOST}, {}]


@pytest.mark.slow
def test_a_worker_that_lives_and_says_nothing_is_ended_and_started_again(tmp_path):
    fed = run(tmp_path, 2, at_a_task=MUTE, round={"lost": {"closed": 1.0, "silent": 1.5}})
    assert fed.status() == 0, fed.output()
    assert [r["dropped"] for r in fed.rounds()] == [{"1": LOST}, {}]
    mute = [e["pid"] for e in fed.events("away") if e["why"] == "silent"]
    assert len(set(mute)) >= DEATHS


@pytest.mark.parametrize(
    ("end", "why"), [(KILLED, "by SIGKILL"), ("os._exit(3)", "with status 3")], ids=["kill", "exit"]
)
def test_workers_that_end_before_they_are_ready_end_the_run(tmp_path, end, why):
    fed = run(tmp_path, 2, early=end)
    assert fed.status() == 3, fed.output()
    assert f"workers keep ending {why}" in fed.output()
    assert fed.rounds() == []
    if end != KILLED:  # each is tried twice: the fourth to end is the last
        assert len(list(tmp_path.rglob("worker-*.log"))) == 5

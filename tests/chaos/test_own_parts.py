"""Methods of a user's own that take their process with them, under `fednet run`: the client that
does so fails with the reason, the others go on, and the run ends by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednet.protocol.tasks import DEATHS
from tests.federation import Federation

HEAD = """
import ctypes, os, signal, threading
import fednet
from fednet.algorithms.fedavg import FedAvg

@fednet.algorithm("deadly")
class Deadly(FedAvg):
"""
AT_A_TASK = (
    HEAD
    + """
    def client_update(self, phase, client, down, host):
        if host.client_id == 1 and host.round == 1:
            {end}
        return super().client_update(phase, client, down, host)
"""
)
# All sockets of the process among them: libzmq aborts it.
CLOSED = "os.closerange(3, 4096)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
# Holds the interpreter: the connection stands, and nothing more is said over it.
MUTE = "ctypes.PyDLL(None).sleep(1000)"
EARLY = (
    HEAD
    + """
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        if threading.current_thread().name.startswith("fednet-train"):
            {end}
"""
)


def run(tmp_path: Path, text: str, workers: int, **changes: Any) -> tuple[int, Federation]:
    (tmp_path / "deadly.py").write_text(text)
    own = {"algorithm": "deadly", "load": [str(tmp_path / "deadly.py")], "rounds": 2}
    with Federation(tmp_path, **own, **changes) as fed:
        fed.supervisor(workers)
        return fed.status(), fed


def dropped(fed: Federation) -> list[dict[str, Any]]:
    return [r["dropped"] for r in fed.rounds()]


LOST = f"failed: its worker was lost {DEATHS} times at this task"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("end", [CLOSED, KILLED], ids=["closed", "killed"])
def test_a_client_that_ends_its_worker_fails_and_the_others_go_on(tmp_path, end, workers):
    status, fed = run(tmp_path, AT_A_TASK.format(end=end), workers)
    assert status == 0, fed.output()
    assert dropped(fed) == [{"1": LOST}, {}]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_worker_that_lives_and_says_nothing_is_ended_and_started_anew(tmp_path):
    soon = {"lost": {"closed": 1.0, "silent": 1.5}}
    status, fed = run(tmp_path, AT_A_TASK.format(end=MUTE), 2, round=soon)
    assert status == 0, fed.output()
    assert dropped(fed) == [{"1": LOST}, {}]
    mute = [e["pid"] for e in fed.events("away") if e["why"] == "silent"]
    assert len(set(mute)) >= DEATHS


@pytest.mark.timeout(120)
def test_workers_that_die_before_they_are_ready_end_the_run(tmp_path):
    status, fed = run(tmp_path, EARLY.format(end=KILLED), 2)
    assert status == 3, fed.output()
    assert "workers keep ending by SIGKILL" in fed.output()
    assert fed.rounds() == []


@pytest.mark.timeout(120)
def test_workers_that_end_by_themselves_before_they_are_ready_are_tried_twice_each(tmp_path):
    status, fed = run(tmp_path, EARLY.format(end="os._exit(3)"), 2)
    assert status == 3, fed.output()
    assert "workers keep ending with status 3" in fed.output()
    assert len(list(tmp_path.rglob("worker-*.log"))) == 5  # the fourth to end is the last

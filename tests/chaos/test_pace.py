"""Rounds a second of a server before and while a peer does its worst, in one run: at half pace or
better.

    FEDNET_ATTACK_S=30 pytest tests/chaos/test_pace.py -m slow -s     prints the table
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fednet.client import join
from fednet.launch.parent import die_with_parent
from tests.chaos.attackers import ATTACKS
from tests.processes import ROOT, Processes, lines, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SECONDS = float(os.environ.get("FEDNET_ATTACK_S", "5"))
SETS = (
    "clients=4",
    "rounds=1000000",
    "model={name: mlp, hidden: [64]}",
    "evaluate={every: 0, clients: none}",
    "train.batch_size=10",
)


def pace(rounds: Path, seconds: float) -> float:
    """Rounds a second, from now on."""
    with rounds.open("rb") as file:
        file.seek(0, os.SEEK_END)
        began = time.monotonic()
        time.sleep(seconds)
        found = file.read().count(b"\n")
        return found / (time.monotonic() - began)


def resident(pid: int) -> float:
    """Megabytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def size(folder: Path) -> float:
    return sum(p.stat().st_size for p in folder.glob("*.jsonl")) / 1e6


@pytest.mark.timeout(600)
def test_rounds_go_on_at_half_pace_or_better_whatever_a_peer_does(tmp_path):
    rows = []
    with Processes(tmp_path) as started:
        server = started.server(sets=SETS)
        worker = started.client("0-3")
        rounds = tmp_path / "run" / "rounds.jsonl"
        until(lambda: len(lines(rounds)) >= 5, "five rounds in peace", server, worker)
        found = join.read_server(tmp_path / "run")
        assert found is not None
        for attack in ATTACKS:
            time.sleep(2.0)  # what the one before has left is over
            before, held, disk = pace(rounds, SECONDS), resident(server.pid), size(rounds.parent)
            peer = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.attackers", attack, found[0]],
                cwd=ROOT,
                preexec_fn=die_with_parent,
            )
            try:
                time.sleep(1.5)  # it is starting
                during = pace(rounds, SECONDS)
                assert peer.poll() is None
                assert server.poll() is None, server.said()
            finally:
                peer.kill()
                peer.wait()
            more = size(rounds.parent) - disk
            rows.append((attack, before, during, resident(server.pid) - held, more))
            print(
                f"{attack:10s} {before:6.1f} rounds/s before, {during:6.1f} during "
                f"({during / before:4.0%}); {rows[-1][3]:+6.1f} MB memory, {more:6.2f} MB books",
                flush=True,
            )
    assert all(during >= before / 2 for _, before, during, _, _ in rows), rows

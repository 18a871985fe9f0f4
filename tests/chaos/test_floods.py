"""A server without keys while a peer does its worst: it lives, its memory is bounded, rounds go on
at whatever pace, and honest clients are let in.

    pytest tests/chaos/test_floods.py -m slow -s     prints what each attack takes of memory
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fednet.client import join
from fednet.launch.parent import die_with_parent
from tests.chaos.attackers import ATTACKS
from tests.chaos.test_memory import memory
from tests.processes import ROOT, Processes, lines, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SETS = (
    "clients=4",
    "rounds=1000000",
    "model={name: mlp, hidden: [64]}",
    "evaluate={every: 0, clients: none}",
    "train.batch_size=10",
)
MOST_MB = 256
"""What all of these attacks together add to the server's peak: the figure in SECURITY.md."""


@pytest.mark.timeout(600)
def test_a_server_lives_through_each_flood_and_lets_honest_clients_in(tmp_path: Path) -> None:
    rounds = tmp_path / "run" / "rounds.jsonl"
    with Processes(tmp_path) as started:
        server = started.server(sets=SETS)
        worker = started.client("0-3")
        until(lambda: len(lines(rounds)) >= 5, "five rounds in peace", server, worker)
        found = join.read_server(tmp_path / "run")
        assert found is not None
        calm = memory(server.pid, "VmHWM")
        for attack in ATTACKS:
            before = len(lines(rounds))
            peer = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.attackers", attack, found[0]],
                cwd=ROOT,
                preexec_fn=die_with_parent,
                stdout=subprocess.PIPE,
            )
            try:
                assert peer.stdout is not None
                peer.stdout.readline()  # it is under way
                until(lambda n=before: len(lines(rounds)) >= n + 5, f"rounds, {attack}", server)
                worker.kill()
                worker.wait()
                worker = started.client("0-3")
                before = len(lines(rounds))
                until(lambda n=before: len(lines(rounds)) >= n + 5, f"let in, {attack}", server)
                assert peer.poll() is None
            finally:
                peer.kill()
                peer.wait()
            more = (memory(server.pid, "VmHWM") - calm) / 1e6
            print(f"{attack:10s} {more:6.1f} MB above the peak in peace", flush=True)
        assert more < MOST_MB

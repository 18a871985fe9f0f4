"""Ctrl-C while a user's own part does not end."""

from __future__ import annotations

import signal
import time

import pytest

from fednet.server.watch import TOGETHER_S
from tests.processes import Processes, until

HANGS = """
import time
from fednet.algorithms.fedavg import FedAvg
from fednet.registry import algorithm

@algorithm("hangs")
class Hangs(FedAvg):
    def server_update(self, *args):
        print("hanging", flush=True)
        while True:
            time.sleep(0.05)
"""


@pytest.mark.timeout(120)
def test_a_finish_that_hangs_ends_at_the_third_ctrl_c(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    data = "data={dataset: synthetic, samples: 40, shape: [4], classes: 2}"
    sets = ("algorithm=hangs", "clients=2", "model={name: mlp, hidden: [4]}", data)
    words = [w for s in sets for w in ("--set", s)]
    with Processes(tmp_path) as started:
        more = ("--load", "hangs.py", "--out", "runs", "--device", "cpu")
        run = started.start("main", "run", "--in-process", *words, *more)
        until(lambda: "hanging" in run.said(), "the method is at its last step", run)
        for _ in range(3):
            assert run.poll() is None
            run.send_signal(signal.SIGINT)
            time.sleep(2 * TOGETHER_S)  # two presses, not one
        assert run.wait(60) == 130

"""Ctrl-C while a user's own part does not end."""

from __future__ import annotations

import signal
import time

import pytest

from fednet.server.watch import TOGETHER_S, third_press_kills
from tests.processes import Processes, until


def test_the_third_press_of_ctrl_c_ends_what_does_not_end(monkeypatch):
    asked = []
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    on = third_press_kills(lambda number, frame: asked.append(number))
    try:
        for press in range(2):
            now[0] += 1.0
            on(signal.SIGINT, None)
            now[0] += TOGETHER_S / 2
            on(signal.SIGINT, None)  # the same press, passed on
            assert len(asked) == 2 * (press + 1)
        on(signal.SIGTERM, None)
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            on(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before)


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

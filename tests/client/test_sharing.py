"""A client process with two devices and several clients at work on each, of which some run out of
memory: the same bits.

No GPU: the devices are the processor twice over, with made-up memory.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import torch

from fednet.client import join
from fednet.client.policy import Policy
from fednet.client.worker import Worker
from fednet.experiment import placement
from tests.chaos.mallory import LIMIT_S
from tests.chaos.test_hostile import CONFIG, in_thread, serve
from tests.client.test_slots import Fake


@pytest.mark.timeout(120)
def test_clients_that_do_not_fit_wait_and_the_bits_are_the_same(tmp_path, monkeypatch):
    alone = serve(tmp_path / "alone", None)
    monkeypatch.setattr(placement, "place", lambda device: ["cpu", "cpu"])
    # Room for four, says the first; there is none for two.
    monkeypatch.setattr(join, "memory_of", lambda device, share: Fake(100, 20))
    work, changed, at_work, done, short = (
        Worker.work,
        threading.Condition(),
        Counter(),
        Counter(),
        [],
    )

    def crowded(self, task, body, step):
        with changed:
            at_work[self] += 1
            changed.notify_all()
            # Both have been measured: four tasks at once, so two at one device.
            if task.key.round >= 3 and not short:
                changed.wait_for(lambda: short or sum(at_work.values()) == CONFIG["clients"], 10.0)
            full = at_work[self] > 1
            if full:
                short.append(task.key)
                changed.notify_all()
        try:
            if full:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return work(self, task, body, step)
        finally:
            with changed:
                at_work[self] -= 1
                done[self] += 1

    monkeypatch.setattr(Worker, "work", crowded)
    directory = tmp_path / "shared"
    server, served = in_thread(lambda: serve(directory, "tcp://127.0.0.1:*"))
    limit = time.monotonic() + LIMIT_S
    while join.read_server(directory) is None:
        assert server.is_alive(), served
        assert time.monotonic() < limit
        time.sleep(0.01)
    ended = join.main("0-3", Policy(), run=directory, device="auto", state=directory / "state")
    server.join(LIMIT_S)
    assert ended == 0
    assert served["result"]["model_sha256"] == alone["model_sha256"]
    assert len(done) == 2  # both devices were used
    assert short  # and more were tried at once than fit

"""How many threads train clients in a run in one process, and that nothing of the run says so."""

from __future__ import annotations

import threading

import pytest

from fednet.client import slots
from fednet.client.worker import Worker
from fednet.experiment import placement
from fednet.launch import in_process
from tests.processes import lines
from tests.rooms import hashes, run, small

STEPS = 8  # of a client in a round


def test_threads_change_no_bit_and_no_row_of_a_run(tmp_path, monkeypatch):
    """Each client trains beside another one, and may be done before it."""
    changes = {"rounds": 4, "clients": 6, "data": {"samples": 6 * 8 * STEPS}}
    monkeypatch.setattr(placement, "cores", lambda: 1)
    one = run(tmp_path / "one", **changes)
    monkeypatch.setattr(placement, "cores", lambda: 3)
    monkeypatch.setattr(slots, "STEP_S", 0.0)
    work = Worker.work
    threads = set()

    def noted(*args, **more):
        threads.add(threading.current_thread().name)
        return work(*args, **more)

    monkeypatch.setattr(Worker, "work", noted)
    several = run(tmp_path / "several", **changes)
    assert len(threads) > 2
    assert hashes(several) == hashes(one)
    assert lines(several / "wire.jsonl") == lines(one / "wire.jsonl")


@pytest.mark.parametrize(
    ("changes", "device", "workers", "threads"),
    [
        ({}, "cpu", None, 3),  # no more than clients
        ({"clients": 10}, "cpu", None, 8),
        ({"clients": 10}, "cpu", 2, 2),
        ({"clients": 10, "train": {"threads": 4}}, "cpu", None, 2),
        ({"train": {"threads": 9}}, "cpu", None, 1),
        ({}, "cuda:0", None, 1),
        ({"train": {"pack": 2}}, "cpu", None, 1),
        ({"clients": 10, "participation": 0.5, "round": {"ask": 1.5}}, "cpu", None, 1),
        ({"availability": {"model": "bernoulli", "p": 0.5}}, "cpu", None, 1),
    ],
)
def test_there_is_a_thread_for_each_core_where_every_reply_is_waited_for(
    monkeypatch, changes, device, workers, threads
):
    monkeypatch.setattr(placement, "cores", lambda: 8)
    assert in_process.training_threads(small(**changes), device, workers) == threads

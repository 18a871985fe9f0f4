"""Which devices and how many workers."""

from __future__ import annotations

import os

import pytest

from fednet.engine import placement
from fednet.errors import ConfigError


def test_one_worker_a_core_but_at_most_one_a_client(monkeypatch):
    monkeypatch.setattr(placement, "cores", lambda: 4)
    assert placement.workers(None, ["cpu"], 10) == ["cpu"] * 4
    assert placement.workers(None, ["cpu"], 3) == ["cpu"] * 3


def test_one_worker_a_gpu_and_more_are_dealt_round_robin():
    assert placement.workers(None, ["cuda:0", "cuda:2"], 10) == ["cuda:0", "cuda:2"]
    assert placement.workers(3, ["cuda:0", "cuda:2"], 10) == ["cuda:0", "cuda:2", "cuda:0"]


def test_cores_obeys_what_slurm_granted(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert placement.cores() == 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "100000")
    assert placement.cores() <= (os.cpu_count() or 1)


def test_cpu_is_placed_without_asking_torch():
    assert placement.place("cpu") == ["cpu"]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:a", "cuda:0,"])
def test_an_unknown_device_names_what_is_allowed(device):
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda"):
        placement.place(device)


def test_a_gpu_that_is_not_there_is_said(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert placement.place("cuda") == ["cuda:0", "cuda:1"]
    assert placement.place("cuda:1") == ["cuda:1"]
    with pytest.raises(ConfigError, match="there is no GPU 2; visible are 0 to 1"):
        placement.place("cuda:0,2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert placement.place("auto") == ["cpu"]
    with pytest.raises(ConfigError, match="no GPU is visible"):
        placement.place("cuda")

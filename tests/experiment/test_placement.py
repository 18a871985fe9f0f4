"""Which devices and how many workers."""

from __future__ import annotations

import os

import pytest

from fednet import config
from fednet.errors import ConfigError
from fednet.experiment import placement
from fednet.launch.ray import Fleet, gpu_share
from fednet.launch.start import Silent
from fednet.server.watch import ServerOptions


@pytest.mark.parametrize(
    ("wanted", "devices", "clients", "placed"),
    [
        (None, ["cpu"], 10, ["cpu"] * 4),  # one a core
        (None, ["cpu"], 3, ["cpu"] * 3),  # at most one a client
        (None, ["cuda:0", "cuda:2"], 10, ["cuda:0", "cuda:2"]),  # one a GPU
        (3, ["cuda:0", "cuda:2"], 10, ["cuda:0", "cuda:2", "cuda:0"]),  # more in turn
    ],
)
def test_workers_are_placed_on_cores_or_gpus(monkeypatch, wanted, devices, clients, placed):
    monkeypatch.setattr(placement, "cores", lambda: 4)
    assert placement.workers(wanted, devices, clients) == placed


@pytest.mark.parametrize(
    ("workers", "gpus", "share"),
    [(1, 1, 1.0), (2, 4, 1.0), (4, 4, 1.0), (5, 2, 1 / 3), (8, 2, 0.25), (3, 2, 0.5)],
)
def test_workers_on_ray_ask_for_the_share_by_which_a_whole_number_fills_each_gpu(
    workers, gpus, share
):
    assert gpu_share(workers, gpus) == share
    assert int(1 / gpu_share(workers, gpus) + 1e-9) * gpus >= workers


@pytest.mark.parametrize(
    ("device", "wanted", "asks"),
    [
        ("auto", None, {"num_cpus": 2, "num_gpus": 1.0}),
        ("cuda", 6, {"num_cpus": 2, "num_gpus": 1 / 3}),
        ("cpu", 6, {"num_cpus": 2}),
    ],
)
def test_a_cluster_with_gpus_is_asked_for_cpus_and_gpus(tmp_path, device, wanted, asks):
    class Ray:
        @staticmethod
        def cluster_resources() -> dict[str, float]:
            return {"CPU": 32.0, "GPU": 2.0}

    fleet = Fleet(
        Ray,
        config.from_mapping({"clients": 8, "train": {"threads": 2}}),
        tmp_path,
        ServerOptions(Silent(), device=device),
        wanted,
        None,
    )
    assert fleet.asks == asks
    assert fleet.workers == (wanted or 2)


def test_cores_obeys_what_slurm_granted(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    assert placement.cores() == 1
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "100000")
    assert placement.cores() <= (os.cpu_count() or 1)


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

"""The devices for the workers, and the number of workers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fednet.errors import ConfigError


def cores() -> int:
    """Returns how many cores this process may use: the least of its affinity, its cgroup's quota
    and what Slurm granted.
    """
    found = [len(os.sched_getaffinity(0))]
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        most, _, period = quota.read_text().partition(" ")
        if most != "max":
            found.append(max(1, round(int(most) / int(period))))
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if granted.isdigit():
        found.append(int(granted))
    return max(1, min(found))


def place(device: str) -> list[str]:
    """Returns the devices of auto, cpu, cuda, cuda:0 or cuda:0,2, or raises ConfigError."""
    if device == "cpu":
        return ["cpu"]
    if not re.fullmatch(r"auto|cuda(:\d+(,\d+)*)?", device):
        raise ConfigError(f"--device {device!r}: expected auto, cpu, cuda, cuda:0 or cuda:0,2.")
    import torch

    visible = torch.cuda.device_count()
    if device == "auto" and not visible:
        return ["cpu"]
    if not visible:
        raise ConfigError(
            f"--device {device}: no GPU is visible here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})."
        )
    chosen = [int(n) for n in device[5:].split(",")] if ":" in device else list(range(visible))
    for n in chosen:
        if n >= visible:
            raise ConfigError(
                f"--device {device}: there is no GPU {n}; visible are 0 to {visible - 1}."
            )
    return [f"cuda:{n}" for n in chosen]


def check(device: str) -> None:
    """Raises ConfigError if there is no such device. "auto" is not looked at, so that a process
    that computes nothing need not import torch.
    """
    if device != "auto":
        place(device)


def workers(wanted: int | None, devices: list[str], clients: int) -> list[str]:
    """Returns the device of each worker: as many as wanted, or one a GPU, else one a core; at most
    one a client.
    """
    if wanted is None:
        wanted = len(devices) if devices[0] != "cpu" else cores()
    n = max(1, min(wanted, clients))
    return [devices[i % len(devices)] for i in range(n)]

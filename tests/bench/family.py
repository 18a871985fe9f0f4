"""Which processes descend from one, and what machine they run on."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fednet.experiment import placement


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def machine() -> str:
    """What figures are of: processor, cores that this process may use, memory, versions, the date,
    and how many others wanted the processor in the last minute.
    """
    about = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (about.read_text().splitlines() if about.exists() else [])
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{names[0] if names else platform.machine()}, {placement.cores()} cores, "
        f"{memory:.0f} GiB; {platform.system()} {platform.release()}, Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}; "
        f"{datetime.date.today()}, load {os.getloadavg()[0]:.1f}"
    )

"""What Linux says under /proc: of processes, and of this machine. Nothing else reads there."""

from __future__ import annotations

import os
from pathlib import Path

from fednet.descriptors import reaching

PROC = Path("/proc")


def _text(name: str) -> str:
    """Returns what a file has. Raises OSError, among them FileNotFoundError and
    ProcessLookupError for a process that has ended.
    """
    return reaching((PROC / name).read_bytes).decode(errors="replace")


def _stat(pid: int) -> list[str]:
    """Returns the fields of a process from its state on. The name before them may have any
    characters.
    """
    return _text(f"{pid}/stat").rpartition(")")[2].split()


def running(pid: int) -> bool:
    """Returns whether a process of this machine runs. One that has ended may still have its id, as
    long as its parent has not noticed.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        return _stat(pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError, OverflowError):
        return False
    except PermissionError:  # another user's, which may be hidden
        return True


def processor_seconds(pid: int) -> float:
    """Returns user and system time of a process so far; 0 for one that has ended."""
    try:
        fields = _stat(pid)
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int, file: str, name: str) -> int:
    """Returns a number of a process: `Pss` of smaps_rollup (proportional set size), `VmHWM` of
    status (peak resident); 0 for one that has ended.
    """
    try:
        rows = _rows(f"{pid}/{file}")
    except OSError:
        return 0
    return int(rows[name].split()[0]) * 1024 if name in rows else 0


def descriptors() -> int:
    """Returns how many descriptors this process has open."""
    return len(os.listdir(PROC / "self/fd"))


def free_memory() -> int:
    """Returns the bytes of memory that are free or in caches, with swap. Raises OSError, KeyError
    and ValueError where Linux does not say it.
    """
    rows = _rows("meminfo")
    return 1024 * sum(int(rows[name].split()[0]) for name in ("MemAvailable", "SwapFree"))


def processor() -> dict[str, str]:
    """Returns what is known of the first processor, such as `vendor_id` and `flags`; empty where
    Linux does not say it.
    """
    try:
        return _rows("cpuinfo")
    except OSError:
        return {}


def _rows(name: str) -> dict[str, str]:
    """Returns a file's lines `name: value`; of a name that is there more than once, the first."""
    found: dict[str, str] = {}
    for line in _text(name).splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found

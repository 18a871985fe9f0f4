"""Claims: several processes, perhaps on several machines, share a list of work through a folder.

A claim on a piece of work is a file that is created exclusively, so that one process gets it. Its
holder touches it while it works. A claim whose holder is gone is not overwritten, since two
processes might do so at once; the next number is created exclusively, and the highest number holds.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from fednet.errors import CannotGoOn
from fednet.experiment.lock import started_at
from fednet.files import read_value, write_aside, write_first
from fednet.launch.parent import die_with_parent

SILENT_S = 120.0  # a holder on another machine that has not touched its claim for this long is gone
BEAT_S = 10.0  # time between two touches


@dataclass(frozen=True)
class Claim:
    """A claim that this process holds."""

    path: Path

    def beat(self) -> None:
        """Touches it. Raises CannotGoOn if it was removed: then nobody knows whose the work is, and
        writing would create the folder again.
        """
        try:
            os.utime(self.path)
        except FileNotFoundError:
            raise CannotGoOn(
                f"{self.path} was deleted or moved during the sweep, together with its results; "
                f"the same command repeats what is missing."
            ) from None

    def add(self, pid: int) -> None:
        """Adds a process that works for this one; the work is not free while it lives."""
        write_aside(self.path, _said([*_read(self.path).processes, _identity(pid)]))

    # More than twenty arguments, of as many types, which Popen checks.
    def start(self, words: Sequence[str], log: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
        """Starts a command that works for this process, in a session of its own. Linux ends it with
        this process. Its output goes to `log`. more: arguments of `subprocess.Popen`.
        """
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
            **more,
        )
        try:
            self.add(process.pid)
        except BaseException:  # no run may be left behind without a claim
            process.kill()
            process.wait()
            raise
        return process

    def release(self) -> None:
        """Frees the work for every process, this one too."""
        if self.path.exists():
            write_aside(self.path, _said([]))


def claim(folder: Path, work: str) -> Claim | None:
    """The claim on `work`, or None while another process holds it. `work` is a file's name."""
    folder.mkdir(parents=True, exist_ok=True)
    held = _claims(folder, work)
    if held and _live(held[-1]):
        return None
    number = int(held[-1].name.rpartition(".")[2]) + 1 if held else 0
    path = folder / f"{work}.claim.{number}"
    # A reader never sees a claim without its holder; another process may have been quicker.
    return Claim(path) if write_first(path, _said([_identity(os.getpid())])) else None


def holder(folder: Path, work: str) -> str | None:
    """The holder, "host, process 12"; None if nobody works on it."""
    held = _claims(folder, work)
    if not held or not _live(held[-1]):
        return None
    said = _read(held[-1])
    return f"{said.host}, process {said.processes[0].pid}"


def _claims(folder: Path, work: str) -> list[Path]:
    found = [
        p for p in folder.glob(f"{work}.claim.*") if p.name.rpartition(".")[0] == f"{work}.claim"
    ]
    return sorted(found, key=lambda p: int(p.name.rpartition(".")[2]))


def _live(path: Path) -> bool:
    said = _read(path)
    if not said.processes:
        return False
    if said.host == socket.gethostname():
        return any(_identity(p.pid) == p for p in said.processes)
    # By the file system's own clock, which also stamped the holder's touch.
    probe = path.parent / f".clock.{socket.gethostname()}.{os.getpid()}"
    probe.touch()
    age = probe.stat().st_mtime - path.stat().st_mtime
    probe.unlink()
    return age < SILENT_S


class Process(msgspec.Struct, frozen=True):
    """A process. started: the system's start time, since ids are used again."""

    pid: int
    started: str | None


class Holding(msgspec.Struct, frozen=True):
    """The content of a claim: its holder."""

    host: str
    processes: list[Process]


def _read(path: Path) -> Holding:
    """Raises StateError if the file is damaged."""
    return read_value(path, Holding, "delete it if no process works there any more")


def _identity(pid: int) -> Process:
    return Process(pid, started_at(pid))


def _said(processes: Sequence[Process]) -> bytes:
    return msgspec.json.encode(Holding(socket.gethostname(), list(processes)))

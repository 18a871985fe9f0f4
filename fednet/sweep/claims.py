"""Several processes, perhaps on several machines, sharing a list of work through a folder.

A claim on a piece of work is a file that is created exclusively, so that one process gets it; its
holder touches it while it works. A claim whose holder is gone is not taken over in place (two might
do so at once) but followed by the next in number, created exclusively again: the highest number
holds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fednet.errors import CannotGoOn
from fednet.experiment.lock import started_at
from fednet.files import write_aside, write_first
from fednet.launch.parent import die_with_parent

SILENT_S = 120.0  # a holder on another machine that has not touched its claim for so long is gone
BEAT_S = 10.0  # how often a holder should


@dataclass(frozen=True)
class Claim:
    """A claim that this process holds."""

    path: Path

    def beat(self) -> None:
        """Raises CannotGoOn where somebody has removed it: nothing says any more whose the work is,
        and what is written now would make the folder anew.
        """
        try:
            os.utime(self.path)
        except FileNotFoundError:
            raise CannotGoOn(
                f"{self.path} was deleted or moved while work went on there, and what was done "
                f"with it; the same command begins anew what is not there."
            ) from None

    def add(self, pid: int) -> None:
        """A process that works for this one: while it lives the work is not free."""
        known = json.loads(self.path.read_text(encoding="utf-8"))["processes"]
        write_aside(self.path, _said([*known, _identity(pid)]))

    # More than twenty arguments, of as many types, which Popen checks.
    def start(self, words: Sequence[str], log: IO[bytes], **more: Any) -> subprocess.Popen[bytes]:
        """Starts a command that works for this one, in a session of its own, and that Linux ends
        with it; what it says goes to `log`. More: as `subprocess.Popen` takes it.
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
        except BaseException:  # nothing may leave a run behind that no claim speaks for
            process.kill()
            process.wait()
            raise
        return process

    def release(self) -> None:
        """Free at once for whoever wants it, this process too. What is gone is free already."""
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
    """Who works on it: "host, process 12"; None where nobody does."""
    held = _claims(folder, work)
    if not held or not _live(held[-1]):
        return None
    said = json.loads(held[-1].read_text(encoding="utf-8"))
    return f"{said['host']}, process {said['processes'][0]['pid']}"


def _claims(folder: Path, work: str) -> list[Path]:
    found = [
        p for p in folder.glob(f"{work}.claim.*") if p.name.rpartition(".")[0] == f"{work}.claim"
    ]
    return sorted(found, key=lambda p: int(p.name.rpartition(".")[2]))


def _live(path: Path) -> bool:
    said = json.loads(path.read_text(encoding="utf-8"))
    if not said["processes"]:
        return False
    if said["host"] == socket.gethostname():
        return any(_identity(p["pid"]) == p for p in said["processes"])
    # By the file system's own clock, which the holder's touch was told by too.
    probe = path.parent / f".clock.{socket.gethostname()}.{os.getpid()}"
    probe.touch()
    age = probe.stat().st_mtime - path.stat().st_mtime
    probe.unlink()
    return age < SILENT_S


def _identity(pid: int) -> dict[str, int | str | None]:
    return {"pid": pid, "started": started_at(pid)}


def _said(processes: Sequence[dict[str, int | str | None]]) -> str:
    return json.dumps({"host": socket.gethostname(), "processes": list(processes)})

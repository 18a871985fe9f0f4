"""A run's directory: what is written there, and how nothing of it is lost or doubled.

Lines of `rounds.jsonl` and `clients.jsonl` are cut to what the checkpoint knows when a run resumes;
`wire.jsonl` and `events.jsonl` are never cut: what was spent was spent. A torn last line is
repaired before anything is appended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fednet.errors import CannotGoOn, ConfigError

CUT = ("rounds.jsonl", "clients.jsonl")
NEVER_CUT = ("wire.jsonl", "events.jsonl")


class Lines:
    """An append-only file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO = path.open("ab")

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":"), default=plain).encode() + b"\n")

    def flush(self) -> int:
        """Everything is with the operating system; returns the file's length."""
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file of JSON lines that `repair` has been over."""
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def write_json(path: Path, value: Any, indent: int | None = 1, mode: int | None = None) -> None:
    """Written aside, then renamed: a reader sees the old or the new file, never half of one."""
    aside = path.with_name(path.name + ".part")
    text = json.dumps(value, indent=indent, default=plain)
    if mode is not None:
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        aside.write_text(text + "\n", encoding="utf-8")
    aside.replace(path)


def writable(folder: Path, flag: str) -> None:
    """Makes the folder. Raises ConfigError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as closed:
        raise ConfigError(
            f"{flag} {folder}: nothing can be written there ({closed.strerror}); give another "
            f"folder."
        ) from closed


def claim(out: Path, name: str, resume: bool) -> Path:
    """The directory of a run. Nothing is ever overwritten: an unfinished one is an error without
    `resume`, and beside a finished one the new run is NAME-2, NAME-3, ... With `resume` the newest
    of the name is gone on with.
    """
    writable(out, "--out")
    path, n = out / name, 1
    while (path / "config.yaml").exists():
        following = out / f"{name}-{n + 1}"
        finished = (path / "summary.json").exists()
        if resume and not (following / "config.yaml").exists():
            return path
        if not finished and not resume:
            raise ConfigError(
                f"{path} holds an unfinished run; go on with it by --resume, or give this one "
                f"another name (--set name=...)."
            )
        path, n = following, n + 1
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{path} is a file, where the run's directory is to be; give it another name (--set "
            f"name=...)."
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def forget(path: Path) -> None:
    """Takes back the directory of a run that was refused before it began, so that the next try
    finds its name free.

    Only what fednet itself writes goes; a directory in which a run has begun is left as it is.
    """
    if (path / "checkpoint" / "manifest.json").exists():
        return
    for name in (*CUT, *NEVER_CUT, "config.yaml", "server.json", "status.json", "partition.json"):
        (path / name).unlink(missing_ok=True)
    for folder in ("checkpoint", "log", "code", "figures", "state", "keys"):
        shutil.rmtree(path / folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # something of the user's own lies in it
        path.rmdir()


class RunDirectory:
    """Opened for writing by the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in ("checkpoint", "log", "code", "figures"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        for name in CUT + NEVER_CUT:
            repair(path / name)
        self.rounds, self.clients = Lines(path / "rounds.jsonl"), Lines(path / "clients.jsonl")
        self.wire, self.events = Lines(path / "wire.jsonl"), Lines(path / "events.jsonl")
        self._started = time.time()

    def event(
        self, type: str, round: int = 0, client: int = -1, bytes: int = 0, **more: Any
    ) -> None:
        """One line of events.jsonl. elapsed: seconds since this server process started."""
        self.events.append(
            {
                "round": round,
                "client": client,
                "type": type,
                "bytes": bytes,
                "elapsed": round_ms(time.time() - self._started),
                "time": round_ms(time.time()),
                **more,
            }
        )
        # what a resume must know, a fault that struck above all, may not be lost with this process
        self.events.flush()

    def flush(self) -> dict[str, int]:
        """All lines are with the operating system; returns the lengths of the files that a resume
        cuts.
        """
        self.wire.flush()
        self.events.flush()
        return {"rounds.jsonl": self.rounds.flush(), "clients.jsonl": self.clients.flush()}

    def status(self, **fields: Any) -> None:
        write_json(
            self.path / "status.json",
            {**fields, "updated": time.time(), "pid": os.getpid(), "host": os.uname().nodename},
            indent=None,
        )

    def close(self) -> None:
        for lines in (self.rounds, self.clients, self.wire, self.events):
            lines.close()


def round_ms(seconds: float) -> float:
    return round(seconds, 3)


def repair(path: Path) -> None:
    """Cuts a torn last line off a file of JSON lines."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            step = min(4096, at)
            file.seek(at - step)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                at = at - step + found + 1
                break
            at -= step
        if at != size:
            file.truncate(at)


def cut(path: Path, lengths: dict[str, int]) -> None:
    """Cuts the files to the lengths that a checkpoint recorded."""
    for name, length in lengths.items():
        file = path / name
        if not file.exists():
            file.touch()
        if file.stat().st_size < length:
            raise CannotGoOn(
                f"{file} is shorter than the checkpoint says; the run directory was changed by "
                f"hand."
            )
        os.truncate(file, length)

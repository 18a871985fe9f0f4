"""The runs in a folder: how large and how old they are; and their deletion."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fednet.errors import ConfigError, FednetError
from fednet.experiment import lock
from fednet.report import status


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's directory, with the log of `fednet serve` beside it."""

    path: Path
    state: str
    """In a word."""
    rounds: int
    """How many it has completed, or began."""
    bytes: int
    changed: float
    """When a file of it last changed, in seconds since 1970."""

    def days(self, now: float) -> float:
        """Returns its age."""
        return max(0.0, now - self.changed) / 86_400

    def delete(self) -> None:
        """Deletes it. Raises ConfigError if a process uses it."""
        with lock.holding(self.path):
            shutil.rmtree(self.path)
        _log(self.path).unlink(missing_ok=True)


def find_runs(places: Iterable[Path]) -> list[StoredRun]:
    """Returns the runs among these folders and directly in them, the one that changed last first.
    Raises ConfigError for a folder that does not exist.
    """
    directories: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"{place}: there is no such folder; expected a run or runs in it.")
        inside = [place] if _is_run(place) else [p for p in place.iterdir() if _is_run(p)]
        directories |= dict.fromkeys(inside)
    return sorted(map(_stored_run, directories), key=lambda run: (-run.changed, run.path))


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and not path.is_symlink()


def _log(run: Path) -> Path:
    """Where `fednet serve` writes what the run's process prints."""
    return run.parent / f".{run.name}.log"


def _stored_run(path: Path) -> StoredRun:
    size = 0
    changed = 0.0
    for file in _files(path):
        try:
            one = file.lstat()
        except FileNotFoundError:  # of a run that goes on
            continue
        size += one.st_size
        changed = max(changed, one.st_mtime)
    try:
        said = status.read(path)
    except FednetError:
        return StoredRun(path, "unknown", 0, size, changed)
    state = status.ENDED.get(said.state, said.state)
    if said.state not in status.ENDED and not status.alive(said, path, time.time())[0]:
        state = "ended unexpectedly"
    return StoredRun(path, state, said.round, size, changed)


def _files(path: Path) -> Iterator[Path]:
    yield from (file for file in path.rglob("*") if not file.is_dir())
    yield _log(path)

"""The queue of runs in a folder that `fednet serve` works through, a file for each run.

    DIR/queue/000001.json    a run's configuration and state; written aside and renamed into place
    DIR/queue/000001.cancel  the run is cancelled
    DIR/runs/NAME-1/         the run's own directory, as `fednet-server` leaves it

Users who may write in DIR may submit and cancel, also while no server runs: the next `fednet serve`
finds what they wrote.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from fednet import config as configuration
from fednet.config import Config
from fednet.errors import ConfigError, StateError, why
from fednet.experiment import lock
from fednet.files import line, read_record, write_aside, write_record

State = Literal["waiting", "running", "done", "failed", "cancelled"]
OPEN = ("waiting", "running")
PUT_BACK = "delete it, or put back what was there"
SUBMITTING = threading.Lock()  # files are written aside under a name for each process


class QueuedRun(msgspec.Struct, kw_only=True):
    """A run of the queue, as its file has it."""

    number: int
    name: str
    """Of the run's directory."""
    config: str
    """Its whole configuration, as YAML."""
    state: State = "waiting"
    status: int | None = None
    """The exit status of its process."""
    reason: str = ""
    """Why it failed."""
    at: float = 0.0
    """When it was submitted, in seconds since the epoch."""


class Queue:
    """The queue of runs of one served folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._queue = folder / "queue"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run_folder(self, entry: QueuedRun) -> Path:
        return self.runs / entry.name

    @property
    def exists(self) -> bool:
        """Whether anything was submitted there, or a server runs for it."""
        return self._queue.is_dir() or self.has_server

    @property
    def has_server(self) -> bool:
        """Whether a server runs for it, as far as this machine can tell."""
        holder = lock.read(self.folder / "lock")
        return holder is not None and not holder.gone

    def entries(self) -> list[QueuedRun]:
        """All runs in the order of submission. One whose file is damaged counts as failed, and does
        not stop the others.
        """
        found = []
        for number in self._numbers():
            try:
                found.append(self._read(self._path(number)))
            except (OSError, StateError) as broken:
                reason = why(broken) if isinstance(broken, OSError) else str(broken)
                found.append(
                    QueuedRun(number=number, name="?", config="", state="failed", reason=reason)
                )
        return found

    def _numbers(self) -> list[int]:
        """The numbers of the submitted runs. Other files, such as copies, are ignored."""
        named = (path.stem for path in self._queue.glob("*.json"))
        return sorted(int(n) for n in named if n.isdecimal() and self._path(int(n)).stem == n)

    def entry(self, number: int) -> QueuedRun:
        """Raises ConfigError where there is none."""
        path = self._path(number)
        if not path.exists():
            raise ConfigError(f"{self.folder}: there is no run {number}; see fednet queue list.")
        return self._read(path)

    def submit(self, config: Config) -> QueuedRun:
        """Puts a configuration at the end of the queue. Its files under `load:` are read when it
        runs.
        """
        files = tuple(str(Path(file).resolve()) for file in config.load)
        self._queue.mkdir(parents=True, exist_ok=True)
        known = self._numbers()
        with SUBMITTING:
            for number in itertools.count(max(known, default=0) + 1):
                name = f"{config.name}-{number}"
                # What a run left whose file was deleted is not taken over.
                if self._cancel(number).exists() or (self.runs / name).exists():
                    continue
                text = configuration.to_yaml(config.replace(name=name, load=files))
                entry = QueuedRun(number=number, name=name, config=text, at=time.time())
                # If several processes submit, the first to write a number has it.
                if write_aside(self._path(number), line(msgspec.to_builtins(entry)), first=True):
                    break
        return entry

    def cancel(self, number: int) -> QueuedRun:
        """Stops a running run, or removes a waiting one. Raises ConfigError if it has ended."""
        entry = self.entry(number)
        if entry.state not in OPEN:
            raise ConfigError(f"{self.folder}: run {number} is {entry.state} already.")
        self._cancel(number).touch()
        return self.entry(number)

    def resume(self, number: int) -> QueuedRun:
        """Puts a failed run back into the queue, to continue from its checkpoint. Raises
        ConfigError if it did not fail.
        """
        entry = self.entry(number)
        if entry.state != "failed":
            raise ConfigError(
                f"{self.folder}: run {number} is {entry.state}; only one that failed is resumed."
            )
        self._cancel(number).unlink(missing_ok=True)
        entry.state = "waiting"
        entry.status = None
        entry.reason = ""
        self.write(entry)
        return entry

    def open(self, entries: Sequence[QueuedRun]) -> list[QueuedRun]:
        """Those that have not ended, in the order in which they are run."""
        found = [entry for entry in entries if entry.state in OPEN]
        return sorted(found, key=lambda entry: (entry.state != "running", entry.number))

    def is_cancelled(self, entry: QueuedRun) -> bool:
        return self._cancel(entry.number).exists()

    def write(self, entry: QueuedRun) -> None:
        write_record(self._path(entry.number), msgspec.to_builtins(entry))

    def _path(self, number: int) -> Path:
        return self._queue / f"{number:06d}.json"

    def _cancel(self, number: int) -> Path:
        return self._path(number).with_suffix(".cancel")

    def _read(self, path: Path) -> QueuedRun:
        try:
            entry = msgspec.convert(read_record(path, PUT_BACK), QueuedRun)
            if self._path(entry.number) != path or Path(entry.name).name != entry.name:
                raise ValueError(f"it is number {entry.number}, {entry.name!r}")
        except ValueError as broken:  # msgspec's among them
            raise StateError(f"{path}: no run of this queue ({broken}); {PUT_BACK}.") from None
        if entry.state == "waiting" and self.is_cancelled(entry):
            entry.state = "cancelled"
        return entry

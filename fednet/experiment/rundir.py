"""A run's directory: what is written there, and how no line of it is lost or written twice.

When a run resumes, `rounds.jsonl` and `clients.jsonl` are cut to the length that the checkpoint
recorded, and `wire.jsonl` to the length that the server's journal names, which then gives its other
rows again. `events.jsonl` is never cut. A torn last line is cut off before anything is appended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from fednet import config as configuration
from fednet import loading
from fednet.config import Config
from fednet.errors import ConfigError, FednetError, StateError
from fednet.experiment import lock
from fednet.files import (
    Lines,
    clear_asides,
    plain_line,
    read_lines,
    repair,
    write_aside,
    write_json,
)
from fednet.plain import JsonDict
from fednet.records import Client, Event, Round, reading
from fednet.records.manifest import RESTORE, read_manifest

TRACKED = ("tensorboard", "mlruns", "wandb")
CUT = ("rounds.jsonl", "clients.jsonl", "wire.jsonl")
NEVER_CUT = ("events.jsonl",)


def writable(folder: Path, flag: str) -> None:
    """Makes the folder. Raises ConfigError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as closed:
        raise ConfigError(
            f"{flag} {folder}: nothing can be written there ({closed.strerror}); give another "
            f"folder."
        ) from closed


def runs_of(out: Path, name: str) -> list[Path]:
    """Returns the directories of the runs of that name, oldest first: NAME, NAME-2, NAME-3, ..."""
    found: list[Path] = []
    while ((path := _next(out, name, found)) / "config.yaml").exists():
        found.append(path)
    return found


def _next(out: Path, name: str, found: list[Path]) -> Path:
    return out / (f"{name}-{len(found) + 1}" if found else name)


def claim(out: Path, name: str, resume: bool) -> Path:
    """Returns the directory for a run. No finished round is ever overwritten. With `resume` it is
    the newest run of that name. Without, an unfinished run that has a round is an error, and beside
    a finished run the new one is NAME-2, NAME-3, ...
    """
    writable(out, "--out")
    found = runs_of(out, name)
    if resume and found:
        return found[-1]
    for path in found:
        if (path / "summary.json").exists():
            continue
        if not has_rounds(path):
            return path
        lock.refuse_held(path)  # whose run goes on, and needs no --resume
        raise ConfigError(
            f"{path} holds an unfinished run; continue it with --resume, or give this one another "
            f"name (--set name=...)."
        )
    path = _next(out, name, found)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{path} is a file, where the run's directory is to be; give it another name (--set "
            f"name=...)."
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def has_rounds(path: Path) -> bool:
    """Returns whether a round of that run has a result. A void round has none, and the first
    checkpoint is written before any has.
    """
    book = path / "rounds.jsonl"
    try:
        if book.exists() and not all(row.get("void") for row in read_lines(book)):
            return True
        progress = json.loads((path / "checkpoint" / "manifest.json").read_bytes())["progress"]
        return bool(progress["round"] > progress.get("void", 0))
    except FileNotFoundError:
        return False
    except (FednetError, ValueError, KeyError, TypeError):  # damaged, which a resume reports
        return True


def forget(path: Path) -> None:
    """Removes the directory of a run that was refused before it began, so that its name is free
    again. Nothing is removed if a run has begun.
    """
    if not (path / "checkpoint" / "manifest.json").exists() and not has_rounds(path):
        _clear(path)


def renew(path: Path) -> None:
    """Clears the directory for a new run, unless the one in it has finished a round."""
    if not has_rounds(path):
        _clear(path)
        path.mkdir(exist_ok=True)


def _clear(path: Path) -> None:
    """Removes what fednet itself writes before a round is done; a user's own files stay."""
    for name in (
        *CUT,
        *NEVER_CUT,
        "config.yaml",
        "server.json",
        "status.json",
        "partition.json",
        "mlflow-run",
    ):
        (path / name).unlink(missing_ok=True)
    for folder in ("checkpoint", "log", "code", "state", "keys", *TRACKED):
        shutil.rmtree(path / folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds something of the user's own
        path.rmdir()


def clear_run(path: Path) -> None:
    """Removes what a killed server left half written. Call it with the run locked."""
    for folder in (path, path / "condensed", path / "personal"):
        clear_asides(folder)


def write_configuration(config: Config, path: Path) -> None:
    """Writes the configuration with which a run begins or goes on, and copies of the user's own
    files. The summary of a run that had finished is removed.
    """
    (path / "summary.json").unlink(missing_ok=True)
    code = path / "code"
    code.mkdir(parents=True, exist_ok=True)
    copies = list[str]()
    for file, name in zip(config.load, loading.names(config.load)):
        target = code / name
        if Path(file).resolve() != target.resolve():
            shutil.copyfile(file, target)
        copies.append(str(Path("code") / target.name))
    written = config.replace(load=tuple(copies)) if copies else config
    write_aside(path / "config.yaml", configuration.to_yaml(written))


class RunDirectory:
    """Writes the files of a run, for the server."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in ("checkpoint", "log", "code"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        for name in CUT + NEVER_CUT:
            repair(path / name)
        self.rounds = Lines(path / "rounds.jsonl")
        self.clients = Lines(path / "clients.jsonl")
        self.wire = Lines(path / "wire.jsonl", plain_line)
        self.events = Lines(path / "events.jsonl")
        self._started = time.monotonic()

    def event(
        self, type: str, round: int = 0, client: int = -1, bytes: int = 0, **more: object
    ) -> None:
        """Appends a line to events.jsonl. elapsed: seconds since this server process started."""
        self.events.append(
            Event(
                round=round,
                client=client,
                type=type,
                bytes=bytes,
                elapsed=round_ms(time.monotonic() - self._started),
                time=round_ms(time.time()),
                details=more,
            ).line()
        )
        # A resume must know of them, above all of planned faults that have struck.
        self.events.flush()

    def append(self, lines: Mapping[str, Iterable[JsonDict]]) -> None:
        """Adds lines to `rounds.jsonl` and `clients.jsonl`. lines: by "rounds" and "clients"."""
        for row in lines.get("rounds", ()):
            self.rounds.append(row)
        for row in lines.get("clients", ()):
            self.clients.append(row)

    def flush(self, fsync: bool = False) -> dict[str, int]:
        """Hands all lines to the operating system, with `fsync` also to the disk; returns the
        lengths of the files, but for `wire.jsonl`, whose length the journal knows. Raises
        StateError if somebody has removed, cut or replaced one: what is written from then on would
        be lost.
        """
        files = self.rounds, self.clients, self.wire, self.events
        lengths = {lines.path.name: lines.flush(fsync) for lines in files}
        check_lengths(self.path, lengths, "this run has written")
        del lengths["wire.jsonl"]
        return lengths

    def cut_wire(self, length: int) -> None:
        """Leaves the first `length` bytes of `wire.jsonl`. Raises StateError as `cut` does."""
        self.wire.flush()
        cut(self.path, {"wire.jsonl": length}, "the run's journal knows of")
        self.wire.was_cut(length)

    def close(self) -> None:
        for lines in (self.rounds, self.clients, self.wire, self.events):
            lines.close()


def write_status(path: Path, **fields: object) -> None:
    """Writes status.json: what the run is doing, as `fednet status` shows it."""
    write_json(
        path / "status.json",
        {**fields, "updated": time.time(), "pid": os.getpid(), "host": socket.gethostname()},
        indent=None,
    )


def round_ms(seconds: float) -> float:
    return round(seconds, 3)


def check_lengths(
    path: Path, lengths: Mapping[str, int], known: str = "the checkpoint knows of"
) -> None:
    """Raises StateError if a run's file of lines is shorter than it should be, and
    FileNotFoundError where one is missing.
    """
    for name, length in lengths.items():
        if (found := (path / name).stat().st_size) < length:
            raise StateError(
                f"{path / name}: {found} bytes, and {known} {length}; put the file back as it was, "
                f"or start the run again under another name."
            )


def resume_hint(path: Path) -> str:
    """Returns what a resume of that run would find, for a message about a run that ended early."""
    if not (path / "config.yaml").exists():
        return f"{path} was deleted or moved, and its results with it"
    try:
        if not (path / "checkpoint" / "manifest.json").exists():
            if has_rounds(path):
                return "its checkpoint is gone, so it cannot be resumed"
            return "no round was finished yet; --resume starts it from the beginning"
        check_lengths(path, read_manifest(path / "checkpoint")[0].lengths)
    except (OSError, StateError):
        return f"its checkpoint or records are damaged; {RESTORE}"
    return "the last checkpoint is saved; continue with --resume"


def cut(path: Path, lengths: Mapping[str, int], known_by: str = "the checkpoint knows of") -> None:
    """Cuts the files in `CUT` to the lengths that the checkpoint recorded. Raises StateError if a
    file is shorter than that, or has no end of a line there: a last line whose end is damaged looks
    like one that was never finished.
    """
    known = {name: lengths[name] for name in (*CUT, *NEVER_CUT) if name in lengths}
    for name in known:
        (path / name).touch()
    check_lengths(path, known, known_by)
    for name, length in known.items():
        with (path / name).open("rb") as lines:
            lines.seek(max(0, length - 1))
            if length and lines.read(1) != b"\n":
                raise StateError(
                    f"{path / name}: no line ends at byte {length}, as was written there; "
                    f"{reading.PUT_BACK}."
                )
        if name in CUT:
            os.truncate(path / name, length)


def check_records(path: Path, rounds: int) -> None:
    """Reads the records that a resume goes on from, after `cut`: damage is an error before anything
    starts. rounds: how many should be on record. Raises StateError.
    """
    book = path / "rounds.jsonl"
    found = [row.round for row in reading.rows(path, book, Round)]
    if found != list(range(1, rounds + 1)):
        raise StateError(
            f"{book}: it has {len(found)} rounds, and the checkpoint expects {rounds}; "
            f"{reading.PUT_BACK}."
        )
    for _ in reading.rows(path, path / "clients.jsonl", Client):
        pass


class _Log(logging.FileHandler):
    """A log that prints no traceback on a full disk: the run meets that too, and reports it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to(path: Path) -> logging.Handler:
    """Copies what fednet logs in this process to `path`, until the handler is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _Log(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root = logging.getLogger("fednet")
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    return handler

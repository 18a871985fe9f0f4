"""What `--resume` needs: a manifest of content-named files, renamed into place.

A file's name tells its content, so what did not change is not written again, and a crash while
writing leaves the last checkpoint whole. What is loaded is held against its name: a file that was
changed or is gone is an error that names it, never another model. Replies of rounds that no
checkpoint holds yet are in the folders beside it, see inbox.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from fednet.algorithms.state import (
    PerClient,
    S,
    State,
    content_sha256,
    leaves,
    read_state,
    write_state,
)
from fednet.errors import StateError
from fednet.files import clear_asides, list_folder, read_record, write_record
from fednet.plain import plain
from fednet.records import reading
from fednet.records.manifest import FORMAT, RESTORE, RunProgress, UnderWay, read_manifest
from fednet.server.rows import RowStore
from fednet.tensors import Layout, Slot, Tensors


class Checkpoints:
    """The folder `checkpoint/` of a run.

    What compressors remember of a client is written as a row: what is the same as at the last
    checkpoint is not written again, nor what several clients have in common.
    """

    OF = re.compile(r"client ([0-9]+)/(.*)")

    def __init__(
        self, folder: Path, fsync: bool = False, own: Callable[[], None] = lambda: None
    ) -> None:
        """own: raises where the folder is another process's now; asked before each checkpoint."""
        self.folder = folder
        self._own = own
        clear_asides(folder)
        self.rows = RowStore(folder / "rows", fsync)
        self._fsync = fsync
        # What was remembered at the last checkpoint, by identity, and its row's name.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    @property
    def exists(self) -> bool:
        return (self.folder / "manifest.json").exists()

    def incarnation(self, run: Path) -> int:
        """Counts the server processes of a run, from 1. Where the count was damaged, as by a power
        cut, or deleted, it goes on from the run's events, which have each start.
        """
        path = self.folder / "incarnation"
        try:
            number = int(read_record(path, "it is counted again")["incarnation"]) + 1
        except (FileNotFoundError, StateError):
            starts = [event["incarnation"] for event in reading.events(run, "started")]
            # A server that ended before it wrote its event has taken a number too.
            number = max(starts) + 2 if starts else 1
        write_record(path, {"incarnation": number}, fsync=self._fsync)
        return number

    def save(
        self,
        server: State,
        progress: RunProgress,
        residuals: Mapping[str, torch.Tensor],
        sent: Mapping[str, State] | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Makes these the state that a resume starts from. residuals: see `RunState`. sent: what
        went down with tasks under way, by name. at(point): called at the points where a planned
        fault may strike.
        """
        self._own()
        states = {"server": server, **(sent or {})}
        if residuals:
            states["extra"] = self._as_rows(residuals)
        files: dict[str, str] = {}
        for name, value in states.items():
            files[name] = content_name(value)
            if not (self.folder / files[name]).exists():
                write_state(self.folder / files[name], value, self._fsync)
        at("checkpointing")
        write_record(
            self.folder / "manifest.json",
            {
                "format": FORMAT,
                "files": files,
                "progress": msgspec.to_builtins(progress, str_keys=True, enc_hook=plain),
            },
            fsync=self._fsync,
        )
        at("recording")
        for old in list_folder(self.folder, "state-*.safetensors"):
            if old.name not in files.values():
                old.unlink()
        kept = [part for _, part in leaves("", states) if isinstance(part, PerClient)]
        rows = {row for part in kept for row in part.names.values()}
        if rows:
            self.rows.prune(rows)

    def _as_rows(self, residuals: Mapping[str, torch.Tensor]) -> Residuals:
        down: dict[str, torch.Tensor] = {}
        rows: dict[tuple[str, int], dict[int, str]] = {}
        known = {}
        for name, value in residuals.items():
            parts = self.OF.fullmatch(name)
            if parts is None or value.dim() != 1 or value.dtype != torch.float32:
                down[name] = value
                continue
            at = id(value)
            if at not in known and at in self._known:
                known[at] = self._known[at]
            elif at not in known:
                none = torch.empty(0), torch.empty(0, dtype=torch.int64)
                known[at] = value, self.rows.write(Tensors(_layout(len(value)), value, *none))
            rows.setdefault((parts[2], len(value)), {})[int(parts[1])] = known[at][1]
        self._known = known
        kept = ((f, PerClient(_layout(n), of, self.rows)) for (f, n), of in rows.items())
        return Residuals(down, tuple(kept))  # type: ignore[call-arg]

    def load(self, server: type[State]) -> tuple[State, RunProgress, dict[str, torch.Tensor]]:
        """Returns what `save` was given. Raises StateError where the checkpoint is torn, altered or
        of another kind.
        """
        progress, files = read_manifest(self.folder)
        state = self._get(files["server"], server)
        residuals = {}
        if "extra" in files:
            more = self._get(files["extra"], Residuals)
            residuals = dict(more.down)
            by_row: dict[str, torch.Tensor] = {}
            for name, rows in more.rows:
                for client, row in rows.names.items():
                    if row not in by_row:
                        by_row[row] = rows[client].vector.clone()
                    residuals[f"client {client}/{name}"] = by_row[row]
            self._known = {id(value): (value, row) for row, value in by_row.items()}
        return state, progress, residuals

    def load_sent(self, under_way: Mapping[int, UnderWay]) -> dict[str, State]:
        """What went down with these tasks, by name. Raises StateError as `load` does."""
        files = read_manifest(self.folder)[1]
        found: dict[str, State] = {}
        for name in sorted({f"sent-{task.sent}" for task in under_way.values()}):
            if name not in files:
                raise StateError(f"{self.folder}/manifest.json: {name} is not there; {RESTORE}.")
            found[name] = self._get(files[name], SentDown)
        return found

    def _get(self, name: str, kind: type[S]) -> S:
        path = self.folder / name
        value = read_state(path, kind, self.rows)
        if content_name(value) != name:
            raise StateError(
                f"{path}: holds another state than the one it is named for; {RESTORE}."
            )
        for _, part in leaves("", value):
            if isinstance(part, PerClient):
                self.rows.check(part)
        return value


def content_name(value: State) -> str:
    return f"state-{content_sha256(value)[:24]}.safetensors"


class Residuals(State):
    """What compressed broadcasts have left out so far, by field; and what compressors remember at
    both ends: (field, rows by client), a pair for each length.
    """

    down: dict[str, torch.Tensor]
    rows: tuple[tuple[str, PerClient], ...] = ()


def _layout(n: int) -> Layout:
    return Layout((Slot("h", (n,), "parameter"),))


class SentDown(State):
    """What went down with a task. form: of its fields, as JSON; enrol: how many of them are the
    client's enrolment.
    """

    form: str
    enrol: int
    body: torch.Tensor  # uint8

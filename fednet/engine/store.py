"""A client's state at home: one file a version, the version named by the task that made it.

A version is written before the reply is sent, and the old one kept. A task names the version it starts from, and the
one that the server's last checkpoint knows: exactly these two and the new one stay. A reply that came too late, a crash
on either side, a task moved to another worker then leave no trace: the next task simply names another version.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from fednet.algorithms.state import State, load, read_state, read_tree, state_sha256, write_state
from fednet.errors import StateError
from fednet.tensors import Tensors


class Record(State):
    """What one client keeps: the method's state, its own buffers, the residuals of its compressed uploads."""

    algorithm: State | None = None
    buffers: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    residuals: dict[str, torch.Tensor] | None = None

    @property
    def empty(self) -> bool:
        """Nothing is kept between rounds."""
        import dataclasses

        own = self.algorithm is None or not dataclasses.fields(self.algorithm)  # type: ignore[arg-type]
        return own and self.buffers is None and not self.residuals

    def sha256(self) -> str:
        return "" if self.empty else state_sha256(self)


class Local(State):
    """A client's last local model, where the method is judged by it."""

    x: Tensors


class ClientStore:
    """The state directory of one run: `ROOT/client-K/ROUND-PHASE-ATTEMPT.safetensors` (`.local` beside it)."""

    def __init__(self, root: Path, client_state: type[State]) -> None:
        self.root = root
        self._type = client_state

    def _folder(self, client: int) -> Path:
        return self.root / f"client-{client}"

    def load(self, client: int, version: str) -> Record | None:
        """That version of a client's record; None for "": it has none yet. StateError where it is not here."""
        if not version:
            return None
        path = self._folder(client) / f"{version}.safetensors"
        if not path.exists():
            raise StateError(f"client {client}: its state of round {version.split('-')[0]} is not in {self.root}; start the client with the --state "
                             "directory it had, or with --state-lost reset to let it begin anew.")
        return read_record(path, self._type)

    def local(self, client: int, version: str) -> Tensors | None:
        path = self._folder(client) / f"{version}.local.safetensors"
        return read_state(path, Local).x if version and path.exists() else None

    def save(self, client: int, version: str, record: Record, local: Tensors | None) -> None:
        """Writes a version, aside and renamed; a crash leaves the old ones as they were."""
        folder = self._folder(client)
        folder.mkdir(parents=True, exist_ok=True)
        if local is not None:
            self._write(folder / f"{version}.local.safetensors", Local(local))
        self._write(folder / f"{version}.safetensors", record)

    def _write(self, path: Path, state: State) -> None:
        """Two workers may write the same version, the same bits: one that was given up, and the one it was given on to."""
        aside = path.with_suffix(f".{os.getpid()}.new")
        write_state(aside, state)
        aside.replace(path)

    def prune(self, client: int, version: str, keep: Sequence[str]) -> None:
        """Deletes the versions of earlier rounds than `version`, but for those to keep. Later ones are left alone: they
        belong to another worker, where this one was given up and did not know it."""
        folder, now = self._folder(client), int(version.split("-")[0])
        if not folder.is_dir():
            return
        for path in folder.iterdir():
            name = path.name.split(".")[0]
            round = name.split("-")[0]
            if name not in keep and round.isdecimal() and int(round) < now:
                path.unlink(missing_ok=True)


def read_record(path: Path, client_state: type[State]) -> Record:
    """A record whose `algorithm` field is of the method's own type."""
    tree, tensors = read_tree(path)
    try:
        return Record(**{name: load(client_state if name == "algorithm" else State, value, tensors) for name, value in tree["$record"].items()})
    except (AttributeError, KeyError, TypeError) as broken:
        raise StateError(f"{path}: not a client's state ({broken}).") from broken


class RowStore:
    """Rows of a `PerClient` on disk, each a file named by its content; what did not change is not rewritten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, row: Tensors) -> str:
        name = row.sha256()[:32]
        path = self.root / f"{name}.safetensors"
        if not path.exists():
            write_state(path, Local(row))
        return name

    def read(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not name.isalnum():  # a checkpoint from elsewhere must not name files elsewhere
            raise StateError(f"{name!r} is not the name of a row.")
        x: Tensors = read_state(self.root / f"{name}.safetensors", Local).x
        return x.vector, x.buffers, x.counters

    def prune(self, keep: set[str]) -> None:
        for path in self.root.glob("*.safetensors"):
            if path.stem not in keep:
                path.unlink(missing_ok=True)

"""The states of clients on disk: one file a version, named after the task that made it.

A version is written before the reply is sent, and the old one is kept. A task names the version
that it starts from, and the one that the server's last checkpoint knows; these two and the new one
stay. So a late reply, a crash on either side or a task that moved to another worker changes
nothing: the next task names another version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fednet.algorithms.state import (
    State,
    load,
    read_header,
    read_state,
    read_tree,
    state_sha256,
    write_state,
)
from fednet.errors import StateAbsent, StateError
from fednet.files import list_names
from fednet.tensors import Tensors
from fednet.wire.compressors.base import Memory


class Record(State):
    """The state of one client: the method's, its own buffers, the residuals of its compressors and,
    under names of its own with these, the optimizer's state of `train.keep_optimizer`.
    """

    algorithm: State | None = None
    buffers: torch.Tensor | None = None
    counters: torch.Tensor | None = None
    residuals: dict[str, torch.Tensor] | None = None

    @property
    def empty(self) -> bool:
        """Returns whether nothing is kept between rounds."""
        if self.buffers is not None or self.residuals:
            return False
        return self.algorithm is None or not dataclasses.fields(self.algorithm)  # type: ignore[arg-type]

    def past(self, where: str) -> Memory:
        """Returns what compressors remember of earlier messages, and leave for the next record."""
        known = self.residuals or {}
        return Memory(known, dict(known), where)

    def own(self, initial: Tensors) -> Tensors | None:
        """Returns the whole initial model with the client's own buffers. None if it has none."""
        if self.buffers is None or self.counters is None:
            return None
        return Tensors(initial.layout, initial.vector, self.buffers, self.counters)

    @functools.cached_property
    def sha256(self) -> str:  # the reply says it, and the file
        """Returns the SHA-256 of the record; "" if nothing is kept."""
        return "" if self.empty else state_sha256(self)


class LocalModel(State):
    """A client's last local model, where clients are evaluated with it."""

    x: Tensors


# A version's files: its state, its local model, and either as it is being written (`files.ASIDE`).
_VERSION = re.compile(r"\.?(([0-9]+)-[0-9]+-[0-9]+)(\.local)?\.safetensors(\..*\.[0-9]+)?")

LOST = "put back what was there, or start its fednet-client with the --state directory it had"


class ClientStore:
    """Reads and writes the state directory of one run:
    `ROOT/client-K/ROUND-PHASE-ATTEMPT.safetensors` (`.local` beside it). fsync: what is saved
    survives a power loss (`checkpoint.fsync`).
    """

    def __init__(self, root: Path, client_state: type[State], fsync: bool = False) -> None:
        self.root = root
        self._type = client_state
        self._fsync = fsync

    def _folder(self, client: int) -> Path:
        return self.root / f"client-{client}"

    def load(self, client: int, version: str, sha256: str = "") -> Record:
        """Returns that version of a client's record. sha256: of the record as the server knows it,
        "" if it does not. Raises StateAbsent if the record is missing, damaged or another.
        """
        path = self._folder(client) / f"{version}.safetensors"
        if not path.exists():
            raise self._absent(client, version, "state")
        with _as_lost_state():
            found, known = read_client(path, self._type)
        if sha256 and known != sha256:
            raise StateAbsent(
                f"{path}: client {client}'s state of another run than the server's; {LOST}."
            )
        return found

    def local(self, client: int, version: str) -> Tensors | None:
        """Returns the local model that was kept with that version; None if none was. Raises
        StateAbsent where it is missing, damaged or another.
        """
        record = self._folder(client) / f"{version}.safetensors"
        known = None
        if version and record.exists():
            with _as_lost_state():
                known = read_header(record)[0].get("local")
        if known is None:
            return None
        path = self._folder(client) / f"{version}.local.safetensors"
        if not path.exists():
            raise self._absent(client, version, "local model")
        with _as_lost_state():
            found = read_state(path, LocalModel)
            is_known = read_header(path)[1] == known
        if not is_known:
            raise StateAbsent(
                f"{path}: not the local model that client {client} kept with its state of that "
                f"round; put back what was there."
            )
        return found.x

    def _absent(self, client: int, version: str, what: str) -> StateAbsent:
        round = version.split("-")[0]
        return StateAbsent(
            f"client {client}: its {what} of round {round} is not in {self.root}; {LOST}."
        )

    def save(self, client: int, version: str, record: Record, local: Tensors | None) -> None:
        """Writes a version, aside and renamed; a crash leaves the old ones as they were."""
        folder = self._folder(client)
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:  # it is not made anew
            raise StateError(
                f"{self.root}: the folder of the clients' states is gone, while a run uses it; put "
                f"it back."
            ) from None
        # Two workers may write the same version with the same bits, where a task moved to another.
        beside = {"sha256": record.sha256}
        if local is not None:
            path = folder / f"{version}.local.safetensors"
            beside["local"] = write_state(path, LocalModel(local), self._fsync)
        write_state(folder / f"{version}.safetensors", record, self._fsync, beside)

    def prune(self, client: int, version: str, keep: Sequence[str]) -> None:
        """Deletes the versions of earlier rounds than `version`, but for those to keep, and what a
        killed process left half written of them. Later ones belong to another worker, if the server
        gave this one up without its knowledge.
        """
        now = int(version.split("-")[0])
        folder = self._folder(client)
        for name in list_names(folder):
            found = _VERSION.fullmatch(name)
            if found is None or int(found[2]) >= now:
                continue
            if name.startswith(".") or found[1] not in keep:
                (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _as_lost_state() -> Iterator[None]:
    """Makes a file that is not what was written there a state that is lost: of its client alone,
    which begins again where the configuration says so.
    """
    try:
        yield
    except StateError as wrong:
        raise StateAbsent(str(wrong)) from wrong


def read_client(path: Path, client_state: type[State]) -> tuple[Record, str]:
    """Returns a record whose `algorithm` field is of the method's own type, and the SHA-256 that
    was written with it. The file's digest covers both.
    """
    tree, tensors = read_tree(path)
    try:
        kept = Record(
            **{
                name: load(client_state if name == "algorithm" else State, value, tensors)
                for name, value in tree["$record"].items()
            }
        )
        return kept, str(tree["sha256"])
    except (AttributeError, KeyError, TypeError, StateError) as broken:
        raise StateError(f"{path}: not this client's state ({broken}); {LOST}.") from broken

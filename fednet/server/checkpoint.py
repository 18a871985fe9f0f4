"""What `--resume` needs: a manifest of content-named files, renamed into place.

A file's name tells its content, so what did not change is not written again, and a crash while
writing leaves the last checkpoint whole. Replies of rounds that no checkpoint holds yet lie in the
spool beside it, as they came.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fednet.algorithms.state import PerClient, State, content_sha256, read_state, write_state
from fednet.errors import StateError
from fednet.experiment.rundir import plain, write_json
from fednet.experiment.store import RowStore

# No file elsewhere.
StateName = Annotated[str, msgspec.Meta(pattern=r"^state-[0-9a-f]+\.safetensors\Z")]


class Progress(msgspec.Struct, kw_only=True):
    """How far a run is, beside the method's own state. versions, states: by client, the version of
    its state that was last used, and its hash. records: lines that belong to the checkpoint and may
    not have reached their files yet. totals: spent bytes; useful, predicted: payload bytes of the
    method's own messages by direction and kind, as measured and as its declarations say. stopped:
    why the run ended before its last round.
    """

    run: str
    round: int = 0
    versions: dict[int, str] = {}
    states: dict[int, str] = {}
    lengths: dict[str, int] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    void: int = 0
    best: float | None = None
    best_round: int = 0
    seconds: float = 0.0
    virtual: float = 0.0
    totals: dict[str, int] = {}
    useful: dict[str, dict[str, int]] = {}
    predicted: dict[str, dict[str, int]] = {}
    stopped: str = ""
    finished: bool = False
    environment: dict[str, Any] = {}


class Checkpoints:
    """The folder `checkpoint/` of a run."""

    def __init__(self, folder: Path, fsync: bool = False) -> None:
        self.folder = folder
        self.rows = RowStore(folder / "rows", fsync)
        self._fsync = fsync

    @property
    def exists(self) -> bool:
        return (self.folder / "manifest.json").exists()

    def incarnation(self) -> int:
        """Counts the server processes of this run, from 1."""
        path = self.folder / "incarnation"
        number = int(path.read_text()) + 1 if path.exists() else 1
        aside = path.with_suffix(".part")
        aside.write_text(str(number))
        aside.replace(path)
        return number

    def save(
        self,
        server: State,
        progress: Progress,
        extra: State | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        """Makes (server, progress) the state that a resume starts from. `at` is told of the points
        on the way.
        """
        self.rows.settle()
        files = {"server": self._put(server)}
        if extra is not None:
            files["extra"] = self._put(extra)
        at("checkpointing")
        write_json(
            self.folder / "manifest.json",
            {
                "files": files,
                "progress": msgspec.to_builtins(progress, str_keys=True, enc_hook=plain),
            },
            indent=None,
        )
        if self._fsync:
            handle = os.open(self.folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        at("recording")
        for old in self.folder.glob("state-*.safetensors"):
            if old.name not in files.values():
                old.unlink()
        rows = {r for r in _rows(server) if isinstance(r, str)}
        if rows:
            self.rows.prune(rows)

    def _put(self, value: State) -> str:
        name = f"state-{content_sha256(value)[:24]}.safetensors"
        if not (self.folder / name).exists():
            aside = self.folder / "state.new"
            write_state(aside, value)
            if self._fsync:
                with aside.open("rb") as file:
                    os.fsync(file.fileno())
            aside.replace(self.folder / name)
        return name

    def progress(self) -> Progress:
        """How far the checkpoint is. Raises StateError where it is torn."""
        return self._manifest()[0]

    def _manifest(self) -> tuple[Progress, dict[str, str]]:
        path = self.folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text())
            files = msgspec.convert(manifest["files"], dict[str, StateName])
            return msgspec.convert(manifest["progress"], Progress, strict=False), {
                "server": files.pop("server"),
                **files,
            }
        except (
            OSError,
            KeyError,
            TypeError,
            ValueError,
            RecursionError,
        ) as broken:  # what json and msgspec raise are ValueErrors
            raise StateError(f"{path}: not a whole checkpoint ({broken}).") from broken

    def load(
        self, server: type[State], extra: type[State] | None = None
    ) -> tuple[Any, Progress, Any]:
        """Raises StateError where the checkpoint is torn or of another kind."""
        progress, files = self._manifest()
        state = read_state(self.folder / files["server"], server, self.rows)
        more = (
            read_state(self.folder / files["extra"], extra, self.rows)
            if extra is not None and "extra" in files
            else None
        )
        return state, progress, more


def _rows(state: State) -> Iterator[Any]:
    import dataclasses

    for f in dataclasses.fields(state):  # type: ignore[arg-type]
        value = getattr(state, f.name)
        if isinstance(value, PerClient):
            yield from value.rows.values()

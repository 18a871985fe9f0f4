"""What `--resume` needs: a manifest of content-named files, renamed into place.

A file's name tells its content, so what did not change is not written again, and a crash while writing leaves the last
checkpoint whole. Replies of rounds that no checkpoint holds yet lie in the spool beside it, as they came.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fednet.algorithms.state import PerClient, State, read_state, write_state
from fednet.engine.rundir import plain, write_json
from fednet.engine.store import RowStore
from fednet.errors import StateError
from fednet.wire.messages import Field, Key

StateName = Annotated[str, msgspec.Meta(pattern=r"^state-[0-9a-f]+\.safetensors$")]  # no file elsewhere


class Progress(msgspec.Struct, kw_only=True):
    """How far a run is, beside the method's own state. versions, states: by client, the version of its state that was
    last used, and its hash. records: lines that belong to the checkpoint and may not have reached their files yet. totals: spent
    bytes; useful, predicted: payload bytes of the method's own messages by direction and kind, as measured and as its
    declarations say. stopped: why the run ended before its last round."""

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
        self.rows = RowStore(folder / "rows")
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

    def save(self, server: State, progress: Progress, extra: State | None = None, at: Callable[[str], None] = lambda point: None) -> None:
        """Makes (server, progress) the state that a resume starts from. `at` is told of the points on the way."""
        files = {"server": self._put(server)}
        if extra is not None:
            files["extra"] = self._put(extra)
        at("checkpointing")
        write_json(self.folder / "manifest.json", {"files": files, "progress": msgspec.to_builtins(progress, str_keys=True, enc_hook=plain)}, indent=None)
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
        aside = self.folder / "state.new"
        name = f"state-{write_state(aside, value)[:24]}.safetensors"
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
            return msgspec.convert(manifest["progress"], Progress, strict=False), msgspec.convert(manifest["files"], dict[str, StateName])
        except (OSError, KeyError, TypeError, json.JSONDecodeError, RecursionError, msgspec.ValidationError) as broken:
            raise StateError(f"{path}: not a whole checkpoint ({broken}).") from broken

    def load(self, server: type[State], extra: type[State] | None = None) -> tuple[Any, Progress, Any]:
        """Raises StateError where the checkpoint is torn or of another kind."""
        progress, files = self._manifest()
        state = read_state(self.folder / files["server"], server, self.rows)
        more = read_state(self.folder / files["extra"], extra, self.rows) if extra is not None and "extra" in files else None
        return state, progress, more


def _rows(state: State) -> Iterator[Any]:
    import dataclasses

    for f in dataclasses.fields(state):  # type: ignore[arg-type]
        value = getattr(state, f.name)
        if isinstance(value, PerClient):
            yield from value.rows.values()


@dataclass(frozen=True, slots=True)
class Spooled:
    """A reply on disk. `path` holds its payload as received; `task`: the checksum of what it answers, and the version of
    the client's state that it started from."""

    key: Key
    form: tuple[Field, ...]
    path: Path
    check: int
    state: str
    kept: bool
    task: tuple[int, str]
    seconds: float = 0.0
    worker: dict[str, Any] = field(default_factory=dict)
    split: tuple[float, ...] = ()  # of `seconds`: training, evaluating, encoding
    taken_s: float = 0.0  # from the hand-out to the whole reply
    arrived: float = 0.0  # when, on this process's clock

    held: list[bytearray] = field(default_factory=list)  # its payload, where there is room for it in memory

    def body(self) -> bytearray:
        if self.held:
            return self.held[0]
        data = bytearray(self.path.stat().st_size)
        with self.path.open("rb", buffering=0) as file:
            file.readinto(data)
        return data


HELD_BYTES = 128 << 20  # of payloads that are kept in memory too, until they are folded; more are read back from disk


class Spool:
    """Replies as received, `checkpoint/round-T/PHASE-CLIENT-PURPOSE.bin`, each with a `.json` once it is whole.

    One thread writes; `release` and `clear` may be called by another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Key, Any] = {}
        self._held: dict[Key, list[bytearray]] = {}
        self._lock = threading.Lock()

    def _base(self, key: Key) -> Path:
        return self.folder / f"round-{key.round}" / f"{key.phase}-{key.client}-{key.purpose}"

    def store(self, key: Key, offset: int, data: memoryview, size: int) -> None:
        """Appends bytes of a payload of `size` bytes; offset 0 starts it anew."""
        if offset == 0:
            self._hold(key, size)
            old = self._open.pop(key, None)
            if old is not None:
                old.close()
            path = self._base(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
            self._open[key] = path.with_suffix(".bin").open("wb")
        file = self._open[key]
        if file.tell() != offset:
            raise StateError(f"spool of client {key.client}: {file.tell()} bytes are there, the next come at {offset}")
        file.write(data)
        if held := self._held.get(key):
            held[0][offset:offset + len(data)] = data

    def _hold(self, key: Key, size: int) -> None:
        with self._lock:
            self._held.pop(key, None)
            if sum(len(b) for held in self._held.values() for b in held) + size <= HELD_BYTES:
                self._held[key] = [bytearray(size)]

    def release(self, reply: Spooled) -> None:
        """The payload has been folded: it need not be in memory any more."""
        with self._lock:
            reply.held.clear()
            self._held.pop(reply.key, None)

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. What is there of it may be overwritten by a later attempt already."""
        with self._lock:
            self._held.pop(key, None)
        file = self._open.pop(key, None)
        if file is not None:
            file.close()

    def whole(self, key: Key, form: Sequence[Field], check: int, state: str, kept: bool, task: tuple[int, str], seconds: float,
              worker: dict[str, Any]) -> Spooled:
        """The payload is complete: it can be read, but counts for a resume only once `seal` was called."""
        self._open.pop(key).close()
        return Spooled(key, tuple(form), self._base(key).with_suffix(".bin"), check, state, kept, task, seconds, worker,
                       held=self._held.get(key, []))

    def seal(self, reply: Spooled) -> None:
        """The reply was checked: a resume folds it without asking again."""
        write_json(self._base(reply.key).with_suffix(".json"), msgspec.to_builtins(
            {"key": reply.key, "form": list(reply.form), "check": reply.check, "state": reply.state, "kept": reply.kept, "task": reply.task,
             "seconds": reply.seconds, "worker": reply.worker, "split": reply.split, "taken_s": reply.taken_s}), indent=None)

    def discard(self, key: Key) -> None:
        with self._lock:
            self._held.pop(key, None)
        self._base(key).with_suffix(".json").unlink(missing_ok=True)
        self._base(key).with_suffix(".bin").unlink(missing_ok=True)

    def found(self, round: int, phase: int) -> dict[tuple[int, str], Spooled]:
        """The sealed replies of a phase, by client and purpose."""
        replies: dict[tuple[int, str], Spooled] = {}
        for path in sorted((self.folder / f"round-{round}").glob(f"{phase}-*.json")):
            raw = json.loads(path.read_text())
            key, form = msgspec.convert(raw["key"], Key), msgspec.convert(raw["form"], list[Field])
            body = path.with_suffix(".bin")
            if body.exists() and body.stat().st_size == sum(f.size for f in form):
                replies[key.client, key.purpose] = Spooled(key, tuple(form), body, raw["check"], raw["state"], raw["kept"], (raw["task"][0], raw["task"][1]),
                                                           raw["seconds"], raw["worker"], tuple(raw["split"]), raw["taken_s"])
        return replies

    def clear(self, up_to: int) -> None:
        """Deletes the rounds that a checkpoint holds."""
        with self._lock:
            for key in [k for k in self._held if k.round <= up_to]:
                del self._held[key]
        for folder in self.folder.glob("round-*"):
            if int(folder.name.split("-")[1]) <= up_to:
                shutil.rmtree(folder)

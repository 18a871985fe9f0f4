"""Replies of rounds that no checkpoint holds yet, on disk beside it as they came: what `--resume` need not ask for again.

A file that a round is done with is written over by a later one: that costs a tenth of writing a new one, whose pages the
system would have to find and clear first (3 ms against 12 to 40 ms for 45 MB where this was measured).
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from fednet.buffers import lend
from fednet.engine.rundir import write_json
from fednet.errors import StateError
from fednet.wire.messages import Field, Key

SPARE_BYTES = 1 << 30  # of files that wait to be written over


class Seal(msgspec.Struct, kw_only=True):
    """What stands beside a spooled reply, see `Spooled`."""

    key: Key
    form: list[Field]
    check: int
    state: str
    kept: bool
    task: tuple[int, str]
    seconds: float
    worker: dict[str, Any]
    split: list[float]
    taken_s: float


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

    def body(self) -> memoryview:
        """Its payload, in memory of its own: the file may be another reply's before what is decoded from it is forgotten."""
        data = lend(self.path.stat().st_size).data
        with self.path.open("rb", buffering=0) as file:
            read = file.readinto(data)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    def glance(self) -> memoryview:
        """Its payload as the system has it in memory already: to be let go of at once."""
        with self.path.open("rb", buffering=0) as file:
            empty = os.fstat(file.fileno()).st_size == 0  # which cannot be mapped
            return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


class Spool:
    """Replies as received, `checkpoint/round-T/PHASE-CLIENT-PURPOSE.bin`, each with a `.json` once it is whole; files to
    write over in `checkpoint/spare/`.

    One thread writes; `clear` and `close` may be called by another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Key, BinaryIO] = {}
        self._spares: list[Path] = []
        self._named = 0
        self._lock = threading.Lock()
        shutil.rmtree(folder / "spare", ignore_errors=True)  # an earlier server's

    def _base(self, key: Key) -> Path:
        return self.folder / f"round-{key.round}" / f"{key.phase}-{key.client}-{key.purpose}"

    # -- writing -------------------------------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: memoryview) -> None:
        """Appends bytes of a payload; offset 0 starts it anew."""
        if offset == 0:
            self.abandon(key)
            self._begin(key)
        file = self._open[key]
        if file.tell() != offset:
            raise StateError(f"spool of client {key.client}: {file.tell()} bytes are there, the next come at {offset}")
        file.write(data)

    def _begin(self, key: Key) -> None:
        """Opens a file to write to from its start. What an earlier attempt or a spare has in it is written over."""
        base = self._base(key)
        base.parent.mkdir(parents=True, exist_ok=True)
        base.with_suffix(".json").unlink(missing_ok=True)
        path = base.with_suffix(".bin")
        with self._lock:
            if self._spares and not path.exists():
                self._spares.pop().replace(path)
            self._open[key] = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")  # noqa: SIM115 (closed by `whole`)

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. What is there of it may be overwritten by a later attempt already."""
        with self._lock:
            file = self._open.pop(key, None)
        if file is not None:
            file.close()

    def whole(self, key: Key, form: Sequence[Field], check: int, state: str, kept: bool, task: tuple[int, str], seconds: float,
              worker: dict[str, Any]) -> Spooled:
        """The payload is complete: it can be read, but counts for a resume only once `seal` was called."""
        with self._lock:
            file = self._open.pop(key)
        file.truncate()  # what was there before may have been longer
        file.close()
        return Spooled(key, tuple(form), self._base(key).with_suffix(".bin"), check, state, kept, task, seconds, worker)

    def seal(self, reply: Spooled) -> None:
        """The reply was checked: a resume folds it without asking again."""
        write_json(self._base(reply.key).with_suffix(".json"), msgspec.to_builtins(Seal(
            key=reply.key, form=list(reply.form), check=reply.check, state=reply.state, kept=reply.kept, task=reply.task, seconds=reply.seconds,
            worker=reply.worker, split=list(reply.split), taken_s=reply.taken_s)), indent=None)

    def discard(self, key: Key) -> None:
        self._base(key).with_suffix(".json").unlink(missing_ok=True)
        self._base(key).with_suffix(".bin").unlink(missing_ok=True)

    # -- reading -------------------------------------------------------------------------------------------------------
    def found(self, round: int, phase: int) -> dict[tuple[int, str], Spooled]:
        """The sealed replies of a phase, by client and purpose."""
        replies: dict[tuple[int, str], Spooled] = {}
        for path in sorted((self.folder / f"round-{round}").glob(f"{phase}-*.json")):
            try:
                seal = msgspec.json.decode(path.read_bytes(), type=Seal)
            except (ValueError, RecursionError) as broken:
                raise StateError(f"{path}: not what was written there ({broken}); without it, its client is asked again.") from broken
            body = path.with_suffix(".bin")
            if path == self._base(seal.key).with_suffix(".json") and body.exists() and body.stat().st_size == sum(f.size for f in seal.form):
                replies[seal.key.client, seal.key.purpose] = Spooled(seal.key, tuple(seal.form), body, seal.check, seal.state, seal.kept, seal.task,
                                                                     seal.seconds, seal.worker, tuple(seal.split), seal.taken_s)
        return replies

    # -- the end of rounds ---------------------------------------------------------------------------------------------
    def clear(self, up_to: int) -> None:
        """Lets go of the rounds that a checkpoint holds."""
        for folder in self.folder.glob("round-*"):
            if int(folder.name.split("-")[1]) <= up_to:
                self._spare(folder)
                shutil.rmtree(folder)

    def close(self) -> None:
        """No other round will come to this process."""
        with self._lock:
            self._spares = []
            shutil.rmtree(self.folder / "spare", ignore_errors=True)

    def _spare(self, round: Path) -> None:
        """Moves a round's payloads to where later ones take their files from."""
        place = self.folder / "spare"
        place.mkdir(exist_ok=True)
        with self._lock:
            busy = {self._base(key).with_suffix(".bin") for key in self._open}  # a late upload's, not called off yet
            size = sum(p.stat().st_size for p in self._spares)
            for path in round.glob("*.bin"):
                size += path.stat().st_size
                if size > SPARE_BYTES:
                    break
                if path not in busy:
                    self._named += 1
                    self._spares.append(path.replace(place / f"{self._named}.bin"))

"""Replies of rounds that no checkpoint holds yet, on disk beside it as they came: what `--resume`
need not ask for again.

A file that a round is done with is written over by a later one: that costs a tenth of writing a new
one, whose pages the system would have to find and clear first (3 ms against 12 to 40 ms for 45 MB
where this was measured).
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fednet.buffers import lend
from fednet.descriptors import reaching
from fednet.errors import StateError
from fednet.files import checked, digest, opened, read_lines, repair, write_all
from fednet.wire.messages import Field, Key

SEALS = "seals.jsonl"
SPARE_BYTES = 1 << 30  # of files that wait to be written over


class Seal(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What vouches for a spooled reply, see `Spooled`. broken: nothing does any more, the payload
    is being written over.
    """

    key: Key
    form: list[Field] = []
    check: bytes = b""
    state: str = ""
    kept: bool = False
    task: tuple[bytes, str] = (b"", "")
    seconds: float = 0.0
    worker: dict[str, Any] = {}
    split: list[float] = []
    taken_s: float = 0.0
    reported: dict[str, float] = {}
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Spooled:
    """A reply on disk. `path` holds its payload as received; `task`: the digest of what it
    answers, and the version of the client's state that it started from.
    """

    key: Key
    form: tuple[Field, ...]
    path: str
    check: bytes
    state: str
    kept: bool
    task: tuple[bytes, str]
    seconds: float = 0.0
    worker: dict[str, Any] = field(default_factory=dict)
    split: tuple[float, ...] = ()  # of `seconds`: training, evaluating, encoding
    taken_s: float = 0.0  # from the hand-out to the whole reply
    arrived: float = 0.0  # when, on this process's clock
    reported: dict[str, float] = field(default_factory=dict)  # by the method, of its client

    def body(self) -> memoryview:
        """Its payload, in memory of its own: the file may be another reply's before what is decoded
        from it is forgotten.
        """
        file = opened(self.path, os.O_RDONLY)
        try:
            data = lend(os.fstat(file).st_size).data
            read = 0
            while read < len(data) and (got := os.readv(file, [data[read:]])):
                read += got
        finally:
            os.close(file)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    def intact(self) -> bool:
        """Whether its payload is as it was received: a power cut may have lost it, or left an
        earlier one's bytes in its place.
        """
        size = sum(f.size for f in self.form)
        return (
            os.path.exists(self.path)
            and os.path.getsize(self.path) == size
            and digest([self.glance()]) == self.check
        )

    def glance(self) -> memoryview:
        """Its payload as the system has it in memory already: to be let go of at once."""
        file = opened(self.path, os.O_RDONLY)
        try:
            empty = os.fstat(file).st_size == 0  # which cannot be mapped
            if empty:
                return memoryview(b"")
            # a mapping has a descriptor of its own
            return memoryview(reaching(lambda: mmap.mmap(file, 0, access=mmap.ACCESS_COPY)))
        finally:
            os.close(file)


class Spool:
    """Replies as received, `checkpoint/round-T/PHASE-CLIENT-PURPOSE.bin`, and a line of
    `seals.jsonl` beside them for each that was checked; files to write over in `checkpoint/spare/`.

    One thread writes; `found`, `clear` and `close` may be called by another.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Key, int] = {}  # descriptors
        self._sealed: dict[
            int, set[str]
        ] = {}  # by round: paths of payloads that a line vouches for
        self._books: dict[int, int] = {}  # descriptors of seals.jsonl, by round
        self._spares: list[str] = []
        self._named = 0
        self._lock = threading.Lock()
        shutil.rmtree(folder / "spare", ignore_errors=True)  # an earlier server's

    def _path(self, key: Key) -> str:
        """As text: a round of many small replies would spend its time on putting paths together."""
        return f"{self.folder}/round-{key.round}/{key.phase}-{key.client}-{key.purpose}.bin"

    # -- writing -----------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: memoryview) -> None:
        """Appends bytes of a payload; offset 0 starts it anew."""
        if offset == 0:
            self.abandon(key)
            self._begin(key)
        file = self._open[key]
        at = os.lseek(file, 0, os.SEEK_CUR)
        if at != offset:
            raise StateError(
                f"spool of client {key.client}: {at} bytes are there, the next come at {offset}"
            )
        write_all(file, data)

    def _begin(self, key: Key) -> None:
        """Opens a file to write to from its start. What an earlier attempt or a spare has in it is
        written over.
        """
        path = self._path(key)
        # Before a byte of it changes: half of it must not be taken for the whole.
        if path in self._sealed.get(key.round, ()):
            self._unseal(key)
        with self._lock:
            if key.round not in self._books:
                self._books[key.round] = self._book(key.round)
            if self._spares and not os.path.exists(path):
                os.replace(self._spares.pop(), path)
            self._open[key] = opened(path, os.O_RDWR | os.O_CREAT)

    def _book(self, round: int) -> int:
        place = self.folder / f"round-{round}"
        place.mkdir(parents=True, exist_ok=True)
        repair(place / SEALS)
        return opened(place / SEALS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. What is there of it may be overwritten by a later attempt
        already.
        """
        with self._lock:
            file = self._open.pop(key, None)
        if file is not None:
            os.close(file)

    def whole(
        self,
        key: Key,
        form: Sequence[Field],
        check: bytes,
        state: str,
        kept: bool,
        task: tuple[bytes, str],
        seconds: float,
        worker: dict[str, Any],
    ) -> Spooled:
        """The payload is complete: it can be read, but counts for a resume only once `seal` was
        called.
        """
        with self._lock:
            file = self._open.pop(key)
        size = os.lseek(file, 0, os.SEEK_CUR)
        if os.fstat(file).st_size != size:  # what was there before was longer
            os.truncate(file, size)
        os.close(file)
        return Spooled(key, tuple(form), self._path(key), check, state, kept, task, seconds, worker)

    def seal(self, reply: Spooled) -> None:
        """The reply was checked: a resume folds it without asking again."""
        self._note(
            reply.key.round,
            Seal(
                key=reply.key,
                form=list(reply.form),
                check=reply.check,
                state=reply.state,
                kept=reply.kept,
                task=reply.task,
                seconds=reply.seconds,
                worker=reply.worker,
                split=list(reply.split),
                taken_s=reply.taken_s,
                reported=reply.reported,
            ),
        )
        self._sealed.setdefault(reply.key.round, set()).add(reply.path)

    def _unseal(self, key: Key) -> None:
        self._note(key.round, Seal(key=key, broken=True))
        self._sealed[key.round].remove(self._path(key))

    def _note(self, round: int, seal: Seal) -> None:
        with self._lock:
            if round not in self._books:
                self._books[round] = self._book(round)
            write_all(self._books[round], checked(msgspec.json.encode(seal)))

    def disown(self, reply: Spooled) -> None:
        """The reply was checked and is of no use after all: nothing vouches for it any more."""
        if reply.path in self._sealed.get(reply.key.round, ()):
            self._unseal(reply.key)

    def discard(self, key: Key) -> None:
        """The payload is of no use. It was begun, so that nothing vouches for it."""
        os.unlink(self._path(key))

    # -- reading -----------------------------------------------------------------------------------
    def found(self, round: int, phase: int) -> dict[tuple[int, str], Spooled]:
        """The sealed replies of a phase whose payloads are as they were received, by client and
        purpose. Raises StateError where a whole line is not the seal that was written.
        """
        book = self.folder / f"round-{round}" / SEALS
        vouched = {p: seal for p, seal in self._seals(book).items() if seal.key.phase == phase}
        # Whatever became of the payloads: the next ones are others.
        self._sealed.setdefault(round, set()).update(vouched)
        replies = (
            Spooled(
                s.key,
                tuple(s.form),
                path,
                s.check,
                s.state,
                s.kept,
                s.task,
                s.seconds,
                s.worker,
                tuple(s.split),
                s.taken_s,
                reported=s.reported,
            )
            for path, s in vouched.items()
        )
        return {(r.key.client, r.key.purpose): r for r in replies if r.intact()}

    def sealed(self) -> set[Key]:
        """The replies that were checked, of all rounds that no checkpoint holds."""
        books = self.folder.glob(f"round-*/{SEALS}")
        return {seal.key for book in books for seal in self._seals(book).values()}

    def _seals(self, book: Path) -> dict[str, Seal]:
        """By path: of several the last counts."""
        seals: dict[str, Seal] = {}
        for number, record in enumerate(read_lines(book) if book.exists() else (), 1):
            try:
                seal = msgspec.convert(record, Seal)
            except ValueError as broken:
                raise StateError(
                    f"{book}:{number}: no seal ({broken}); without this line, its client is asked "
                    f"again."
                ) from broken
            seals[self._path(seal.key)] = seal
        return {path: seal for path, seal in seals.items() if not seal.broken}

    # -- the end of rounds -------------------------------------------------------------------------
    def clear(self, up_to: int) -> None:
        """Lets go of the rounds that a checkpoint holds."""
        for folder in self.folder.glob("round-*"):
            round = int(folder.name.split("-")[1])
            if round <= up_to:
                self._spare(folder)
                with self._lock:
                    book = self._books.pop(round, None)
                    self._sealed.pop(round, None)
                    shutil.rmtree(folder)
                if book is not None:
                    os.close(book)

    def close(self) -> None:
        """No other round will come to this process."""
        with self._lock:
            for book in self._books.values():
                os.close(book)
            self._books, self._spares = {}, []
            shutil.rmtree(self.folder / "spare", ignore_errors=True)

    def _spare(self, round: Path) -> None:
        """Moves a round's payloads to where later ones take their files from."""
        place = self.folder / "spare"
        place.mkdir(exist_ok=True)
        with self._lock:
            busy = {self._path(key) for key in self._open}  # a late upload's, not called off yet
            size = sum(os.path.getsize(p) for p in self._spares)
            for path in round.glob("*.bin"):
                size += path.stat().st_size
                if size > SPARE_BYTES:
                    break
                if str(path) not in busy:
                    self._named += 1
                    self._spares.append(str(path.replace(place / f"{self._named}.bin")))

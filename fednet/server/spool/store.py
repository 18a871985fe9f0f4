"""The replies of the rounds that are under way, in memory and on disk.

A small reply stays in memory until it is folded; for a server that comes after this one it lies
behind its seal in the round's one log, which is only ever appended to. A large one has a file of
its own: it comes in many parts, which are written once, as they come; and it is checked and folded
where its bytes then lie, in the system's cache. A file that a round is done with is written over by
a later one, unless something holds its bytes still: that costs a tenth of writing a new one, whose
pages the system would have to find and clear first (3 ms against 12 to 40 ms for 45 MB where this
was measured). Decoded replies wait for the fold, `reply.HELD_BYTES` of all together.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet.buffers import lend
from fednet.errors import StateError
from fednet.files import OWN, opened, write_all
from fednet.pages import is_read
from fednet.plain import JsonDict
from fednet.server.spool.log import LOG, Log, Seal, Sealed, sealed_in
from fednet.server.spool.reply import HeldMemory, Spooled
from fednet.wire.messages import Field, Key

SMALL_BYTES = 64 << 10  # of a payload that lies in the log: at most
SPARE_BYTES = 1 << 30  # of files that wait to be written over


@dataclass(slots=True)
class _Upload:
    """A payload that is coming in. file: its descriptor, of a large one. memory: in which it
    counts as held.
    """

    size: int
    memory: HeldMemory | None
    got: int = 0
    file: int | None = None
    held: memoryview | None = None

    def add(self, data: memoryview) -> None:
        if self.file is not None:
            write_all(self.file, data)
        if self.held is None and len(data) == self.size:
            self.held = data  # whole at once, in memory that is the receiver's to keep
        elif self.held is not None:
            self.held[self.got : self.got + len(data)] = data
        self.got += len(data)


class Spool:
    """`checkpoint/round-T/`: `replies.log` with the seals of the round's replies and what is small
    of them (see `seals`), `PHASE-CLIENT-PURPOSE.bin` with the payload of each large one; in
    `checkpoint/spare/` files to write over.

    One thread writes; `found`, `clear` and `close` may be called by another. What was sealed is on
    the disk once `flush` has returned.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._uploads: dict[Key, _Upload] = {}
        self._sealed: dict[int, set[str]] = {}  # by round: names of replies that a seal vouches for
        self._logs: dict[int, Log] = {}  # by round
        self._memory = HeldMemory()
        self._over: list[Spooled] = []  # for whose payloads there is no room in memory
        self._spares: list[str] = []
        self._named = 0
        self._lock = threading.Lock()
        shutil.rmtree(folder / "spare", ignore_errors=True)  # an earlier server's

    def _path(self, key: Key) -> str:
        """A reply's file, as text: to put paths together costs more than a small reply."""
        return f"{self.folder}/round-{key.round}/{_name(key)}.bin"

    # -- writing -----------------------------------------------------------------------------------
    def store(self, key: Key, offset: int, data: memoryview, size: int) -> None:
        """Bytes of a payload of that size, in order; offset 0 starts it anew."""
        if offset == 0:
            self.abandon(key)
            self._uploads[key] = self._begin(key, size, data)
        upload = self._uploads[key]
        if upload.got != offset:
            raise StateError(
                f"spool of client {key.client}: {upload.got} bytes are there, the next come at "
                f"{offset}"
            )
        upload.add(data)

    def _begin(self, key: Key, size: int, first: memoryview) -> _Upload:
        """What an earlier attempt or a spare has in a file is written over. first: what comes of it
        now.
        """
        # Before a byte of it changes: half of it must not be taken for the whole.
        if _name(key) in self._sealed.get(key.round, ()):
            self._unseal(key)
        upload = _Upload(size, self._memory if self._memory.take(key.round, size) else None)
        if len(first) < size <= SMALL_BYTES:
            upload.held = lend(size).data
        if size > SMALL_BYTES:
            path = self._path(key)
            with self._lock:
                self._log(key.round)  # and the folder
                if os.path.exists(path) and is_read(path):
                    os.unlink(path)
                if self._spares and not os.path.exists(path):
                    os.replace(self._spares.pop(), path)
                upload.file = opened(path, os.O_RDWR | os.O_CREAT | OWN)
        return upload

    def _log(self, round: int) -> Log:
        if round not in self._logs:
            self._logs[round] = Log(self.folder / f"round-{round}" / LOG)
        return self._logs[round]

    def abandon(self, key: Key) -> None:
        """No more of this payload comes. What is there of it may be overwritten by a later attempt
        already.
        """
        with self._lock:
            upload = self._uploads.pop(key, None)
        if upload is not None and upload.file is not None:
            os.close(upload.file)
        if upload is not None and upload.memory is not None:
            upload.memory.give(key.round, upload.size)

    def whole(
        self,
        key: Key,
        form: Sequence[Field],
        check: bytes,
        state: str,
        kept: bool,
        task: tuple[bytes, str],
        seconds: float,
        worker: JsonDict,
    ) -> Spooled:
        """The payload is complete: it can be read, but counts for a resume only once `seal` was
        called.
        """
        with self._lock:
            upload = self._uploads.pop(key)
        if upload.file is not None:
            if os.fstat(upload.file).st_size != upload.got:  # what was there before was longer
                os.truncate(upload.file, upload.got)
            os.close(upload.file)
        return Spooled(
            key,
            tuple(form),
            self._path(key),
            check,
            state,
            kept,
            task,
            seconds,
            worker,
            held=upload.held,
            memory=upload.memory,
        )

    def seal(self, reply: Spooled) -> None:
        """The reply was checked: a resume folds it without asking again, once `flush` was
        called.
        """
        inline = reply.size <= SMALL_BYTES
        seal = Seal(
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
            inline=reply.size if inline else 0,
        )
        with self._lock:
            log = self._log(reply.key.round)
            at = log.add(seal, reply.held if inline and reply.held is not None else b"")
        if inline:
            reply.path, reply.at = str(log.path), at
        self._sealed.setdefault(reply.key.round, set()).add(_name(reply.key))
        if reply.payload is not None:
            reply.held = None  # one of the two is enough
        if reply.memory is None:
            self._over.append(reply)

    def flush(self) -> None:
        """What was sealed is with the operating system, and what may not be held is on disk
        alone.
        """
        with self._lock:
            for log in self._logs.values():
                log.flush()
        for reply in self._over:
            reply.let_go()
        self._over.clear()

    def _unseal(self, key: Key) -> None:
        with self._lock:
            log = self._log(key.round)
            log.add(Seal(key=key, broken=True), b"")
            log.flush()
        self._sealed[key.round].remove(_name(key))

    def revoke(self, reply: Spooled) -> None:
        """The reply was checked and is of no use after all: nothing vouches for it any more."""
        if _name(reply.key) in self._sealed.get(reply.key.round, ()):
            self._unseal(reply.key)

    def discard(self, reply: Spooled) -> None:
        """The payload is of no use, and was never sealed."""
        reply.let_go()
        if reply.size > SMALL_BYTES:
            os.unlink(reply.path)

    # -- reading -----------------------------------------------------------------------------------
    def found(self, round: int, phase: int) -> dict[tuple[int, str], Spooled]:
        """The sealed replies of a phase whose payloads are as they were received, by client and
        purpose: of a client whose training or evaluation is not, neither, so that it is asked for
        both again. Raises StateError where a whole seal is not what was written.
        """
        with self._lock:
            if round in self._logs:
                self._logs[round].flush()
        log = self.folder / f"round-{round}" / LOG
        vouched = [s for s in _last(sealed_in(log)) if s.seal.key.phase == phase]
        # Whatever became of the payloads: the next ones are others.
        self._sealed.setdefault(round, set()).update(_name(s.seal.key) for s in vouched)
        replies = (
            Spooled(
                s.key,
                tuple(s.form),
                str(log) if s.inline else self._path(s.key),
                s.check,
                s.state,
                s.kept,
                s.task,
                s.seconds,
                s.worker,
                tuple(s.split),
                s.taken_s,
                reported=s.reported,
                at=at if s.inline else 0,
            )
            for s, at in vouched
        )
        found = {(r.key.client, r.key.purpose): r for r in replies}
        damaged = {client for (client, _), r in found.items() if not r.intact()}
        return {name: r for name, r in found.items() if name[0] not in damaged}

    def sealed(self) -> set[Key]:
        """The replies that were checked, of all rounds that no checkpoint holds."""
        logs = self.folder.glob(f"round-*/{LOG}")
        return {found.seal.key for log in logs for found in _last(sealed_in(log))}

    # -- the end of rounds -------------------------------------------------------------------------
    def clear(self, up_to: int, under_way: Collection[tuple[int, int]] = ()) -> None:
        """Lets go of rounds that are over. under_way: (round, client) of their tasks that may still
        be answered.
        """
        rounds = {round for round, _ in under_way}
        for folder in self.folder.glob("round-*"):
            round = int(folder.name.split("-")[1])
            if round <= up_to:
                self._spare(folder, {c for r, c in under_way if r == round})
            if round <= up_to and round not in rounds:
                with self._lock:
                    log = self._logs.pop(round, None)
                    self._sealed.pop(round, None)
                    self._memory.clear(round)
                    shutil.rmtree(folder)
                if log is not None:
                    log.close()

    def close(self) -> None:
        """Closes the files: no other round comes to this process."""
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs, self._spares = {}, []
            shutil.rmtree(self.folder / "spare", ignore_errors=True)

    def _spare(self, round: Path, but: Collection[int]) -> None:
        """Moves a round's payloads to where later ones take their files from, but those of these
        clients.
        """
        place = self.folder / "spare"
        place.mkdir(exist_ok=True)
        with self._lock:
            busy = {self._path(key) for key in self._uploads}  # a late one's, not called off yet
            size = sum(os.path.getsize(p) for p in self._spares)
            for path in map(str, round.glob("*.bin")):
                if int(os.path.basename(path).split("-")[1]) in but or path in busy:
                    continue
                self._named += 1
                name = str(place / f"{self._named}.bin")
                if not is_read(path) and (size := size + os.path.getsize(path)) <= SPARE_BYTES:
                    os.replace(path, name)
                    self._spares.append(name)


def _name(key: Key) -> str:
    return f"{key.phase}-{key.client}-{key.purpose}"


def _last(found: list[Sealed]) -> list[Sealed]:
    """The replies whose last seal says that they are whole: of several seals of one reply the last
    counts.
    """
    by_name = {_name(s.seal.key): s for s in found}
    return [s for s in by_name.values() if not s.seal.broken]

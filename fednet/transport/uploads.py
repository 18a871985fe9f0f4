"""Large replies of the workers that one launcher forked: a worker writes a reply into a file of the
run's own, a reference crosses the socket in its place, and the server reads it, checks it and folds
it where it lies. The one copy is the one that a crash needs; a model that is trained in memory that
is lent here, and sent as it is, needs none.

A file is written over once its reply was folded and the round is over: a server that wants it to
stay gives it a name of its own (`os.link`), and a file with a second name is left as it is,
whatever became of that server.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednet.buffers import Array
from fednet.files import OWN, opened, write_all
from fednet.pages import pages
from fednet.transport.base import Frame
from fednet.transport.mapped import Mapped
from fednet.transport.references import FREE, READ, REFERENCE, WRITTEN, Places
from fednet.wire.frames import Laid

FILES = 1024  # of a worker at a time: while all are taken, replies cross as they do elsewhere
# Memory was asked for so often in turn and no reply came to be in it: no more is lent.
IN_VAIN = 32
_PATH_BYTES = mmap.PAGESIZE


class Uploads(Places):
    """One worker's files. It says by a token that they are its own; what state each is in lies in
    memory that it shares with the server, and so does where they are. A file's number tells one
    reply from the next that is written there.
    """

    def __init__(self) -> None:
        """Before the fork of either end."""
        self._memory = mmap.mmap(-1, _PATH_BYTES + 16 * FILES)
        heads = np.frombuffer(self._memory, np.uint64, offset=_PATH_BYTES).reshape(FILES, 2)
        super().__init__(heads[:, 0], heads[:, 1])
        # The worker's, by number: what it wrote, the first at the front, and what it has mapped.
        self._used: deque[int] = deque()
        self._mapped, self._lock = Mapped(), threading.Lock()
        self._begins = 0  # bytes that its last reply began with
        self._in_vain = 0  # times that a file was asked for since a reply came to be in one

    @property
    def folder(self) -> Path | None:
        """Where the files are; None before there is a server."""
        said = bytes(self._memory[:_PATH_BYTES]).rstrip(b"\0")
        return Path(os.fsdecode(said)) if said else None

    # -- the worker's end --------------------------------------------------------------------------
    def lend(self, nbytes: int) -> Array | None:
        """Memory of a file, in which a reply may come to be: `lay` need not copy what it begins
        with. None where replies begin otherwise, or there is no room.
        """
        folder = self.folder
        if folder is None or nbytes != self._begins or self._in_vain > IN_VAIN:
            return None
        with self._lock:
            self._in_vain += 1
            try:
                index = self._map(folder, nbytes)
            except OSError:  # such as a file system that maps nothing
                return None
            return None if index is None else self._mapped.lend(index)

    def _map(self, folder: Path, nbytes: int) -> int | None:
        """A file of that size that is mapped and free; None where there is no further one."""
        for index in self._mapped.idle(nbytes):
            if self._is_free(folder, index):
                if self._mapped.is_file(index, folder / f"{index}.bin"):
                    return index
                self._unmap(index)
        if (new := self._room(folder)) is None:
            return None
        try:
            self._mapped.add(folder / f"{new}.bin", new, nbytes)
        except OSError:
            self._used.append(new)
            raise
        for surplus in self._mapped.surplus():
            if surplus != new:
                self._unmap(surplus)
        return new

    def _unmap(self, index: int) -> None:
        self._mapped.drop(index)
        self._used.append(index)

    def lay(self, segments: Sequence[memoryview]) -> Laid | None:
        """Writes a reply, but for what lies in its file already, and returns the reference to it;
        None where there is no room for it.
        """
        folder = self.folder
        if folder is None:
            return None
        try:
            if (taken := self._taken(folder, segments[0])) is None:
                return None
            index, begun = taken
            try:
                body = _written(folder / f"{index}.bin", segments, begun)
            except OSError:
                self._state[index] = FREE
                raise
        except OSError:  # such as a full disk: the server meets it too, and knows what to do
            return None
        number = int(self._number[index])
        laid = Laid(REFERENCE.pack(self.token, index, number, len(body)), body)
        self._when_gone(laid, self._unsent, index, number)
        return laid

    def _taken(self, folder: Path, first: memoryview) -> tuple[int, int] | None:
        """(the file for a reply that begins so, how much of it lies there already)."""
        self._begins = len(first)
        with self._lock:
            if (there := self._begun(folder, first)) is not None:
                taken, self._in_vain = (there, len(first)), 0
            elif (free := self._room(folder)) is not None:
                taken = free, 0
                self._used.append(free)
            else:
                return None
            self._number[taken[0]] += 1
            self._state[taken[0]] = WRITTEN
            return taken

    def _begun(self, folder: Path, first: memoryview) -> int | None:
        """The file that this lies in, at its beginning, and that nobody reads."""
        index = self._mapped.holds(first)
        if index is None or not self._is_free(folder, index):
            return None
        return index if self._mapped.is_file(index, folder / f"{index}.bin") else None

    def _room(self, folder: Path) -> int | None:
        """A file to write over: the one that has waited longest, if nobody wants it to stay, else
        a new one.
        """
        if self._used and self._is_free(folder, self._used[0]):
            return self._used.popleft()
        for index in range(len(self._used), FILES):
            taken = index in self._used or index in self._mapped
            if not taken and self._is_free(folder, index):
                return index
        return None

    def _is_free(self, folder: Path, index: int) -> bool:
        if self._state[index] != FREE:
            return False
        try:
            return os.lstat(folder / f"{index}.bin").st_nlink == 1
        except FileNotFoundError:
            return True

    def _unsent(self, index: int, number: int) -> None:
        if self._state[index] == WRITTEN and self._number[index] == number:
            self._state[index] = FREE

    def renew_sender(self) -> None:
        """The worker is a new one: nothing that the last one wrote will be sent."""
        self.cut()
        self._state[self._state == WRITTEN] = FREE

    # -- the server's end --------------------------------------------------------------------------
    def put(self, folder: Path) -> None:
        """The server is a new one, and the files are there: what the last one held, nobody holds.
        Without a path that fits, replies cross as they do elsewhere.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.renew()
        said = os.fsencode(folder.resolve())
        self._memory[:_PATH_BYTES] = (said if len(said) < _PATH_BYTES else b"").ljust(
            _PATH_BYTES, b"\0"
        )

    def read(self, reference: Frame) -> memoryview | None:
        folder = self.folder
        _, index, number, nbytes = REFERENCE.unpack(reference)
        if folder is None or not self._lies(index, number):
            return None
        try:
            body = pages(str(folder / f"{index}.bin"))
        except (OSError, ValueError):  # gone, or empty
            return None
        if len(body) != nbytes:
            return None
        self._state[index] = READ
        self._when_gone(body.obj, self._release, index, number)
        return body


def _written(path: Path, segments: Sequence[memoryview], begun: int) -> memoryview:
    """A file of these bytes, of which the first `begun` are there, a whole segment or none, as it
    is read; no file where it cannot have all of them.
    """
    file = opened(path, os.O_RDWR | OWN | (0 if begun else os.O_CREAT), 0o600)
    try:
        os.lseek(file, begun, os.SEEK_SET)
        for segment in segments[1 if begun else 0 :]:
            write_all(file, segment)
        os.ftruncate(file, sum(map(len, segments)))
        return pages(str(path))
    except OSError:
        path.unlink(missing_ok=True)  # half a reply would keep what room there is
        raise
    finally:
        os.close(file)

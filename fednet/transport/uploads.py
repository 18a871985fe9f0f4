"""Large replies of the workers that one launcher forked: a worker writes a reply into a file of the
run's own, a reference crosses the socket in its place, and the server reads it, checks it and folds
it where it lies. The one copy is the one that a crash needs.

A file is written over once its reply was folded and the round is over: a server that wants it to
stay gives it a name of its own (`os.link`), and a file with a second name is left as it is,
whatever became of that server.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fednet.files import OWN, opened, write_all
from fednet.pages import pages
from fednet.transport.base import Frame
from fednet.transport.references import FREE, READ, REFERENCE, WRITTEN, Places
from fednet.wire.frames import Laid

FILES = 1024  # of a worker at a time: while all are taken, replies cross as they do elsewhere
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
        self._used: deque[int] = deque()  # the worker's, whatever was written first at the front

    @property
    def folder(self) -> Path | None:
        """Where the files are; None before there is a server."""
        said = bytes(self._memory[:_PATH_BYTES]).rstrip(b"\0")
        return Path(os.fsdecode(said)) if said else None

    # -- the worker's end --------------------------------------------------------------------------
    def lay(self, segments: Sequence[memoryview]) -> Laid | None:
        """Writes a reply, and returns the reference to it; None where there is no room for it."""
        folder = self.folder
        try:
            if folder is None or (index := self._room(folder)) is None:
                return None
            body = _written(folder / f"{index}.bin", segments)
        except OSError:  # such as a full disk: the server meets it too, and knows what to do
            return None
        self._used.append(index)
        self._number[index] += 1
        self._state[index] = WRITTEN
        number = int(self._number[index])
        laid = Laid(REFERENCE.pack(self.token, index, number, len(body)), body)
        weakref.finalize(laid, self._unsent, index, number).atexit = False
        return laid

    def _room(self, folder: Path) -> int | None:
        """A file to write over: the one that has waited longest, if nobody wants it to stay, else
        a new one.
        """
        if self._used and self._is_free(folder, self._used[0]):
            return self._used.popleft()
        for index in range(len(self._used), FILES):
            if index not in self._used and self._is_free(folder, index):
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
        weakref.finalize(body.obj, self._release, index, number).atexit = False
        return body


def _written(path: Path, segments: Sequence[memoryview]) -> memoryview:
    """A file of these bytes, as it is read; no file where it cannot have all of them."""
    file = opened(path, os.O_RDWR | os.O_CREAT | OWN, 0o600)
    try:
        for segment in segments:
            write_all(file, segment)
        os.ftruncate(file, sum(map(len, segments)))
        return pages(str(path))
    except OSError:
        path.unlink(missing_ok=True)  # half a reply would keep what room there is
        raise
    finally:
        os.close(file)

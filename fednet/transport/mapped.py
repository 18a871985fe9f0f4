"""Files that a worker has in its own memory and lends for what is to be sent: a reply that came to
be in one lies where the server reads it, and is not copied there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fednet.buffers import KEPT, Array, Lease
from fednet.descriptors import reaching
from fednet.files import OWN, opened

FIXED = 0x10  # MAP_FIXED, which Python's own has no place for


@dataclass(frozen=True, slots=True)
class _Map:
    path: Path
    array: Array  # all of the file, as it was made
    file: tuple[int, int]  # which it is, whatever its name leads to by now


class Mapped:
    """By number, files of one folder. Lent, they may be written to; who lends them again asks
    before whether anybody still reads there.
    """

    def __init__(self) -> None:
        self._maps: dict[int, _Map] = {}
        self._at: dict[int, int] = {}  # numbers by where they begin in memory
        self._lent: set[int] = set()
        forked = weakref.WeakMethod(self._forked)

        def child() -> None:
            if (call := forked()) is not None:
                call()

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=child)

    def __contains__(self, index: int) -> bool:
        return index in self._maps

    def idle(self, nbytes: int) -> list[int]:
        """Those of that size that nobody in this process holds, the first mapped first."""
        return [
            k for k, m in self._maps.items() if k not in self._lent and m.array.nbytes == nbytes
        ]

    def add(self, path: Path, index: int, nbytes: int) -> None:
        """Maps a file of that size, which has its room on the disk. Raises OSError."""
        if not hasattr(os, "posix_fallocate"):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        file = opened(path, os.O_RDWR | os.O_CREAT | OWN, 0o600)
        try:
            # To write to a page that a full disk has no room for would end this process.
            os.posix_fallocate(file, 0, nbytes)
            array = np.frombuffer(reaching(lambda: mmap.mmap(file, nbytes)), np.uint8)
            found = os.fstat(file)
        finally:
            os.close(file)
        self._maps[index] = _Map(path, array, (found.st_dev, found.st_ino))
        self._at[_place(array)] = index

    def _forked(self) -> None:
        """What a model does to its parameters in a process that it forks while it trains stays
        there, as it does with memory of the parent's alone.
        """
        rights, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | FIXED
        for index, held in self._maps.items():
            if self.is_file(index, held.path):  # else another's, where the run's folder was removed
                file = os.open(held.path, os.O_RDONLY | OWN)
                size, at = ctypes.c_size_t(held.array.nbytes), ctypes.c_void_p(_place(held.array))
                ctypes.CDLL(None).mmap(at, size, rights, private, file, ctypes.c_long(0))
                os.close(file)

    def surplus(self) -> list[int]:
        """Those that nobody holds and that are more than are kept, the first mapped first."""
        return [k for k in self._maps if k not in self._lent][:-KEPT]

    def drop(self, index: int) -> None:
        """The file is mapped no more, once nobody holds it."""
        del self._at[_place(self._maps.pop(index).array)]

    def lend(self, index: int) -> Array:
        """All of a file's memory, until nobody holds it."""
        lease = Lease(self._maps[index].array)
        self._lent.add(index)
        weakref.finalize(lease, self._lent.discard, index).atexit = False
        return np.asarray(lease)

    def holds(self, data: memoryview) -> int | None:
        """The number of the file of which this is all that was mapped."""
        index = self._at.get(_place(np.frombuffer(data, np.uint8))) if len(data) else None
        return index if index is not None and self._maps[index].array.nbytes == len(data) else None

    def is_file(self, index: int, path: Path) -> bool:
        """Whether that name still leads to that file."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._maps[index].file


def _place(array: Array) -> int:
    place: int = array.__array_interface__["data"][0]
    return place

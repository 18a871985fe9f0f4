"""Large payloads on their way to the workers that one launcher forked: the server lays one down
once, in memory that has no name and that all of them have, and each worker reads it there.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fednet.buffers import Lease
from fednet.transport.base import Frame
from fednet.transport.references import FREE, READ, REFERENCE, TOKEN_BYTES, WRITTEN, Places
from fednet.wire.codec import Body
from fednet.wire.frames import Laid

# At a time, for all workers: the one that comes, the last one, which workers hold until it has
# come, and one more. While all are taken payloads cross in parts.
FILES = 3


class Lane(Places):
    """The payloads on their way to one worker."""

    def __init__(
        self,
        files: Sequence[int],
        state: npt.NDArray[np.uint64],
        number: npt.NDArray[np.uint64],
        token: bytes,
    ) -> None:
        """files: by place. The rest: see `Places`; numbers and token are all workers'."""
        super().__init__(state, number, token)
        self._files = files
        self._there: dict[int, mmap.mmap] = {}

    def take(self, place: int) -> bool:
        """What lies there is for the worker from now on. False: it was sent it before, and has not
        let go of it.
        """
        if self._state[place] != FREE:
            return False
        self._state[place] = WRITTEN
        return True

    def cut(self) -> None:
        super().cut()
        self._state[self._state == WRITTEN] = FREE  # by a server that ended before it was sent

    def read(self, reference: Frame) -> memoryview | None:
        _, place, number, nbytes = REFERENCE.unpack(reference)
        if not self._lies(place, number):
            return None
        there = self._there.get(place)
        if there is None or len(there) != nbytes:
            if os.fstat(self._files[place]).st_size != nbytes:
                return None
            there = mmap.mmap(self._files[place], nbytes, access=mmap.ACCESS_READ)
            self._there[place] = there
        self._state[place] = READ
        lease = Lease(np.frombuffer(there, np.uint8))
        self._when_gone(lease, self._release, place, number)
        return np.asarray(lease).data.toreadonly()


class Broadcasts:
    """What a launcher's workers share, each with a lane of its own. A payload's number tells it
    from the next that is laid in its place.
    """

    def __init__(self, workers: int) -> None:
        """Before the fork of either end."""
        self._files = _without_names(FILES)
        self._memory = mmap.mmap(-1, 8 * FILES * (1 + workers))
        heads = np.frombuffer(self._memory, np.uint64).reshape(FILES, 1 + workers)
        self._number, self._state = heads[:, 0], heads[:, 1:]
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self.lanes = [
            Lane(self._files, state, self._number, self._token) for state in self._state.T
        ]
        # The server's: what it may send once more, and where it writes.
        self._laid: weakref.WeakKeyDictionary[Body, Laid] = weakref.WeakKeyDictionary()
        self._held: set[int] = set()
        self._there: dict[int, mmap.mmap] = {}

    def lay(self, body: Body, lane: Lane) -> Laid | None:
        """The reference to a payload for that worker; it is written where it does not lie yet. None
        where there is no room, or the worker has it still: it gets another copy in parts.
        """
        laid = self._laid.get(body) or self._new(body)
        if laid is None or not lane.take(REFERENCE.unpack(laid.reference)[1]):
            return None
        return laid

    def _new(self, body: Body) -> Laid | None:
        taken = self._held | {int(k) for k in np.flatnonzero(self._state.any(axis=1))}
        place = next((k for k in range(len(self._files)) if k not in taken), None)
        if place is None:
            return None
        try:
            there = self._room(place, body.size)
        except (OSError, ValueError, OverflowError):  # no memory
            return None
        whole, at = np.frombuffer(there, np.uint8), 0
        for segment in body.segments:
            whole[at : at + len(segment)] = segment
            at += len(segment)
        self._number[place] += 1
        reference = REFERENCE.pack(self._token, place, int(self._number[place]), body.size)
        laid = self._laid[body] = Laid(reference, memoryview(there).toreadonly())
        self._held.add(place)
        weakref.finalize(laid, self._held.discard, place).atexit = False
        return laid

    def _room(self, place: int, size: int) -> mmap.mmap:
        """Memory of that size. The system gives all of it now: what it cannot give as it is written
        to would end the process.
        """
        there = self._there.get(place)
        if there is None or len(there) != size:
            file = self._files[place]
            os.ftruncate(file, size)
            os.posix_fallocate(file, 0, size)
            there = self._there[place] = mmap.mmap(file, size)
        return there


def _without_names(many: int) -> list[int]:
    """Files in memory; none where the system has none, or gives none: there are settings that
    refuse them.
    """
    if not hasattr(os, "memfd_create"):
        return []
    files: list[int] = []
    try:
        for _ in range(many):
            files.append(os.memfd_create("fednet"))
    except OSError:
        pass
    return files

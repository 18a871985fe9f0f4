"""Bodies that lie where both ends of a connection have them: what crosses in their place, and whose
each place is by now.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fednet.transport.base import Frame

TOKEN_BYTES = 16
FREE, WRITTEN, SENT, READ = 0, 1, 2, 3  # a place's state: READ while its receiver still holds it
REFERENCE = struct.Struct(f"<{TOKEN_BYTES}sQQQ")  # token, place, number, bytes


class Places:
    """Where bodies lie on their way from one sender to one receiver. By a token they prove to have
    it. A place's number tells one body from the next that lies there.

    state, number: (places,) each, in memory that both ends have. token: drawn unless it is given.
    """

    def __init__(
        self,
        state: npt.NDArray[np.uint64],
        number: npt.NDArray[np.uint64],
        token: bytes | None = None,
    ) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES) if token is None else token
        self._state, self._number = state, number

    # -- the sender's end --------------------------------------------------------------------------
    def leaves(self, reference: bytes) -> None:
        """It is about to be sent."""
        self._state[REFERENCE.unpack(reference)[1]] = SENT  # before it can be read

    def take_back(self, reference: bytes) -> None:
        """It was not sent."""
        self._state[REFERENCE.unpack(reference)[1]] = FREE

    def cut(self) -> None:
        """The connection has ended, or the sender is a new one: what was sent is lost."""
        self._state[self._state == SENT] = FREE

    # -- the receiver's end ------------------------------------------------------------------------
    def renew(self) -> None:
        """The receiver is a new one: what the last one held, nobody holds."""
        self._state[self._state == READ] = FREE

    def refers(self, frame: Frame) -> bool:
        return len(frame) == REFERENCE.size and frame[:TOKEN_BYTES] == self.token

    def read(self, reference: Frame) -> memoryview | None:
        """The body, which stays as it is for as long as anything holds it; None where it does not
        lie here any more.
        """
        raise NotImplementedError

    def _lies(self, place: int, number: int) -> bool:
        """Whether that body lies there, and was not read yet."""
        there = place < len(self._state)
        return bool(there and self._state[place] == SENT and self._number[place] == number)

    def _when_gone(self, held: object, then: Callable[[int, int], None], *of: int) -> None:
        """then(place, number), once nobody in this process holds that. What one that it forks lets
        go of, as it ends, this one may hold.
        """
        weakref.finalize(held, _in, os.getpid(), then, *of).atexit = False

    def _release(self, place: int, number: int) -> None:
        if self._state[place] == READ and self._number[place] == number:
            self._state[place] = FREE


def _in(process: int, then: Callable[[int, int], None], place: int, number: int) -> None:
    if os.getpid() == process:
        then(place, number)

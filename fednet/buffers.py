"""Large arrays, lent again once nobody holds them.

A round takes and frees the same few arrays of a model's size over and over. Between two such, what
else the process allocates settles in the place of the one that was freed, and the next finds no
room: the heap of a server of a 45 MB model grew to 520 MB for the 320 that were in use. An array
that is kept, and lent again, keeps its place.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import mmap
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = np.ndarray[Any, Any]  # of any shape and type of element: bytes are lent to all of them

FROM_BYTES = 4 << 20  # smaller ones find room anywhere
# arrays that are kept though nobody holds them: with 8 a worker sat on 150 MB more of a 45 MB
# model, and was no faster; with 3, W2 took a twelfth more processor time
KEPT = 5
# Bytes of these. Of a larger model each idle array would be a further copy, and to take new memory
# of the system costs little beside what is done with so much.
KEPT_BYTES = 320 << 20
COLLECTED = (250_000, 20, 50)  # see `gc.set_threshold`
COLLECTED_S = 60.0  # and at the end of a round after so long

_idle: dict[int, Array] = {}  # by identity, the latest given back at the end
_look_at: list[float] = []  # when cycles are looked for next, inside of `seldom_collected`


# Some libraries (nanobind's) write pages about what outlives the interpreter, as what is frozen
# does, below the one sentence that says why a command ended.
atexit.register(gc.unfreeze)


class Lease:
    """Lives as long as any view, memoryview or tensor of a lent array does."""

    __slots__ = ("__array_interface__", "__weakref__", "array")

    def __init__(self, array: Array) -> None:
        place, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (place, False)}
        self.array = array


def lend(n: int, dtype: npt.DTypeLike = np.uint8) -> Array:
    """Returns an array of n elements with arbitrary contents. Raises MemoryError, or ValueError
    for more than there can be.
    """
    nbytes = n * np.dtype(dtype).itemsize
    if nbytes < FROM_BYTES:
        return np.empty(n, dtype)
    for name in list(_idle):
        array = _idle.get(name)
        # Else another thread took it first.
        if array is not None and array.nbytes == nbytes and _idle.pop(name, None) is not None:
            break
    else:
        # New memory of the system and not of malloc's heap: what is allocated between two such
        # arrays would keep the place of one that is let go of.
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as none:
            raise MemoryError(f"{nbytes} bytes") from none
        with contextlib.suppress(OSError):  # not every system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
    lease = Lease(array)
    weakref.finalize(lease, _give_back, array).atexit = False
    return np.asarray(lease).view(dtype)


def copy_to_lent(values: Array) -> Array:
    """Returns a copy; a large one in memory that is lent."""
    if values.nbytes < FROM_BYTES:
        return values.copy()
    own = lend(len(values), values.dtype)
    own[:] = values
    return own


def _give_back(array: Array) -> None:
    """Keeps an array that nobody holds any more. Runs in any thread, and may wait for no lock."""
    if array.nbytes > KEPT_BYTES:
        return
    _idle[id(array)] = array
    while len(_idle) > KEPT or sum([a.nbytes for a in list(_idle.values())]) > KEPT_BYTES:
        _idle.pop(next(iter(list(_idle))), None)


def give_back_idle() -> None:
    """Gives the system the arrays that nobody holds: what follows takes others."""
    _idle.clear()


def give_back_read(array: Array) -> None:
    """Gives the system the memory of a contiguous array, or of a part of one, that nobody writes to
    and that was read for the last time. Mapped bytes of a file are read from it again, should
    somebody need them; any other array is zeros then.
    """
    begin, _ = array.__array_interface__["data"]
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    after = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < after:
        where = ctypes.c_void_p(first), ctypes.c_size_t(after - first)
        ctypes.CDLL(None).madvise(*where, mmap.MADV_DONTNEED)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Inside, cycles are not looked for, and never among what was made here: what a process of
    fednet's own imports, and builds once, stays as long as it does. To import torch took a fifth
    longer, and a forked process copied what was looked at.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def seldom_collected(alone: bool) -> Iterator[None]:
    """Inside, in a process that does nothing else (`alone`), cycles are looked for among what was
    made since this began, and less often. A reply leaves some thirty objects until its round is
    over, and with thousands of clients a third of the server's time went into going through all;
    with this, a round of thousands is over before anything is gone through.
    """
    if not alone:  # else it is another's to say
        yield
        return
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    _look_at[:] = [time.monotonic() + COLLECTED_S]
    try:
        yield
    finally:
        _look_at.clear()
        gc.set_threshold(*before)
        gc.unfreeze()


def collect_in_time() -> None:
    """Inside of `seldom_collected`: looks for cycles where none were looked for of late. A few
    objects may hold much memory.
    """
    if _look_at and time.monotonic() >= _look_at[0]:
        gc.collect()
        _look_at[:] = [time.monotonic() + COLLECTED_S]

"""What several processes of one machine should do once: fetching files, decoding a hundred thousand
images.

Decoded images are kept as one .npy file in the user's cache. It is mapped into memory when read, so
all processes share one copy of the pixels; and what is not being read need not be in memory at all,
see `let_go`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fednet import places
from fednet.files import appear, clear_asides, unfinished
from fednet.pages import copy_on_write

log = logging.getLogger(__name__)
SMALL_BYTES = 256 << 20  # of a set whose pages stay where they were read
# By where their values begin.
_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def once(
    facts: Iterable[object],
    shape: tuple[int, ...],
    dtype: str,
    blocks: Callable[[], Iterable[np.ndarray]],
) -> torch.Tensor:
    """What the blocks make up, one after the other along dimension 0; or what an earlier process
    kept that had the same `facts` (names, sizes and times of the files read). They are written as
    they come: a set that memory cannot hold can be made.

    Where the cache cannot be written, the tensor is simply made again each time.
    """
    name = hashlib.sha256("\n".join(str(f) for f in (shape, dtype, *facts)).encode()).hexdigest()[
        :32
    ]
    file = places.cache() / "images" / f"{name}.npy"
    try:
        # Without the lock, for which a cache that others fill would have to be writable.
        if (kept := _kept(file)) is not None:
            return kept
        with one_at_a_time(file.parent):
            if (kept := _kept(file)) is None:  # by the process that held the lock until now
                clear_asides(file.parent)
                _write(file, shape, dtype, blocks())
                kept = mapped(file)
            return kept
    except OSError as full:
        log.warning("decoded images are not kept in %s: %s", file.parent, full)
    return torch.from_numpy(gathered(shape, dtype, blocks()))


def _kept(file: Path) -> torch.Tensor | None:
    """Returns what an earlier process kept, if it is whole: after a power cut it may not be."""
    try:
        return mapped(file)
    except FileNotFoundError:
        return None
    except ValueError as broken:
        log.warning("%s is not what was kept there, and is made again: %s", file, broken)
        return None


def _write(file: Path, shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> None:
    """The file appears when it is whole."""
    with unfinished(file) as aside:
        with aside.open("wb") as out:
            np.lib.format.write_array_header_1_0(
                out, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
            )
            for block in blocks:
                out.write(np.ascontiguousarray(block, dtype).data)
        appear(aside, file)


def gathered(shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Joins the blocks in memory."""
    out, at = np.empty(shape, dtype), 0
    for block in blocks:
        out[at : at + len(block)] = block
        at += len(block)
    return out


def mapped(file: Path) -> torch.Tensor:
    """The array of a .npy file, as pages of that file: memory that the system can take back. Not to
    be written to: what was written is lost with `let_go`. Raises ValueError for a file that is not
    whole.
    """
    with file.open("rb") as data:
        np.lib.format.read_magic(data)
        shape, _, dtype = np.lib.format.read_array_header_1_0(data)
        return _pages(data.fileno(), dtype, data.tell(), shape)


def mapped_again(x: np.ndarray) -> torch.Tensor | None:
    """What lies in a file that was mapped to be read alone, as `mapped` has it; None for an array
    that does not. torch takes none that it may not write to.
    """
    root: object = x
    while isinstance(root, np.ndarray) and not isinstance(root.base, mmap.mmap):
        root = root.base
    if not isinstance(root, np.memmap) or root.filename is None or not x.flags.c_contiguous:
        return None
    start = root.offset + x.ctypes.data - root.ctypes.data
    with open(root.filename, "rb") as data:
        return _pages(data.fileno(), x.dtype, start, x.shape)


def _pages(file: int, dtype: npt.DTypeLike, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    pages, count = copy_on_write(file), math.prod(shape)
    x = torch.from_numpy(np.frombuffer(pages, dtype, count, start).reshape(shape))
    _mapped[x.data_ptr()] = pages
    return x


def let_go(x: torch.Tensor) -> None:
    """Hands the pages of a tensor that `mapped` gave back to the system: whoever reads them next
    finds them in its cache, or on the disk. Any other tensor stays as it is. Without this,
    processes that host a thousand clients would come to hold all their data, of which each needs
    one client's at a time. A small set stays too: to find its pages anew takes twenty times as long
    as to gather a client's part of them, and those who read it share them.
    """
    pages = _mapped.get(x.data_ptr())
    if pages is not None and len(pages) > SMALL_BYTES:
        pages.madvise(mmap.MADV_DONTNEED)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Inside, no other process of this machine is inside for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".fednet.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

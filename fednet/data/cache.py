"""Files that several processes of one machine share: downloads, and decoded images.

Decoded images are kept as one .npy file in the user's cache. A process maps it into memory, so that
all processes share one copy of the pixels.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fednet import places
from fednet.files import appear, clear_asides, unfinished
from fednet.pages import copy_on_write

log = logging.getLogger(__name__)


def once(
    facts: Iterable[object],
    shape: tuple[int, ...],
    dtype: str,
    blocks: Callable[[], Iterable[np.ndarray]],
) -> torch.Tensor:
    """Joins the blocks along dimension 0 and keeps the result in the cache. If an earlier process
    has kept one with the same `facts` (names, sizes and times of the files read), that is returned.

    The blocks are written one by one, so the result may be larger than memory. If the cache cannot
    be written, the blocks are joined in memory.
    """
    digest = hashlib.sha256("\n".join(str(f) for f in (shape, dtype, *facts)).encode())
    file = places.cache() / "images" / f"{digest.hexdigest()[:32]}.npy"
    try:
        # First without the lock: the cache may be read-only, filled by somebody else.
        if (kept := _kept(file)) is not None:
            return kept
        with one_at_a_time(file.parent):
            if (kept := _kept(file)) is None:  # another process may have written it meanwhile
                clear_asides(file.parent)
                _write(file, shape, dtype, blocks())
                kept = mapped(file)
            return kept
    except OSError as full:
        log.warning("decoded images are not kept in %s: %s", file.parent, full)
    return torch.from_numpy(gathered(shape, dtype, blocks()))


def _kept(file: Path) -> torch.Tensor | None:
    """Returns the kept tensor; None if there is none, or a damaged one (after a power cut)."""
    try:
        return mapped(file)
    except FileNotFoundError:
        return None
    except ValueError as broken:
        log.warning("%s is damaged, and is made again: %s", file, broken)
        return None


def _write(file: Path, shape: tuple[int, ...], dtype: str, blocks: Iterable[np.ndarray]) -> None:
    """Writes the blocks to a .npy file, which appears under its name once it is complete."""
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
    """Maps the array of a .npy file into memory. Writing to it does not change the file. Raises
    ValueError if the file is not complete.
    """
    with file.open("rb") as data:
        np.lib.format.read_magic(data)
        shape, _, dtype = np.lib.format.read_array_header_1_0(data)
        return _pages(data.fileno(), dtype, data.tell(), shape)


def mapped_again(x: np.ndarray) -> torch.Tensor | None:
    """Maps the file of a read-only `numpy.memmap` again as `mapped` does, since torch needs memory
    that may be written to. Returns None for any other array.
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
    values = np.frombuffer(copy_on_write(file), dtype, math.prod(shape), start)
    return torch.from_numpy(values.reshape(shape))


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in this context for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".fednet.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

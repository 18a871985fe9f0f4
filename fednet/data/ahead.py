"""Samples that are made or read beside the import of torch, which takes one core two or three
seconds.

`begin` forks a process that makes them with NumPy alone, in memory that this process then maps;
`take` waits for them. A dataset whose file imports torch, one of the user's own, and one with
which something is wrong are left to this process, as if nothing had begun.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fednet.capacity import die_with_parent
from fednet.config import Config
from fednet.config.parts import complete_data
from fednet.config.schema import SITE
from fednet.data.raw import Raw
from fednet.data.reading import read
from fednet.plain import JsonDict
from fednet.registry import dataset, shipped

ALIGNED = 64  # bytes: where an array begins


class Wanted(msgspec.Struct, frozen=True):
    """A dataset's name, and what its function gets, see `reading.read`."""

    name: str
    options: JsonDict
    root: str | None
    download: bool
    seed: int
    with_test: bool

    def read(self) -> object:
        part = dataset.get(self.name)
        return read(part, self.options, self.root, self.download, self.seed, self.with_test)


_begun: tuple[int, int] | None = None  # a process, and the descriptor of what it writes


def with_test(config: Config, for_client: bool = False) -> bool:
    """Returns whether test samples are needed: where clients have none of their own, only
    evaluations read them.
    """
    evaluates = config.evaluate.every > 0
    if for_client and config.evaluate.clients == "none":
        evaluates = False
    return evaluates or config.data.client_test != "none"


def begin(config: Config, root: Path | None) -> None:
    """Begins to make the data of a run, unless torch is imported already. root: see
    `loading.load`.
    """
    global _begun
    if "torch" in sys.modules or config.load or config.data.dataset == SITE:
        return
    memory = os.memfd_create("fednet-samples")
    parent = os.getpid()
    pid = os.fork()
    if pid:
        _begun = pid, memory
        return
    status = 1
    try:
        die_with_parent(parent)
        sys.modules["torch"] = None  # type: ignore[assignment]  # its import raises ImportError
        section = complete_data(config.data)
        folder = root or section.root
        wanted = Wanted(
            section.dataset,
            section.options,
            str(Path(folder)) if folder else None,
            section.download,
            config.seed,
            with_test(config),
        )
        if shipped(dataset.get(wanted.name).__module__):
            _write(wanted, wanted.read(), memory)
            status = 0
    finally:  # the parent meets the error again, and reports it
        os._exit(status)


class _Array(msgspec.Struct):
    """Where an array is in the memory: its first byte, its type and its shape."""

    start: int
    dtype: str
    shape: tuple[int, ...]


def _write(wanted: Wanted, found: object, memory: int) -> None:
    """Writes the arrays; then what was wanted, and the other fields with the places of the arrays;
    then the length of this.
    """
    assert isinstance(found, Raw)
    with os.fdopen(memory, "wb") as file:

        def placed(array: object) -> msgspec.msgpack.Ext:
            assert isinstance(array, np.ndarray)
            assert not array.dtype.hasobject
            file.seek(-file.tell() % ALIGNED, os.SEEK_CUR)
            place = _Array(file.tell(), array.dtype.str, array.shape)
            file.write(np.ascontiguousarray(array).data)
            return msgspec.msgpack.Ext(1, msgspec.msgpack.encode(place))

        fields = msgspec.msgpack.encode(found.fields, enc_hook=placed)
        end = msgspec.msgpack.encode((msgspec.msgpack.encode(wanted), fields))
        file.write(end + len(end).to_bytes(8, "little"))


def _read(wanted: Wanted, held: memoryview) -> Raw | None:
    """Returns what `_write` wrote, in that memory; None if it is not what is wanted."""
    size = int.from_bytes(held[-8:], "little")
    made, fields = msgspec.msgpack.decode(held[-8 - size : -8], type=tuple[bytes, bytes])
    if made != msgspec.msgpack.encode(wanted):
        return None

    def array(code: int, data: memoryview) -> np.ndarray:
        place = msgspec.msgpack.decode(data, type=_Array)
        return np.ndarray(place.shape, place.dtype, held, place.start)

    found: dict[str, Any] = msgspec.msgpack.decode(fields, ext_hook=array)
    return Raw(**found)


def take(wanted: Wanted) -> Raw | None:
    """Returns what was begun, once it is made; None if it was not begun, or not made."""
    global _begun
    if _begun is None:
        return None
    pid, memory = _begun
    _begun = None
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # this process was forked from the one that began
        status = 1
    if status:
        os.close(memory)
        return None
    held = memoryview(mmap.mmap(memory, 0, flags=mmap.MAP_PRIVATE))
    os.close(memory)
    return _read(wanted, held)

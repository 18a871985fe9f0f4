"""Samples that are made or read beside the import of torch, which takes one core two or three
seconds.

`begin` forks a process that makes them with NumPy alone, in memory that this process then maps;
`taken` waits for them. A dataset whose file imports torch, one of the user's own, and one with
which something is wrong are left to this process, as if nothing had begun.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from fednet.capacity import die_with_parent
from fednet.config import Config
from fednet.config.parts import complete_data
from fednet.config.schema import SITE
from fednet.data.raw import Raw
from fednet.data.reading import read
from fednet.plain import JsonDict
from fednet.registry import dataset, shipped

ALIGNED = 64  # bytes: where an array begins


@dataclass(frozen=True)
class Wanted:
    """A dataset's name, and what its function gets, see `reading.read`."""

    name: str
    options: JsonDict
    root: Path | None
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
            Path(folder) if folder else None,
            section.download,
            config.seed,
            with_test(config),
        )
        if shipped(dataset.get(wanted.name).__module__):
            _write(wanted, wanted.read(), memory)
            status = 0
    finally:  # the parent meets the error again, and reports it
        os._exit(status)


def _write(wanted: Wanted, found: object, memory: int) -> None:
    """Writes the arrays, then the rest and where they are, and the length of this."""
    assert isinstance(found, Raw)
    arrays = list[pickle.PickleBuffer]()
    rest = pickle.dumps((wanted, found), protocol=5, buffer_callback=arrays.append)
    places = []
    with os.fdopen(memory, "wb") as file:
        for array in arrays:
            bytes = array.raw()
            file.seek(-file.tell() % ALIGNED, os.SEEK_CUR)
            places.append((file.tell(), bytes.nbytes))
            file.write(bytes)
        end = pickle.dumps((rest, places))
        file.write(end + len(end).to_bytes(8, "little"))


def taken(wanted: Wanted) -> Raw | None:
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
    size = int.from_bytes(held[-8:], "little")
    rest, places = pickle.loads(held[-8 - size : -8])
    made, found = pickle.loads(rest, buffers=[held[start : start + n] for start, n in places])
    assert isinstance(found, Raw)
    return found if made == wanted else None

"""Files mapped into memory, and whether a mapping of a file is still in use."""

from __future__ import annotations

import mmap
import os
import weakref

from fednet.descriptors import reaching
from fednet.files import OWN, opened

MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on


class Pages(mmap.mmap):
    """A mapped file."""


def copy_on_write(file: int) -> Pages:
    """Maps the file with that descriptor. Writing to the mapping does not change the file."""
    # Without MAP_NORESERVE the system refuses to map more than its memory, since all might be
    # written to.
    alone = mmap.MAP_PRIVATE | MAP_NORESERVE
    return Pages(file, 0, flags=alone, prot=mmap.PROT_READ | mmap.PROT_WRITE)


# By file, its mappings that are in use.
_mapped: dict[tuple[int, int], weakref.WeakSet[Pages]] = {}


def pages(path: str) -> memoryview:
    """Maps a file, for as long as anything refers to the bytes. Writing to them does not change the
    file.
    """
    file = opened(path, os.O_RDONLY | OWN)
    try:
        # a mapping has a descriptor of its own
        found = reaching(lambda: copy_on_write(file))
        _mapped.setdefault(_identity(os.fstat(file)), weakref.WeakSet()).add(found)
    finally:
        os.close(file)
    return memoryview(found)


def is_read(path: str) -> bool:
    """Returns whether something refers to bytes of that file, which then must not change."""
    name = _identity(os.stat(path))
    if _mapped.get(name):
        return True
    _mapped.pop(name, None)
    return False


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino

"""Files read where the system's cache has them, and who still reads them."""

from __future__ import annotations

import mmap
import os
import sys
import weakref

from fednet.descriptors import reaching
from fednet.files import OWN, opened

MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on


class Pages(mmap.mmap):
    """A file's bytes in memory: no copy."""


def copy_on_write(file: int) -> Pages:
    """The pages of a file with that descriptor. Who writes to them changes no file."""
    if sys.platform == "linux":
        # Else the system refuses to map more than its memory, since all might be written to.
        alone = mmap.MAP_PRIVATE | MAP_NORESERVE
        return Pages(file, 0, flags=alone, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return Pages(file, 0, access=mmap.ACCESS_COPY)


# By file, its pages that something reads.
_mapped: dict[tuple[int, int], weakref.WeakSet[Pages]] = {}


def pages(path: str) -> memoryview:
    """A file's bytes as the system's cache has them, for as long as anything holds them. Who writes
    to them changes no file.
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
    """Whether something holds bytes of that file, which may not change then."""
    name = _identity(os.stat(path))
    if _mapped.get(name):
        return True
    _mapped.pop(name, None)
    return False


def _identity(file: os.stat_result) -> tuple[int, int]:
    return file.st_dev, file.st_ino

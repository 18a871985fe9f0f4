"""How a process of fednet's own keeps its memory.

glibc hands every block above 32 MB back to the kernel when it is freed, and takes it anew, page by
page: for a model of 45 MB each copy then costs ten times as long as the copying itself (35 ms
against 3 ms where this was measured). Freed memory is kept instead, in one heap for all threads.
Only for processes that fednet started: not within a caller's.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_freed() -> bool:
    """Tells malloc to keep what is freed. False where it is not glibc's."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(
        mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 1 << 30) and mallopt(M_ARENA_MAX, 1)
    )

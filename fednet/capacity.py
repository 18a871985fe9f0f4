"""How much memory this machine has left, to be checked before a size that somebody gave is used.
Linux grants more memory than there is, and kills the process that then uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from fednet import proc
from fednet.descriptors import reaching
from fednet.errors import ConfigError

# Of this process's control group: the limit, and what is in use.
_GROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")


def require_linux() -> None:
    """Raises ConfigError on another system."""
    if sys.platform != "linux":
        raise ConfigError(f"fednet runs on Linux alone, and this system is {sys.platform}.")


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent ends, in whatever way. parent: its process id,
    where it may have ended already.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def free_memory() -> int:
    """Returns bytes of memory that a process could still use: free or in the system's caches, and
    within the limit of its control group. What cannot be read is no limit.
    """
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, KeyError):
        found.append(proc.free_memory())
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(reaching(Path(name).read_text)) for name in _GROUP)
        found.append(limit - used)
    return max(0, min(found))


def check_memory(nbytes: int, what: str) -> None:
    """Raises ConfigError if there is not enough memory. what: takes so many bytes."""
    if nbytes > (free := free_memory()):
        raise ConfigError(
            f"{what} takes {_size_text(nbytes)} of memory; {_size_text(free)} are free here."
        )


def _size_text(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
M_ARENA_MAX = -8


def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory, in one heap for all threads. Only for processes that
    fednet started.

    glibc returns every freed block above 32 MB to the kernel, and gets it back page by page. A copy
    of a model of 45 MB then takes ten times as long (35 ms instead of 3 ms where it was measured).
    """
    align_for_reuse()
    _glibc("mallopt", M_MMAP_MAX, 0)
    _glibc("mallopt", M_TRIM_THRESHOLD, 1 << 30)
    _glibc("mallopt", M_ARENA_MAX, 1)


def align_for_reuse() -> None:
    """Makes torch align large arrays at 64 bytes instead of 2 MB; to be called before it makes the
    first. Only for processes that keep freed memory, and those that they are forked from.

    An array at 2 MB leaves a gap before it. As soon as a small block is there, the place of the
    array, once it is freed, is too small for the next one: the gradients of a 45 MB model took
    200 MB of each worker.
    """
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"


def give_back_freed() -> None:
    """Gives the system what glibc's malloc keeps free, such as what building a model took for a
    moment. For the same processes as `keep_freed_memory`.
    """
    _glibc("malloc_trim", 0)


def _glibc(function: str, *arguments: int) -> None:
    """Calls a function of glibc; another C library does not have it, and nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), function)(*arguments)


OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a device ran out of memory. cuBLAS and cuDNN say so in their message only."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)

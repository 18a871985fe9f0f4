"""A process that does not outlive the one that started it, and goes before it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path


def die_with_parent(parent: int | None = None) -> None:
    """Linux ends this process when its parent ends, however that ends. parent: its process, where
    that may have ended by now.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def go_first(points: int) -> None:
    """Where memory runs out Linux ends this process before its parent, which has as much: as if it
    had so many thousandths of all memory more.
    """
    with contextlib.suppress(OSError, ValueError):  # a container may not let it
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + points)))

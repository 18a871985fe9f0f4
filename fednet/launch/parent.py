"""How a process ends with its parent, or before it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path


def die_with_parent(parent: int | None = None) -> None:
    """Makes Linux kill this process when its parent ends, in whatever way. parent: its process id,
    where it may have ended already.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def go_first(points: int) -> None:
    """Makes Linux kill this process before its parent when memory runs out, as if it used so many
    thousandths of all memory more.
    """
    with contextlib.suppress(OSError, ValueError):  # a container may not let it
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(1000, int(score.read_text()) + points)))

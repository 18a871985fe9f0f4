"""A process that does not outlive the one that started it."""

from __future__ import annotations

import os
import signal
import sys


def die_with_parent(parent: int | None = None) -> None:
    """Linux ends this process when its parent ends, however that ends. parent: its process, where
    that may have ended by now.
    """
    if sys.platform == "linux":
        import ctypes

        parent = parent or os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

"""Files and sockets that this process may have open, some of them kept for its own files.

Whoever connects to a server takes a descriptor of it, and the thread that accepts connections may
take all there are before another one looks at them. So a server lowers its own limit, which the
system lets it raise again: connections stay below the limit, and `reaching` goes beyond it.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

# Some systems allow a thousand times as many, and programs that are started then try them all.
MAX_DESCRIPTORS = 1 << 20
# Descriptors beyond the limit, for files of this process; an eighth of all where there are fewer
# than eight times as many.
KEPT = 128
# How long a file is tried to be opened where even those are taken: connections are hung up on
# meanwhile.
PATIENCE_S = 2.0

Opened = TypeVar("Opened")
_reaching = threading.Lock()
_beyond: int | None = None  # the limit without what is kept back


def limit(raised: bool = False) -> int:
    """Returns how many descriptors this process may have. raised: it first raises the limit as far
    as the system allows.
    """
    soft, most = (
        n if 0 <= n < MAX_DESCRIPTORS else MAX_DESCRIPTORS  # unlimited is -1
        for n in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if raised and soft < most and _set_limit(most):
        soft = most
    return soft


def keep_back() -> None:
    """Lowers this process's limit to `KEPT` fewer than the system allows, but for `reaching`."""
    global _beyond
    _beyond = limit(raised=True)
    _set_limit(_beyond - min(KEPT, _beyond // 8))


def reaching(opens: Callable[[], Opened]) -> Opened:
    """Returns what `opens` returns, which opens a file: with a descriptor that was kept back where
    there is no other. Raises what it raises.
    """
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return opens()
        except OSError as full:
            if full.errno != errno.EMFILE or _beyond is None:
                raise
        # One at a time: what one lowers again, another would have raised.
        with _reaching:
            soft = limit()
            _set_limit(_beyond)
            try:
                return opens()
            except OSError as full:
                if full.errno != errno.EMFILE or time.monotonic() > until:
                    raise
            finally:
                _set_limit(soft)
        time.sleep(0.01)  # a waiting connection took it first


def flush_to_disk(file: int, path: Path | str) -> None:
    """Flushes a file to the disk. The system's own error does not name the file."""
    try:
        os.fsync(file)
    except OSError as broken:
        raise OSError(broken.errno, broken.strerror, str(path)) from broken


def _set_limit(soft: int) -> bool:
    """Sets the limit. Returns False if the system has a lower limit of its own."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (OSError, ValueError):
        return False
    return True

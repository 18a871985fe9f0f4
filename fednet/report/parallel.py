"""Draws the figures of a page with all cores: matplotlib takes a few hundredths of a second for
each, and a page has some thirty.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from markupsafe import Markup

from fednet.capacity import die_with_parent
from fednet.errors import StateError, stop_signals
from fednet.experiment.placement import cores
from fednet.report.canvas import Figure, inline


@contextmanager
def drawings(figures: Sequence[Figure]) -> Iterator[Iterator[list[Markup]]]:
    """Yields the drawings of each figure, see `inline`, in the order of the figures. They are made
    while this process goes on, by copies of it, one a core; by this process where it has one core,
    or other threads, which would be missing in a copy. The same bytes come out. To be called within
    `canvas.drawing`.

    Raises StateError if the system ends such a copy.
    """
    processes = min(cores(), len(figures))
    if processes < 2 or threading.active_count() > 1:
        yield (_draw(figures, k) for k in range(len(figures)))
        return
    from matplotlib.backends import backend_svg  # noqa: F401 - once, not in each copy

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (figures, os.getpid())) as pool:
        try:
            yield pool.map(_draw_shared, range(len(figures)))
        except BrokenProcessPool:
            raise StateError(
                "a process that drew figures was killed, perhaps because memory ran out; try again."
            ) from None


_shared: Sequence[Figure] = ()  # what this copy draws of


def _begin(figures: Sequence[Figure], parent: int) -> None:
    global _shared
    die_with_parent(parent)
    for number in stop_signals():  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    _shared = figures


def _draw_shared(k: int) -> list[Markup]:
    return _draw(_shared, k)


def _draw(figures: Sequence[Figure], k: int) -> list[Markup]:
    return inline(figures[k], f"f{k}-")

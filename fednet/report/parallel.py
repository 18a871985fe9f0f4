"""Draws the figures of a page by other processes: they import matplotlib, which takes half a
second, and draw, while this one reads the run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

from markupsafe import Markup

from fednet.capacity import die_with_parent
from fednet.errors import StateError, stop_signals
from fednet.experiment.placement import cores
from fednet.report.canvas import Figure, drawing, inline

MOST = 4  # processes: more would import matplotlib for a few figures each

Drawing = Callable[[], list[Markup]]  # waits for it


@contextmanager
def drawings() -> Iterator[Callable[[Figure], Drawing]]:
    """Yields a function that has a figure drawn, see `inline`, and returns what waits for the
    drawing. Figures are drawn meanwhile, by copies of this process, one for each further core. This
    process draws them itself, as it waits, where it has one core, or other threads, which would be
    missing in a copy. The same bytes come out.

    Raises StateError if the system ends such a copy.
    """
    names = (f"f{k}-" for k in count())
    processes = min(MOST, cores() - 1)
    if processes < 1 or threading.active_count() > 1:
        with drawing():
            yield lambda figure: partial(inline, figure, next(names))
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, _begin, (os.getpid(),)) as pool:
        pool.submit(int)  # so that they begin
        try:
            yield lambda figure: pool.submit(inline, figure, next(names)).result
        except BrokenProcessPool:
            raise StateError(
                "a process that drew figures was killed, perhaps because memory ran out; try again."
            ) from None


_settings = ExitStack()  # of a copy: matplotlib's, for all that it draws


def _begin(parent: int) -> None:
    die_with_parent(parent)
    for number in stop_signals():  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    _settings.enter_context(drawing())
    from matplotlib import figure  # noqa: F401 - before the first drawing is asked for
    from matplotlib.backends import backend_svg  # noqa: F401

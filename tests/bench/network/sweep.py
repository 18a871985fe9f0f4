"""The map: which cells, and their picture."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.errors import ConfigError
from fednet.plain import JsonMapping
from tests.bench.network.cell import LinkCell, Result, run
from tests.bench.network.line import Bad
from tests.bench.network.spaces import refusal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LATENCIES = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
LOSSES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
RATES = (1e4, 1e5, 1e6, 1e7)
DROPOUTS = (0.0, 0.3, 0.6, 0.9)
REORDERED = 0.1  # of the latency: so much later a packet may come, at random
NEAR_S = 0.1  # the latency while rate or dropout is swept


PARTS = ("latency", "rate", "dropout")


def grid(
    wide: bool,
    parts: Sequence[str] = PARTS,
    latencies: Sequence[float] = LATENCIES,
    losses: Sequence[float] = LOSSES,
) -> list[LinkCell]:
    """The cells of one setting."""
    cells = []
    if "latency" in parts:
        cells += [LinkCell(_bad(a, b), 0.0, wide) for a, b in itertools.product(latencies, losses)]
    if "rate" in parts:
        cells += [LinkCell(_bad(NEAR_S, 0.0, rate), 0.0, wide) for rate in RATES]
    if "dropout" in parts:
        cells += [LinkCell(_bad(NEAR_S, 0.0), dropout, wide) for dropout in DROPOUTS]
    return cells


def _bad(latency_s: float, loss: float, rate: float | None = None) -> Bad:
    return Bad(latency_s, loss, rate, REORDERED * latency_s)


def sweep(
    cells: Sequence[LinkCell], folder: Path, limit_s: float, jobs: int
) -> Iterator[tuple[LinkCell, Result]]:
    """Each cell as it is done, `jobs` at a time. Raises ConfigError where this machine cannot make
    the link.
    """
    if why := refusal():
        raise ConfigError(f"bench network: {why}.")
    todo: queue.SimpleQueue[tuple[int, LinkCell]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[LinkCell, Result] | BaseException] = queue.SimpleQueue()
    for numbered in enumerate(cells):
        todo.put(numbered)
    over = threading.Event()

    def work(own: int) -> None:
        while not over.is_set():
            try:
                number, cell = todo.get_nowait()
            except queue.Empty:
                return
            try:
                result = run(cell, folder / f"{number}", limit_s, number, own, over)
            except BaseException as broken:
                done.put(broken)
                return
            done.put((cell, result))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(min(jobs, len(cells)))]
    for thread in threads:
        thread.start()
    try:
        for _ in cells:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        over.set()
        for thread in threads:
            thread.join()


# -- the picture -----------------------------------------------------------------------------------
def picture(records: Sequence[JsonMapping], out: Path) -> Path:
    """Rounds an hour over latency and loss, and over rate and dropout, a row a setting."""
    from fednet.report.canvas import canvas, saved

    settings = sorted({bool(r["wide"]) for r in records})
    with canvas((9.0, 3.4 * len(settings)), **{"figure.constrained_layout.use": True}) as fig:
        axes = fig.subplots(len(settings), 3, squeeze=False, width_ratios=(2.2, 1, 1))
        for row, wide in zip(axes, settings):
            mine = [r for r in records if bool(r["wide"]) == wide]
            _map(row[0], [r for r in mine if r["rate"] is None and not r["dropout"]], wide)
            _bars(row[1], [r for r in mine if r["rate"] is not None], "rate", "kB/s", 1e-3)
            dropouts = [r for r in mine if r["rate"] is None and r["latency_s"] == NEAR_S]
            dropouts = [r for r in dropouts if not r["loss"]]
            _bars(row[2], dropouts, "dropout", "dropout, %", 100)
        return saved(fig, out)


def _map(ax: Axes, records: Sequence[JsonMapping], wide: bool) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm

    latencies = sorted({r["latency_s"] for r in records})
    losses = sorted({r["loss"] for r in records})
    shown = np.full((len(losses), len(latencies)), np.nan)
    for r in records:
        i, j = losses.index(r["loss"]), latencies.index(r["latency_s"])
        text, colour = f"stops ({r['rounds']})" if r["rounds"] else "stops", "#000000"
        if not r["ended"] and r["per_hour"]:
            shown[i, j] = r["per_hour"]
            text, colour = f"{shown[i, j]:.0f}", "#ffffff" if shown[i, j] < 100 else "#000000"
        ax.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    ax.imshow(shown, norm=LogNorm(1, 5000), origin="lower", aspect="auto")
    ax.set_xticks(range(len(latencies)), [f"{x:g}" for x in latencies])
    ax.set_yticks(range(len(losses)), [f"{100 * x:g}" for x in losses])
    ax.set(xlabel="latency one way, s", ylabel="loss, %")
    ax.set_title(f"rounds an hour, {'wide' if wide else 'default'} settings", fontsize=9)
    ax.grid(False)


def _bars(ax: Axes, records: Sequence[JsonMapping], key: str, label: str, unit: float) -> None:
    if not records:
        ax.set_visible(False)
        return
    rows = sorted({r[key]: r["per_hour"] for r in records}.items())
    ax.bar([f"{unit * x:g}" for x, _ in rows], [y for _, y in rows], color="#0072b2")
    ax.set(xlabel=label)
    ax.tick_params(labelsize=8)
    ax.set_title("rounds an hour", fontsize=9)

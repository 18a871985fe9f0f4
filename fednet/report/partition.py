"""Who holds what: samples per client per class, as rows of a table and as a bubble chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

INCHES = (0.32, 0.34)  # of paper for a client, and for a class
SHOWN = 40  # more clients or classes than this get no label each


def rows(table: np.ndarray, names: Sequence[str] | None = None) -> list[list[str]]:
    """Header and one row a client: client, samples of each class ("·" for none), their sum; then
    the sums of columns.

    table: (N, C) samples; names: of the classes, else their numbers.
    """

    def line(first: str, counts: np.ndarray) -> list[str]:
        return [first, *(f"{n}" if n else "·" for n in counts.tolist()), str(int(counts.sum()))]

    header = ["client", *(str(n) for n in (names or range(table.shape[1]))), "samples"]
    return [
        header,
        *(line(str(i), counts) for i, counts in enumerate(table)),
        line("all", table.sum(axis=0)),
    ]


def bubble(table: np.ndarray, names: Sequence[str] | None, path: Path | str) -> None:
    """Draws clients against classes, a circle's area proportional to its samples, into `path`
    (.png, .svg or .pdf).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    clients, classes = table.shape
    size = [max(3.0, min(40.0, 1.2 + inches * n)) for inches, n in zip(INCHES, (clients, classes))]
    figure = Figure(figsize=(size[0], size[1]), layout="constrained")
    FigureCanvasAgg(figure)  # no display and no global state of pyplot
    axes = figure.add_subplot()
    who, what = np.nonzero(table)
    # the largest circle just touches its neighbours: a diameter of about 0.3 inches, 72 points an
    # inch
    area = (0.3 * 72) ** 2 * table[who, what] / max(1, int(table.max()))
    axes.scatter(who, what, s=area, color="#3b6ea5", alpha=0.8, linewidths=0)
    axes.set_xlim(-0.7, clients - 0.3)
    axes.set_ylim(-0.7, classes - 0.3)
    if clients <= SHOWN:
        axes.set_xticks(range(clients))
    if classes <= SHOWN:
        axes.set_yticks(range(classes), [str(n) for n in names] if names else None)
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_title(
        f"{int(table.sum()):,} samples; the largest circle is {int(table.max()):,}", fontsize=9
    )
    figure.savefig(path, dpi=150)

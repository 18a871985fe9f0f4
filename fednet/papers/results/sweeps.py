"""A figure whose cells differ in one number: what its measure is over that number, from the compact
results alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.papers.results import ranking
from fednet.plain import JsonMapping
from fednet.report import style
from fednet.report.canvas import Figure, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

SWEPT: dict[
    str, dict[str, tuple[str, float | None, str]]
    # table -> number -> (its name on the axis, what a cell that does not name it has, kind of axis)
] = {
    "fedrds/figure5": {"E": ("local epochs", None, "log")},
    "fedrds/figure7": {"sigma": ("sigma", None, "log")},
    "fedrds/figureA1": {
        "beta": ("beta, shared fraction", None, "linear"),
        "alpha": ("alpha, each client's part of it", None, "linear"),
    },
    "feddpc/figure7": {"lambda": ("lambda", 1.0, "linear")},
}
NUMBER = re.compile(r"(\w+)=(-?[0-9.]+)")
Points = dict[str, list[tuple[float, float]]]


def points(rows: Sequence[JsonMapping], table: str, number: str) -> Points:
    """Line's label -> [(number, mean of the measure over seeds)], by number; a line of one point is
    left out.
    """
    absent = SWEPT[table][number][1]
    found: dict[str, dict[float, list[JsonMapping]]] = {}
    for r in rows:
        if r["status"] != "done" or r["ours"] is None:
            continue
        text = f"{r['method']} {r['variant'] or ''}"
        value = dict(NUMBER.findall(text)).get(number, absent)
        if value is None:
            continue
        fixed = re.sub(rf"\b{number}=\S+", "", f"{r['dataset']} {r['heterogeneity']} {text}")
        found.setdefault(" ".join(fixed.split()), {}).setdefault(float(value), []).append(r)
    means = {
        label: sorted((x, ranking.mean(rs, "ours") or 0.0) for x, rs in by.items())
        for label, by in found.items()
    }
    return {label: line for label, line in means.items() if len(line) > 1}


def draw(rows: Sequence[JsonMapping], table: str, path: Path, said: str = "") -> Path | None:
    """Writes the figure; None where the table sweeps nothing, or there are no two points."""
    drawn = {
        number: lines for number in SWEPT.get(table, {}) if (lines := points(rows, table, number))
    }
    if not drawn:
        return None

    def onto(fig: MplFigure) -> None:
        axes = fig.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
        for ax, (number, lines) in zip(axes, drawn.items(), strict=True):
            label, _, kind = SWEPT[table][number]
            for k, (name, line) in enumerate(lines.items()):
                ax.plot(
                    *zip(*line),
                    markersize=4,
                    linewidth=1.2,
                    label=name,
                    **style.line(k),
                )
            ax.set_xscale(kind)
            ax.set_xlabel(label)
            ax.legend(fontsize=6)
        axes[0].set_ylabel("best test accuracy, %")

    write(Figure(path.stem, said, "", (), tuple, onto, (max(4.5, 3.2 * len(drawn)), 2.9)), [path])
    return path

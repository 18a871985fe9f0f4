"""A table's curves in one figure: a column of panels for each setting, accuracy against rounds
above, against MB below.

Drawn from the rows of the curves' CSV alone, so that it can be drawn again where the runs are no
longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.plain import JsonMapping
from fednet.report import condensed
from fednet.report.drawing import details as run_details
from fednet.report.drawing.canvas import Figure, write
from fednet.report.drawing.figures import COLOURS, DASHES, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

    from fednet.report.read import Run

XS = {"round": "round", "mb": "communicated MB"}
PANEL = (2.7, 2.1)  # inches


def settings(rows: Sequence[JsonMapping]) -> dict[str, list[JsonMapping]]:
    """Rows by dataset and setting, as the text that stands above the panel."""
    found: dict[str, list[JsonMapping]] = {}
    for r in rows:
        words = (str(r["dataset"]), str(r["variant"] or ""), str(r["heterogeneity"]))
        found.setdefault(" ".join(w for w in words if w), []).append(r)
    return found


def means(rows: Sequence[JsonMapping], x: str, y: str) -> list[tuple[float, float]]:
    """(x, y): means over seeds, at the rounds that every seed was evaluated in."""
    seeds = {r["seed"] for r in rows}
    by_round: dict[int, list[JsonMapping]] = {}
    for r in rows:
        if r.get(y) is not None:
            by_round.setdefault(int(r["round"]), []).append(r)
    return [
        (math.fsum(float(r[x]) for r in rs) / len(rs), math.fsum(float(r[y]) for r in rs) / len(rs))
        for _, rs in sorted(by_round.items())
        if len(rs) == len(seeds)
    ]


def measure(rows: Sequence[JsonMapping]) -> str:
    """What the curves show: personal accuracy where the table is about it."""
    return (
        "personal_accuracy"
        if any(r.get("personal_accuracy") is not None for r in rows)
        else "accuracy"
    )


LABELS = {
    "accuracy": "test accuracy, %",
    "personal_accuracy": "personal accuracy, %",
    "train_loss": "training loss",
}


def draw(
    rows: Sequence[JsonMapping], path: Path, said: str = "", y: str | None = None
) -> Path | None:
    """Writes the figure; None where no row has a value. said: a line above it, such as that it is
    no test of the paper. y: what is drawn, if not the accuracy.
    """
    y = measure(rows) if y is None else y
    shown = {k: rs for k, rs in settings(rows).items() if any(r.get(y) is not None for r in rs)}
    if not shown:
        return None
    methods = list(dict.fromkeys(str(r["method"]) for rs in shown.values() for r in rs))

    def onto(fig: MplFigure) -> None:
        axes = fig.subplots(len(XS), len(shown), squeeze=False, sharey="col")
        for column, (title, rs) in enumerate(shown.items()):
            for line, (x, label) in enumerate(XS.items()):
                ax = axes[line][column]
                for place, name in enumerate(methods):
                    points = means([r for r in rs if r["method"] == name], x, y)
                    if points:
                        ax.plot(
                            *zip(*points),
                            color=COLOURS[place % 8],
                            dashes=DASHES[(place + place // 8) % 8] or (None, None),
                            marker=MARKERS[place % 8],
                            markevery=max(1, len(points) // 6),
                            markersize=3,
                            linewidth=1.1,
                            label=name,
                        )
                ax.set_xlabel(label)
                if column == 0:
                    ax.set_ylabel(LABELS[y])
                if line == 0:
                    ax.set_title(title, fontsize=8)
        handles = {text: h for ax in axes.flat for h, text in zip(*ax.get_legend_handles_labels())}
        fig.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=max(2, int(max(4.5, PANEL[0] * len(shown)) / 1.7)),
            fontsize=7,
            handlelength=3,
        )

    size = (max(4.5, PANEL[0] * len(shown)), PANEL[1] * len(XS) + 0.9)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(Figure(path.stem, said, (), tuple, onto, size), [path])
    return path


def details(
    runs: Mapping[str, Run], folder: Path, name: str, said: str, classes: Sequence[str]
) -> list[Path]:
    """What stands beside one setting's curves, from the runs themselves, by method: who holds what,
    accuracy by class over the rounds for the methods `classes`, condensed images where a run has
    them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = [(f"{name}-partition", f) for f in run_details.partition(next(iter(runs.values())))]
    found += [
        (f"{name}-{m.lower()}-classes", f)
        for m in classes
        if m in runs
        for f in run_details.class_accuracy(runs[m])
    ]
    written = [
        path
        for stem, figure in found
        for path in write(
            replace(figure, title=f"{figure.title}; {said}" if said else figure.title),
            [folder / f"{stem}.png"],
        )
    ]
    for run in runs.values():
        picture = condensed.draw(
            run.dir,
            folder / f"{name}-condensed.png",
            titles=(f"condensed images; {said}" if said else "condensed images", ""),
        )
        if picture is not None:
            return [*written, picture]
    return written

"""Accuracy against MB sent, one point for each chain of compressors, and the Pareto front."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.errors import ConfigError
from fednet.report import style
from fednet.report.canvas import canvas, saved, write_csv
from fednet.report.read import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAYS = ("up", "down", "both")


@dataclass(frozen=True)
class Point:
    """The runs of one chain, one for each seed. accuracy: final, 0..1; up, down: MB (10^6 bytes) of
    a whole run; seconds: of the virtual clock, empty on the real one; encode, decode: seconds for
    one message.
    """

    label: str
    accuracy: tuple[float, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    seconds: tuple[float, ...]
    encode: float
    decode: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracy)

    @property
    def sd(self) -> float:
        """The standard deviation over seeds; 0 for one."""
        return statistics.stdev(self.accuracy) if len(self.accuracy) > 1 else 0.0

    def cost(self, axis: str) -> float:
        """On the axis `up`, `down`, `both` (MB) or `seconds`: the mean over seeds."""
        if axis == "both":
            return statistics.fmean(self.up) + statistics.fmean(self.down)
        values = {"up": self.up, "down": self.down, "seconds": self.seconds}[axis]
        return statistics.fmean(values)


def point(label: str, runs: Sequence[Run], encode: float, decode: float) -> Point:
    """Raises ConfigError if a run has no accuracy of its global model."""
    rows: list[tuple[float, float, float, float | None]] = []
    for run in runs:
        summary = run.summary
        final = (summary.accuracy or {}).get("final")
        if final is None or summary.bytes is None:
            raise ConfigError(f"{run.dir}: its summary has no final accuracy to draw.")
        up, down = summary.bytes["up"], summary.bytes["down"]
        rows.append((final, up / 1e6, down / 1e6, summary.seconds_virtual))
    virtual = tuple(row[3] for row in rows if row[3] is not None)
    accuracy, ups, downs = (tuple(row[i] for row in rows) for i in range(3))
    return Point(label, accuracy, ups, downs, virtual, encode, decode)  # type: ignore[arg-type]


def front(points: Sequence[Point], axis: str) -> list[Point]:
    """Returns the Pareto front: the points that no other equals or beats in both cost and mean
    accuracy, cheapest first.
    """
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.cost(axis), -p.mean)):
        if not found or p.mean > found[-1].mean:
            found.append(p)
    return found


def axes(points: Sequence[Point], way: str) -> list[str]:
    """Returns the axes of cost that all points have."""
    timed = all(len(p.seconds) == len(p.accuracy) for p in points)
    return [way, "seconds"] if timed else [way]


LABELS = {
    "up": "MB sent by the clients",
    "down": "MB sent to the clients",
    "both": "MB sent",
    "seconds": "seconds (simulated time)",
}
IN = {"up": "MB up", "down": "MB down", "both": "MB", "seconds": "time"}  # in the table


def draw(points: Sequence[Point], way: str, path: Path) -> None:
    """Draws one panel for each axis. Bars are one standard deviation over seeds, the dashed steps
    are the Pareto front. The numbers of the points are explained next to the panels.
    """
    chosen = axes(points, way)
    height = max(3.2, 0.55 + 0.19 * len(points))
    with canvas((2.2 + 3.1 * len(chosen), height), **style.PAPER) as fig:
        panels = fig.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
        for ax, axis in zip(panels, chosen):
            _panel(ax, points, axis)
        panels[0].set_ylabel("global test accuracy")
        handles, names = panels[0].get_legend_handles_labels()
        right = 1 - 2.05 / (2.2 + 3.1 * len(chosen))
        fig.subplots_adjust(left=0.1, right=right, bottom=0.14, top=0.97, wspace=0.08)
        fig.legend(
            handles, names, loc="center left", bbox_to_anchor=(right + 0.005, 0.55), handlelength=1
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        saved(fig, path, dpi=300)


def _panel(ax: Axes, points: Sequence[Point], axis: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    best = front(points, axis)
    steps = [(p.cost(axis), p.mean) for p in best]
    ax.step(*zip(*steps), where="post", color="#888888", linestyle="--", linewidth=1, zorder=1)
    for i, p in enumerate(points):
        colour = style.COLOURS[i % 8]
        marker = style.MARKERS[(i + i // 8) % 8]  # no two of 64 are alike
        ax.errorbar(
            p.cost(axis),
            p.mean,
            yerr=p.sd,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=0.8,
            linestyle="none",
            label=f"{i + 1}  {p.label}",
            markeredgecolor="black" if p in best else colour,
        )
        ax.annotate(
            str(i + 1),
            (p.cost(axis), p.mean),
            xytext=(4, 3),
            textcoords="offset points",
            fontsize=6.5,
        )
    ax.set(xscale="log", xlabel=LABELS[axis])
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def write(points: Sequence[Point], way: str, path: Path) -> None:
    """Writes the numbers of the figure as CSV, one row for each chain."""
    chosen = axes(points, way)
    write_csv(path, COLUMNS, [_row(p, points, chosen) for p in points])


def _row(p: Point, points: Sequence[Point], chosen: Sequence[str]) -> list[object]:
    return [
        p.label,
        len(p.accuracy),
        f"{p.mean:.6f}",
        f"{p.sd:.6f}" if len(p.accuracy) > 1 else "",
        f"{min(p.accuracy):.6f}",
        f"{max(p.accuracy):.6f}",
        f"{p.cost('up'):.6f}",
        f"{p.cost('down'):.6f}",
        f"{statistics.fmean(p.seconds):.3f}" if p.seconds else "",
        f"{p.encode:.6f}",
        f"{p.decode:.6f}",
        " ".join(axis for axis in chosen if p in front(points, axis)),
    ]


COLUMNS = (
    "chain",
    "seeds",
    "accuracy",
    "sd",
    "low",
    "high",
    "mb_up",
    "mb_down",
    "seconds",
    "encode_s",
    "decode_s",
    "front",
)


def table(points: Sequence[Point], way: str) -> list[tuple[str, ...]]:
    """Returns the points as `fednet frontier` prints them: the best first."""
    chosen = axes(points, way)
    best = {axis: front(points, axis) for axis in chosen}
    rows: list[tuple[str, ...]] = []
    for p in sorted(points, key=lambda p: -p.mean):
        seconds = f"{statistics.fmean(p.seconds):.3g}" if p.seconds else "-"
        marks = ", ".join(IN[axis] for axis in chosen if p in best[axis])
        rows.append(
            (
                p.label,
                str(len(p.accuracy)),
                f"{100 * p.mean:.2f}" + (f" ± {100 * p.sd:.2f}" if len(p.accuracy) > 1 else ""),
                _digits(p.cost("up")),
                _digits(p.cost("down")),
                seconds,
                f"{1e3 * p.encode:.1f}",
                f"{1e3 * p.decode:.1f}",
                marks or "-",
            )
        )
    return rows


def _digits(mb: float) -> str:
    return f"{mb:.{max(0, 2 - math.floor(math.log10(mb)))}f}" if mb > 0 else "0"

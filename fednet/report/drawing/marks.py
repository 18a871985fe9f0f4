"""What several figures of a run are made of: bars, grids, legends, and what a pointer may ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fednet.plain import JsonDict
from fednet.report.drawing.canvas import BLANK
from fednet.report.drawing.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MplFigure

BARS = 60  # in a figure at most: where there are more rounds, a bar is the mean of several
HOVER = 40_000  # cells of a grid that a pointer can ask
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def digits(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def binned(rounds: Sequence[int], values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(x, height, width) of at most BARS bars; a bar of several rounds is their mean."""
    k = -(-len(rounds) // BARS)
    starts = range(0, len(rounds), k)
    x = np.asarray([np.mean(rounds[i : i + k]) for i in starts])
    return x, np.asarray([values[i : i + k].mean() for i in starts]), float(k)


def stack(binned: dict[str, tuple[np.ndarray, np.ndarray, float]]) -> JsonDict:
    """What a pointer may ask of stacked bars: all parts of the bar it is at."""
    return {
        "kind": "lines",
        "xl": "round",
        "s": [
            {"l": label, "x": digits(x.tolist()), "m": digits(height.tolist())}
            for label, (x, height, _) in binned.items()
        ],
    }


def heat(
    table: np.ndarray, rows: Sequence[object], columns: Sequence[object], what: str, **more: object
) -> JsonDict | None:
    """What a pointer may ask of a grid (rows, columns) of counts, codes or rates: its cell by row
    and column; None of too large a one.
    """
    if len(rows) * len(columns) > HOVER:
        return None
    names = {"r": [str(r) for r in rows], "c": [str(c) for c in columns]}
    cells = table.tolist() if table.dtype.kind in "iu" else _rates(table)
    return {"kind": "heat", "v": cells, **names, "rl": what, "cl": "round", **more}


def _rates(table: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in table]


def shades(
    fig: MplFigure, table: np.ndarray, rounds: Sequence[int], ylabel: str, what: str
) -> Axes:
    """A grid of values 0..1, rows downwards; blank where nothing was evaluated."""
    ax = fig.add_subplot()
    image = ax.imshow(table, aspect="auto", vmin=0, vmax=1)
    ground(ax)
    ax.set(xlabel="evaluated round", ylabel=ylabel)
    whole(ax.yaxis)
    step = max(1, len(rounds) // 10)
    ax.set_xticks(np.arange(0, len(rounds), step), [str(t) for t in rounds[::step]])
    fig.colorbar(image, label=what)
    return ax


def bars(
    ax: Axes,
    x: np.ndarray,
    height: np.ndarray,
    base: np.ndarray | float,
    place: int,
    wide: float = 1.0,
    hatch: str = "",
) -> None:
    ax.bar(
        x,
        height,
        bottom=base,
        width=0.85 * wide,
        color=COLOURS[place % 8],
        hatch=hatch,
        edgecolor="white",
        linewidth=0.2,
    )
    ax.set_xlim(x[0] - 0.6 * wide, x[-1] + 0.6 * wide)
    whole(ax.xaxis)


def legend(ax: Axes, entries: Sequence[tuple[str, str, str]]) -> None:
    """(colour, text, hatch) above the axes, four in a row."""
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=colour,
            label=text,
            hatch=hatch,
            edgecolor="white" if hatch else colour,
            linewidth=0.4,
        )
        for colour, text, hatch in entries
    ]
    ax.legend(
        handles=handles,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


def ground(ax: Axes) -> None:
    ax.grid(False)
    ax.set_facecolor(BLANK)


def whole(axis: Axis) -> None:
    """Ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # as AutoLocator has it


def named(axis: Axis, names: Sequence[str]) -> None:
    if len(names) <= 30:
        axis.set_ticks(np.arange(len(names)), names, fontsize=9)


def sorted_clients(axis: Axis, clients: Sequence[int]) -> None:
    """The ids of clients that stand in another order. Where there are too many to read there are no
    numbers either: they would be ranks, and look like ids.
    """
    axis.set_ticks([])
    named(axis, [str(c) for c in clients])


def room(names: Sequence[str]) -> float:
    """Inches to the left of names this long."""
    return min(2.0, 0.5 + 0.075 * max(map(len, names)))

"""The figures of a run, and the one figure fit for a paper: what each shows and how.

What they show is from `figures`; `canvas` draws them into files and into the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict
from fednet.records import metric, names
from fednet.report import costs
from fednet.report.drawing import details, figures, marks
from fednet.report.drawing.canvas import Figure, canvas, saved, write_csv
from fednet.report.drawing.figures import Series
from fednet.report.groups import Group, group
from fednet.report.read import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}


# -- of a run --------------------------------------------------------------------------------------
def of_run(run: Run) -> Iterator[Figure]:
    """The figures that this run has data for."""
    for x in figures.AXES:
        yield from curve(group([run]), x)
    yield from details.of_run(run)


def curve(
    groups: Sequence[Group],
    x: str = "rounds",
    y: str = "accuracy",
    bytes: str = "total",
    told_by: str | None = None,
) -> Iterator[Figure]:
    """The curves of all groups in one figure. told_by: the clock of the groups that are drawn where
    x is seconds; needed where the groups have several.
    """
    if x == "seconds" and told_by is None:
        (told_by,) = figures.clocks(groups)
    series = figures.curves(groups, x, y, bytes, told_by if x == "seconds" else None)
    if not series:
        return
    across = figures.axis(x, bytes, told_by or "seconds")
    label = figures.titled(groups, y)

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for s in series:
            every = max(1, len(s.x) // 8)
            name = f"{s.label} (n={s.n})" if any(o.n > 1 for o in series) else s.label
            ax.plot(
                s.x,
                s.mean,
                color=s.colour,
                marker=s.marker,
                markevery=every,
                markersize=3.5,
                label=name,
                dashes=s.dash or (None, None),
                gid=f"series-{s.place}",
            )
            if s.n > 1:
                shade = ax.fill_between(s.x, s.low, s.high, color=s.colour, alpha=0.18, linewidth=0)
                shade.set_gid(f"series-{s.place}-band")
        ax.set(xlabel=across, ylabel=label)
        ax.set_ylim(*_within(series, metric(y).share))
        if x == "rounds":
            marks.whole(ax.xaxis)
        if len(series) > 1:
            ax.legend(handlelength=3.2).set_gid("key")

    rows = [
        (s.label, s.n, t, a, m, lo, hi)
        for s in series
        for t, a, m, lo, hi in zip(s.round, s.x, s.mean, s.low, s.high)
    ]
    yield Figure(
        f"{y}_{x}",
        f"{label.capitalize()} against {across}",
        ("label", "seeds", "round", x, "mean", "low95", "high95"),
        lambda: rows,
        draw,
        hover={"kind": "lines", "xl": across, "s": [_asked(s) for s in series]},
    )


def _asked(s: Series) -> JsonDict:
    """What a pointer may ask of a line."""
    return {
        "i": s.place,
        "l": s.label,
        "t": s.round,
        "x": marks.digits(s.x),
        "m": marks.digits(s.mean),
        "h": marks.digits([b - m for b, m in zip(s.high, s.mean)]) if s.n > 1 else None,
    }


def _within(series: Sequence[Series], share: bool) -> tuple[float, float]:
    """The range of y. The means have the axis: a band so wide that it would flatten them leaves
    it, as does a loss that is not finite. share: values are 0..1.
    """
    means, lows, highs = (
        [v for s in series for v in values(s) if math.isfinite(v)] or [0.0]
        for values in (lambda s: s.mean, lambda s: s.low, lambda s: s.high)
    )
    span = (max(means) - min(means)) or 0.1
    low = max(min(lows) - 0.05 * span, min(means) - 0.4 * span)
    high = min(max(highs) + 0.05 * span, max(means) + 0.4 * span)
    return (max(0.0, low), min(1.0, high)) if share else (low, high)


# -- fit for a paper -------------------------------------------------------------------------------
def figure(
    runs: Sequence[Run],
    out: str | Path,
    x: str = "rounds",
    y: str = "accuracy",
    width: float | str = 3.4,
    bytes: str = "total",
    labels: Sequence[str] = (),
) -> str:
    """`fednet figure`: one figure fit for a paper, and its data beside it as CSV. Returns the
    caption. labels: of the lines.

    PDF with embedded TrueType (type 42). width: inches, or a text such as 3.4in, 8.6cm, 86mm.
    Raises ConfigError for an unknown axis, value, width or kind of file, or where no run was
    evaluated.
    """
    path = Path(out)
    if not runs:
        raise ConfigError("figure: expected at least one run directory.")
    for what, name, known in (
        ("--x", x, figures.AXES),
        ("--y", y, names()),
        ("--bytes", bytes, costs.BYTES),
        ("kind of file", path.suffix[1:], ("pdf", "svg", "png", "eps")),
    ):
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    inches = _inches(width)
    style = {
        "figure.constrained_layout.use": True,
        "svg.fonttype": "path",
        "font.size": 8,
        "axes.labelsize": 8,
        "legend.fontsize": 7,
        "lines.linewidth": 1.2,
    }
    groups = group(runs, labels)
    clocks = figures.clocks(groups)
    if x == "seconds" and len(clocks) > 1:
        told = {c: ", ".join(g.label for g in groups if figures.clock(g) == c) for c in clocks}
        raise ConfigError(
            "--x seconds: "
            + "; ".join(f"those of {told[c]} are of the {figures.CLOCKS[c]}" for c in told)
            + ": draw a figure for each clock."
        )
    made = next(curve(groups, x, y, bytes), None)
    if made is None:
        raise ConfigError(
            f"figure: none of the runs has {figures.titled(groups, y)} in its rounds.jsonl."
        )
    with canvas((inches, 0.68 * inches), **style) as fig:
        made.draw(fig)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved(fig, path, dpi=300)
    write_csv(path.with_suffix(".csv"), made.columns, made.rows())
    return figures.caption(groups, x, y, bytes)


def _inches(width: float | str) -> float:
    width = width if isinstance(width, str) else f"{width}in"
    found = re.fullmatch(r"\s*([0-9.]+)\s*(in|cm|mm|pt)\s*", width)
    if not found or not 0.5 <= float(found[1]) * INCHES[found[2]] <= 40:
        raise ConfigError(
            f"--width {width}: expected a length such as 3.4in, 8.6cm, 86mm or 245pt, from 0.5 to "
            f"40 inches."
        )
    return float(found[1]) * INCHES[found[2]]

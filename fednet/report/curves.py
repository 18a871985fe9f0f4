"""Figures of several runs: curves over rounds, MB or seconds, and what each method needs to reach
an accuracy. `figure` writes one of them for a paper (`fednet figure`).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import records
from fednet.errors import ConfigError, unknown
from fednet.files import write_aside
from fednet.report import costs, groups, metrics, style
from fednet.report.canvas import Figure, canvas, digits, save, whole_ticks
from fednet.report.groups import Group
from fednet.report.read import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

WIDE = (12.0, 4.2)  # inches, on a screen where the curves have the page's whole width
MARKED = 25  # values of a line at most that each have a marker
INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}


def curve(
    of: Sequence[Group],
    x: str = "rounds",
    y: str = "accuracy",
    bytes: str = "total",
    band: str = "ci",
) -> Figure | None:
    """Returns the curves of the groups that were evaluated: means over seeds with a band, a key of
    `metrics.BANDS`; None if no group was. A group's index is its colour, dashes and marker.
    """
    every = {i: metrics.band(g.runs, x, y, bytes, band) for i, g in enumerate(of)}
    curves = {i: c for i, c in every.items() if c["round"]}
    if not curves:
        return None
    several = any(len(of[i].runs) > 1 for i in curves)
    across = costs.axis(x, bytes, of[0].clock)
    label = groups.metric_label(of, y)
    names = {i: f"{of[i].label} (n={len(of[i].runs)})" if several else of[i].label for i in curves}

    note = f"The {label} in each round in which it was measured."
    if several:
        note += f" Lines are means over seeds; bands are {metrics.BANDS[band]}."
    table: list[tuple[object, ...]] = [("label", "seeds", "round", x, "mean", *_ends(band))]
    series = []
    for i, c in curves.items():
        name = of[i].label
        seeds = len(of[i].runs)
        table += [(name, seeds, *values) for values in zip(*c.values())]
        shown = {"i": i, "l": name, "t": c["round"], "x": digits(c["x"]), "m": digits(c["mean"])}
        half = [high - mean for high, mean in zip(c["high"], c["mean"])]
        series.append({**shown, "h": digits(half) if seeds > 1 else None})
    return Figure(
        f"{y}_{x}",
        f"{label.capitalize()} against {across}",
        note,
        partial(
            _draw_curves,
            curves=curves,
            names=names,
            banded=[i for i in curves if len(of[i].runs) > 1],
            share=groups.metric_of(of, y).share,
            xlabel=across,
            ylabel=label,
            whole=x == "rounds",
        ),
        wide=WIDE,
        hover={"kind": "lines", "xl": across, "s": series},
        table=table,
    )


def _draw_curves(
    fig: MplFigure,
    curves: Mapping[int, Mapping[str, Sequence[float]]],
    names: Mapping[int, str],
    banded: Collection[int],
    share: bool,
    xlabel: str,
    ylabel: str,
    whole: bool,
) -> None:
    """Draws the curves of groups, by the place of each. banded: those with a band; share: whether
    the values are 0..1; whole: whether x is.
    """
    ax = fig.add_subplot()
    for i, c in curves.items():
        line = style.line(i)
        ax.plot(
            c["x"],
            c["mean"],
            # Markers at some of the values would look as if the others were missing.
            markevery=1 if len(c["x"]) <= MARKED else [],
            markersize=3.5,
            label=names[i],
            gid=f"series-{i}",
            **line,
        )
        if i in banded:
            area = ax.fill_between(
                c["x"], c["low"], c["high"], color=line["color"], alpha=0.18, linewidth=0
            )
            area.set_gid(f"series-{i}-band")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    # The range of y depends on the means: a band that is so wide that it would flatten the lines is
    # cut off, and so is a loss that is not finite.
    means, lows, highs = (
        [v for c in curves.values() for v in c[name] if math.isfinite(v)] or [0.0]
        for name in ("mean", "low", "high")
    )
    span = (max(means) - min(means)) or 0.1
    low = max(min(lows) - 0.05 * span, min(means) - 0.4 * span)
    high = min(max(highs) + 0.05 * span, max(means) + 0.4 * span)
    if share:
        low = max(0.0, low)
        high = min(1.0, high)
    ax.set_ylim(low, high)
    if whole:
        whole_ticks(ax.xaxis)
    if len(curves) > 1:
        ax.legend(handlelength=3.2).set_gid("key")


def to_target(
    of: Sequence[Group],
    target: float,
    x: str = "rounds",
    bytes: str = "total",
    band: str = "ci",
) -> Figure | None:
    """Returns the cost of each group to reach the target accuracy: a bar is the mean over its seeds
    with their band, a dot is a seed. A group of which a seed never reaches it has only dots, and
    says how many reach it. None if no run reaches it.
    """
    y = metrics.accuracy_metric(r for g in of for r in g.runs)
    costs_of = [[metrics.to_target(r, target, x, bytes, y) for r in g.runs] for g in of]
    reached = [[v for v in values if v is not None] for values in costs_of]
    if not any(reached):
        return None
    unit = "rounds" if x == "rounds" else costs.axis(x, bytes, of[0].clock)
    means = [
        metrics.around(got, band) if len(got) == len(g.runs) else None
        for g, got in zip(of, reached)
    ]

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for i, (g, got, mean) in enumerate(zip(of, reached, means)):
            if mean is not None:
                m, low, high = mean
                error = [[m - low], [high - m]] if len(got) > 1 else None
                ax.barh(i, m, 0.6, xerr=error, color=style.line(i)["color"], alpha=0.75, capsize=2)
            else:
                text = f" {len(got)} of {len(g.runs)} reach it"
                ax.text(0, i - 0.25, text, va="center", fontsize="small")
            if len(g.runs) > 1:
                ax.plot(got, [i] * len(got), "o", color="black", markersize=2.5, linestyle="")
        ax.set_yticks(range(len(of)), [g.label for g in of])
        ax.set(xlabel=f"{unit} to {target:g} {groups.metric_label(of, y)}", xlim=(0, None))
        ax.set_ylim(len(of) - 0.5, -0.5)
        ax.grid(False, axis="y")

    rows: list[tuple[object, ...]] = [("label", "seeds", "reached", "mean", *_ends(band), "values")]
    rows += [
        (g.label, len(g.runs), len(got), *(mean or ("", "", "")), " ".join(map(str, got)))
        for g, got, mean in zip(of, reached, means)
    ]
    return Figure(
        f"to_target_{x}",
        f"{unit[0].upper()}{unit[1:]} to {target:g} {groups.metric_label(of, y)}",
        "The first evaluated round at or above the target, not smoothed.",
        draw,
        table=rows,
    )


def _ends(band: str) -> tuple[str, str]:
    """Returns the names of the columns of a band's ends."""
    return ("low95", "high95") if band == "ci" else (f"low_{band}", f"high_{band}")


def figure(
    runs: Sequence[Run],
    out: str | Path,
    x: str = "rounds",
    y: str = "accuracy",
    width: str = "3.4in",
    bytes: str = "total",
    labels: Sequence[str] = (),
    band: str = "ci",
    target: float | None = None,
) -> str:
    """`fednet figure`: one figure fit for a paper, and its data beside it as CSV. Returns the
    caption. labels: of the lines. y `cost`: what each method needs to reach `target`, in the unit
    of x.

    PDF with embedded TrueType (type 42). width: such as 3.4in, 8.6cm, 86mm. Raises ConfigError for
    an unknown metric or width, or if no run was evaluated.
    """
    path = Path(out)
    known = (
        *(m.name for m in records.all_metrics(row for run in runs for row in run.rounds)),
        "cost",
    )
    if y not in known:
        raise ConfigError(unknown("--y", y, known))
    if (y == "cost") != (target is not None):
        raise ConfigError(
            "--y cost and --target belong together: --y cost --target 0.8 draws what each method "
            "needs to reach an accuracy of 0.8, in the unit of --x."
        )
    length = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt)\s*", width)
    inches = float(length[1]) * INCHES[length[2]] if length else 0.0
    if not 0.5 <= inches <= 40:
        raise ConfigError(
            f"--width {width}: expected a length such as 3.4in, 8.6cm, 86mm or 245pt, from 0.5 to "
            f"40 inches."
        )
    found = groups.group(runs, labels)
    clocks = groups.clocks(found)
    if x == "seconds" and len(clocks) > 1:
        raise ConfigError(
            f"--x seconds: these runs measure time by different clocks: "
            f"{', '.join(costs.CLOCKS[clock] for clock in clocks)}. Draw a figure for each clock."
        )
    if target is not None:
        metrics.check_target(target)
        made = to_target(found, target, x, bytes, band)
        if made is None:
            raise ConfigError(f"--target {target:g}: none of the runs reaches this accuracy.")
    else:
        made = curve(found, x, y, bytes, band)
        if made is None:
            raise ConfigError(
                f"figure: none of the runs has {groups.metric_label(found, y)} in its rounds.jsonl."
            )
    settings = {**style.FITTED, **style.PAPER, "lines.linewidth": 1.2}
    with canvas((inches, 0.68 * inches), **settings) as fig:
        made.draw(fig)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(fig, path, dpi=300)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(made.table)
    write_aside(path.with_suffix(".csv"), table.getvalue())
    return _caption(made, found, runs, x, bytes, band)


def _caption(
    made: Figure, found: Sequence[Group], runs: Sequence[Run], x: str, bytes: str, band: str
) -> str:
    """Returns what the figure shows, of which runs, over which seeds."""
    seeds = [", ".join(map(str, g.seeds)) for g in found]
    if len(set(seeds)) == 1:
        which = f"seed{'' if len(found[0].seeds) == 1 else 's'} {seeds[0]}"
    else:
        which = "seeds " + "; ".join(f"{g.label}: {each}" for g, each in zip(found, seeds))
    if any(len(g.runs) > 1 for g in found):
        over = f"Means over {which}; bands are {metrics.BANDS[band]}"
    else:
        over = f"One run per method ({which}), so no confidence band"
    lines = ", ".join(g.label for g in found)
    caption = f"{made.title}: {lines}. {groups.setting(runs)}. {over}."
    return f"{caption} {costs.what_counts(bytes)}." if x == "mb" else caption

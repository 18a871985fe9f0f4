"""Describes the figures of runs: name, title, note and how each is drawn.

A function for each figure yields a `Figure`, or nothing if the run has no data for it. `canvas`
draws it into a file or into the page. To add a figure of one run, write such a function and name it
in `details`; a new metric (`records.METRICS`) has its curves without a change here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict
from fednet.records import metric, names
from fednet.report import condensed, costs, groups, metrics, style
from fednet.report.canvas import BOTTOM, Figure, canvas, saved, write, write_csv
from fednet.report.groups import Group
from fednet.report.read import Run
from fednet.report.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MplFigure

INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
BARS = 60  # at most in a figure: with more rounds, a bar is the mean of several
HOVER = 40_000  # cells of the largest grid that shows its values under the pointer
NAMED = 30  # ticks that have names at most
WRITTEN = 12  # classes at most of a confusion matrix with its numbers in the cells


def details(run: Run) -> Iterator[Figure]:
    """Yields the figures of one run that cannot be overlaid with those of another run."""
    yield from traffic(run)
    yield from time_split(run)
    yield from devices(run)
    yield from resources(run)
    yield from participation(run)
    yield from availability(run)
    yield from client_accuracy(run)
    yield from class_accuracy(run)
    yield from confusion(run)
    yield from partition(run)
    yield from condensed.images(run.dir)


# -- curves over the rounds ------------------------------------------------------------------------
@dataclass(frozen=True)
class Series:
    """The curve of a group: its mean over n seeds with the 95 % interval. place: the index of the
    group, which determines its colour, dashes and marker.
    """

    label: str
    n: int
    place: int
    round: list[int]
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def curve(
    of: Sequence[Group],
    x: str = "rounds",
    y: str = "accuracy",
    bytes: str = "total",
    band: str = "ci",
) -> Iterator[Figure]:
    """Yields the curves of the groups that were evaluated, in one figure. band: a key of
    `metrics.BANDS`.
    """
    series = []
    for place, g in enumerate(of):
        found: JsonDict = metrics.band(g.runs, x, y, bytes, band)
        if found["round"]:
            series.append(Series(g.label, len(g.runs), place, **found))
    if not series:
        return
    across = costs.axis(x, bytes, of[0].clock)
    label = groups.titled(of, y)

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for s in series:
            name = f"{s.label} (n={s.n})" if any(o.n > 1 for o in series) else s.label
            line = style.line(s.place)
            ax.plot(
                s.x,
                s.mean,
                markevery=max(1, len(s.x) // 8),
                markersize=3.5,
                label=name,
                gid=f"series-{s.place}",
                **line,
            )
            if s.n > 1:
                area = ax.fill_between(
                    s.x, s.low, s.high, color=line["color"], alpha=0.18, linewidth=0
                )
                area.set_gid(f"series-{s.place}-band")
        ax.set(xlabel=across, ylabel=label)
        ax.set_ylim(*_within(series, groups.metric_of(of, y).share))
        if x == "rounds":
            _whole(ax.xaxis)
        if len(series) > 1:
            ax.legend(handlelength=3.2).set_gid("key")

    note = f"The {label} in each round in which it was measured."
    if any(s.n > 1 for s in series):
        note += f" Lines are means over seeds; bands are {metrics.BANDS[band]}."

    table: list[tuple[object, ...]] = [("label", "seeds", "round", x, "mean", *_ends(band))]
    for s in series:
        for values in zip(s.round, s.x, s.mean, s.low, s.high):
            table.append((s.label, s.n, *values))
    yield Figure(
        f"{y}_{x}",
        f"{label.capitalize()} against {across}",
        note,
        draw,
        hover={"kind": "lines", "xl": across, "s": [_values(s) for s in series]},
        table=table,
    )


def to_target(
    of: Sequence[Group],
    target: float,
    x: str = "rounds",
    bytes: str = "total",
    band: str = "ci",
) -> Iterator[Figure]:
    """Yields the cost of each group to reach the target accuracy: a bar is the mean over its seeds
    with their band, a dot is a seed. A group of which a seed never reaches it has only dots, and
    says how many reach it.
    """
    y = metrics.measured(r for g in of for r in g.runs)
    costs_of = [[metrics.to_target(r, target, x, bytes, y) for r in g.runs] for g in of]
    reached = [[v for v in values if v is not None] for values in costs_of]
    if not any(reached):
        return
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
        ax.set(xlabel=f"{unit} to {target:g} {groups.titled(of, y)}", xlim=(0, None))
        ax.set_ylim(len(of) - 0.5, -0.5)
        ax.grid(False, axis="y")

    rows: list[tuple[object, ...]] = [("label", "seeds", "reached", "mean", *_ends(band), "values")]
    rows += [
        (g.label, len(g.runs), len(got), *(mean or ("", "", "")), " ".join(map(str, got)))
        for g, got, mean in zip(of, reached, means)
    ]
    yield Figure(
        f"to_target_{x}",
        f"{unit[0].upper()}{unit[1:]} to {target:g} {groups.titled(of, y)}",
        "The first evaluated round at or above the target, not smoothed.",
        draw,
        table=rows,
    )


def _ends(band: str) -> tuple[str, str]:
    """Returns the names of the columns of a band's ends."""
    return ("low95", "high95") if band == "ci" else (f"low_{band}", f"high_{band}")


def _values(s: Series) -> JsonDict:
    """Returns the values of a line, for the pointer."""
    return {
        "i": s.place,
        "l": s.label,
        "t": s.round,
        "x": _digits(s.x),
        "m": _digits(s.mean),
        "h": _digits([b - m for b, m in zip(s.high, s.mean)]) if s.n > 1 else None,
    }


def _within(series: Sequence[Series], share: bool) -> tuple[float, float]:
    """Returns the range of y. It depends on the means: a band that is so wide that it would flatten
    the lines is cut off, and so is a loss that is not finite. share: values are 0..1.
    """

    def finite(name: str) -> list[float]:
        return [v for s in series for v in getattr(s, name) if math.isfinite(v)] or [0.0]

    means = finite("mean")
    span = (max(means) - min(means)) or 0.1
    low = max(min(finite("low")) - 0.05 * span, min(means) - 0.4 * span)
    high = min(max(finite("high")) + 0.05 * span, max(means) + 0.4 * span)
    return (max(0.0, low), min(1.0, high)) if share else (low, high)


# -- one run ---------------------------------------------------------------------------------------
def traffic(run: Run) -> Iterator[Figure]:
    rounds, table = costs.bytes_by_kind(run)
    if not rounds:
        return
    kinds = style.places((kind for way in table.values() for kind in way), style.KINDS)
    bars = {
        (way, kind): _binned(rounds, np.asarray(values) / 1e6)
        for way in ("up", "down")
        for kind, values in table[way].items()
    }

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for way, sign in (("up", 1), ("down", -1)):
            base = np.zeros(1)
            for kind in table[way]:
                x, height, wide = bars[way, kind]
                place = kinds[kind]
                shade = 1.0 if way == "up" else 0.55
                _bars(ax, x, sign * height, sign * base, place, wide, shade)
                base = base + height
        ax.axhline(0, color="black", linewidth=0.8)
        low, high = ax.get_ylim()
        ax.set_ylim(low - 0.12 * (high - low), high + 0.12 * (high - low))
        for y, side, text in (
            (0.98, "top", "up, from the clients"),
            (0.02, "bottom", "down, to the clients"),
        ):
            ax.text(0.01, y, text, va=side, fontsize=9, transform=ax.transAxes)
        ax.yaxis.set_major_formatter(lambda v, _: f"{abs(v):g}")
        ax.set(xlabel="round", ylabel="MB per round")
        _legend(ax, [(COLOURS[i % 8], named(kind)) for kind, i in kinds.items()])

    def named(kind: str) -> str:
        return "protocol overhead" if kind == "envelope" else kind

    note = (
        "MB sent by the clients (up) and to them (down, paler) in each round, by kind of payload."
    )
    if after := costs.ledger(run).sum(round=costs.AFTER):
        note += f" The evaluation after the last round is not included ({size(after)})."
    if predicted := costs.predicted(run, run.summary.predicted):
        off = sum(abs(v["difference"]) for way in predicted.values() for v in way.values())
        note += (
            f" Measured and predicted payload differ by {off:,} bytes."
            if off
            else " The measured payload bytes match the prediction exactly."
        )
    if wasted := costs.wasted(run):
        reasons = ", ".join(f"{why} {size(n)}" for why, n in wasted.items())
        note += f" Not used, by reason: {reasons}."
        if costs.seconds_key(run) == "seconds_virtual":
            note += " In simulated time a reply that comes after its round is counted in full."
    yield Figure(
        "bytes",
        "Traffic per round",
        note,
        draw,
        hover=_stacked({f"{named(kind)} {way}, MB": bar for (way, kind), bar in bars.items()}),
        legend=len(kinds),
    )


def time_split(run: Run) -> Iterator[Figure]:
    rounds, table = costs.time_split(run)
    if not table:
        return
    clock = costs.CLOCKS[costs.seconds_key(run)]
    bars = {phase: _binned(rounds, np.asarray(values)) for phase, values in table.items()}
    places = style.places(table, style.PHASES)

    yield Figure(
        "time",
        f"Time per round ({clock})",
        "Seconds that each round took, by what the time was spent on.",
        lambda fig: _stack(fig, bars, places, f"seconds per round ({clock})"),
        hover=_stacked({f"{phase}, s": bar for phase, bar in bars.items()}),
        legend=len(table),
    )


def devices(run: Run) -> Iterator[Figure]:
    """Which device trained how long: only if there are several."""
    work = metrics.work(run)
    if len(work) < 2:
        return
    names = sorted(work)
    rounds = [r.round for r in run.rounds]
    seconds = {name: np.asarray([work[name].get(t, 0.0) for t in rounds]) for name in names}
    bars = {name: _binned(rounds, values) for name, values in seconds.items()}

    places = {name: i for i, name in enumerate(names)}
    yield Figure(
        "devices",
        "Training by device",
        "Seconds that each device trained in each round, summed over its clients.",
        lambda fig: _stack(fig, bars, places, "seconds of training"),
        hover=_stacked({f"{name}, s": bar for name, bar in bars.items()}),
        legend=len(names),
    )


def resources(run: Run) -> Iterator[Figure]:
    """What the run took on the server's machine: time of processors and GPUs, and memory."""
    rows = [r for r in run.rounds if r.resources]
    if not rows:
        return
    rounds = [r.round for r in rows]
    names = {name for r in rows for name in r.resources or {}}
    places = style.places(sorted(names), style.RESOURCES)

    def values(what: str) -> dict[str, np.ndarray]:
        """Returns the values by part of the run; NaN in a round in which it was not there."""
        return {
            name: np.asarray([(r.resources or {}).get(name, {}).get(what, np.nan) for r in rows])
            for name in sorted(places, key=lambda name: places[name])
        }

    busy, memory = values("busy_s"), values("memory_mb")

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        right = ax.twinx()
        for name in busy:
            colour = COLOURS[places[name] % 8]
            ax.plot(rounds, busy[name], color=colour)
            right.plot(rounds, memory[name], color=colour, linestyle=":")
        ax.set(xlabel="round", ylabel="busy, seconds per round (solid)", ylim=(0, None))
        right.set(ylabel="memory, MB (dotted)", ylim=(0, None))
        right.grid(False)
        _whole(ax.xaxis)
        _legend(ax, [(COLOURS[places[name] % 8], name) for name in busy])

    values_by_label = {f"{name} busy, s": busy[name] for name in busy}
    values_by_label |= {f"{name} memory, MB": memory[name] for name in busy}
    x = np.asarray(rounds)
    yield Figure(
        "resources",
        "Processor and memory",
        "On the server's machine: processor time of the server and of the clients' processes in "
        "each round, and the most memory that they had until then. Of a GPU: for how long it was "
        "busy, and its memory in use.",
        draw,
        hover=_stacked({label: (x, v, 1.0) for label, v in values_by_label.items()}),
        legend=len(busy),
        right=0.75,
    )


def participation(run: Run) -> Iterator[Figure]:
    p = metrics.participation(run)
    if not p.grid.size:
        return
    words = p.words
    kinds = [re.split(r"\W", why)[0] for why in p.reasons]
    places = style.places(kinds, style.DROPS)
    dropped = [style.CELLS[2 + places[kind] % (len(style.CELLS) - 2)] for kind in kinds]
    colours = [style.BLANK, *style.CELLS[:2], *dropped]
    # "not finished" is rare: it is in the legend only if there is one.
    shown = [code for code in range(len(words)) if code != 2 or (p.grid == 2).any()]

    def draw(fig: MplFigure) -> None:
        from matplotlib.colors import ListedColormap

        ax = fig.add_subplot()
        ax.imshow(
            np.ma.masked_equal(p.grid, 0),
            cmap=ListedColormap(colours),
            vmin=0,
            vmax=len(colours) - 1,
            aspect="auto",
            extent=(p.rounds[0] - 0.5, p.rounds[-1] + 0.5, p.grid.shape[0] - 0.5, -0.5),
        )
        _ground(ax)
        ax.set(xlabel="round", ylabel="client")
        for axis in (ax.xaxis, ax.yaxis):
            _whole(axis)
        _legend(ax, [(colours[code], words[code]) for code in shown])

    pointed = [*words[:3], *(f"dropped: {why}" for why in p.reasons)]
    yield Figure(
        "participation",
        "Participation",
        "Which clients were selected in each round, and which of them completed it.",
        draw,
        size=(6.0, min(7.0, 2.0 + 0.12 * p.grid.shape[0])),
        hover=_cells(p.grid, range(p.grid.shape[0]), p.rounds, "client", words=pointed),
        legend=len(shown),
    )


def availability(run: Run) -> Iterator[Figure]:
    """How many clients were available: only if the run follows a trace of availability."""
    rows = [r for r in run.rounds if r.here is not None]
    if not rows:
        return
    counts = {
        "available": [r.here or 0 for r in rows],
        "selected": [len(r.selected) for r in rows],
        "completed": [len(r.completed) for r in rows],
    }
    rounds = [r.round for r in rows]

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        for i, values in enumerate(counts.values()):
            ax.plot(rounds, values, color=COLOURS[i], linestyle=("-", "--", ":")[i])
        ax.set(xlabel="round", ylabel="clients", ylim=(0, None))
        _whole(ax.xaxis)
        _legend(ax, [(COLOURS[i], name) for i, name in enumerate(counts)])

    yield Figure(
        "availability",
        "Availability",
        "How many clients were available, were selected and completed in each round.",
        draw,
        legend=len(counts),
    )


def client_accuracy(run: Run) -> Iterator[Figure]:
    found = metrics.accuracy_by_client(run)
    if found is None:
        return
    which, by_client = found
    clients, last = list(by_client), np.asarray(list(by_client.values()))
    name = "client_accuracy" if which == "global" else f"{which}_accuracy"
    label = metric(name).titled(run.own_model)

    def bars(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        ax.fill_between(range(len(clients)), last, step="mid", color=COLOURS[0])
        ax.axhline(
            last.mean(),
            color=COLOURS[2],
            dashes=(4, 2),
            linewidth=1.2,
            label=f"mean {last.mean():.3f}",
        )
        ax.set(xlabel="client, best first", ylabel=label, ylim=(0, 1))
        ax.set_xlim(-0.5, len(clients) - 0.5)
        step = -(-len(clients) // NAMED)
        ax.set_xticks(np.arange(0, len(clients), step), map(str, clients[::step]), fontsize=9)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1))

    yield Figure(
        "clients",
        f"{label.capitalize()}, by client",
        f"The last evaluation of each client: mean over clients {100 * last.mean():.2f} %, "
        f"worst {100 * last.min():.2f} %.",
        bars,
        hover=_cells(last[None], [label], clients, "", cl="client", w=label),
        legend=1,
    )


def class_accuracy(run: Run) -> Iterator[Figure]:
    found = metrics.accuracy_by_class(run)
    if found is None:
        return
    rounds, table = found
    classes = metrics.class_names(run, len(table))
    by_class = 100 * (metrics.class_spread(run) or 0.0)

    def draw(fig: MplFigure) -> None:
        ax = _shades(fig, table, "class", "global test accuracy")
        step = max(1, len(rounds) // 10)
        ax.set_xticks(np.arange(0, len(rounds), step), map(str, rounds[::step]))
        ax.set(xlabel="evaluated round")
        _named(ax.yaxis, classes)

    yield Figure(
        "classes",
        "Global test accuracy, by class",
        "Accuracy of the global model on each class of the test set. Standard deviation between "
        f"classes, mean over rounds: {by_class:.1f} percentage points.",
        draw,
        hover=_cells(table, classes, rounds, "class", w="global test accuracy"),
        left=_room(classes),
        right=0.3,
    )


def confusion(run: Run) -> Iterator[Figure]:
    """Which classes the last model confuses: only if a metric counts them."""
    found = run.summary.confusion
    if found is None:
        return
    counts = np.asarray(found["counts"])
    classes = metrics.class_names(run, len(counts))
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))

    def draw(fig: MplFigure) -> None:
        ax = _shades(fig, shares, "true class", "share of the true class")
        ax.set(xlabel="predicted class")
        _whole(ax.xaxis)
        _named(ax.xaxis, classes)
        _named(ax.yaxis, classes)
        ax.tick_params("x", rotation=90 if long else 0)
        if len(classes) <= WRITTEN:
            for i, j in np.argwhere(counts):
                text = f"{counts[i, j]:.6g}"
                colour = style.ON_LIGHT if shares[i, j] > 0.5 else style.ON_DARK
                cell = ax.text(j, i, text, ha="center", va="center", fontsize=9, color=colour)
                cell.set_clip_on(True)  # the page moves what is clipped when it enlarges a part

    long = max(map(len, classes)) > 3
    tests = "the server's test set" if found["tested_on"] == "server" else "the clients' tests"
    models = "model" if found["model"] == "global" else "models"
    yield Figure(
        "confusion",
        "Confusion matrix",
        f"Samples by true and predicted class, of the last {found['model']} {models} on {tests}.",
        draw,
        size=(6.0, 4.4),
        hover=_cells(counts, classes, classes, "true class", cl="predicted class", w="samples"),
        left=_room(classes),
        right=0.3,
        bottom=_room(classes) if long else BOTTOM,
    )


def partition(run: Run) -> Iterator[Figure]:
    counts = run.counts
    if counts is not None and counts.ndim == 2 and counts.size:
        yield bubbles(counts, metrics.class_names(run, counts.shape[1]))


def bubbles(counts: np.ndarray, classes: Sequence[str]) -> Figure:
    """counts: (N, C) training samples by client and class."""
    n, c_all = counts.shape
    held = counts.sum(1)

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        i, c = np.nonzero(counts)
        width, height = fig.get_size_inches()
        across, down = 72 * (width - 0.9) / n, 72 * (height - 1.0) / c_all  # points of a cell
        largest = min(180.0, (0.9 * max(6.0, min(across, down))) ** 2)
        ax.scatter(
            i,
            c,
            s=largest * counts[i, c] / max(1, counts.max()),
            color=COLOURS[0],
            alpha=0.75,
            linewidth=0,
            rasterized=len(i) > HOVER // 10,
        )
        ax.set(xlabel="client", ylabel="class", xlim=(-0.5, n - 0.5), ylim=(c_all - 0.5, -0.5))
        _whole(ax.xaxis)
        _named(ax.yaxis, classes)
        text = f"{counts.sum():,} samples; the largest circle is {counts.max():,}"
        ax.set_title(text, loc="right", fontsize=9)

    return Figure(
        "partition",
        "Data per client",
        "Training samples of each class at each client: the area of a circle is their number. The "
        f"smallest client has {held.min():,} samples, the largest {held.max():,}.",
        draw,
        hover=_cells(counts.T, classes, range(n), "class", cl="client", w="samples"),
        legend=1,
        left=_room(classes),
    )


def partition_file(counts: np.ndarray, classes: Sequence[str] | None, path: Path | str) -> None:
    """Draws clients against classes into `path` (.png, .svg or .pdf), larger for more of them."""
    made = bubbles(counts, [str(n) for n in classes or range(counts.shape[1])])
    width, height = 1.2 + 0.32 * counts.shape[0], 1.2 + 0.34 * counts.shape[1]
    fitted = (min(40.0, max(5.0, width)), min(40.0, max(3.0, height)))
    write(replace(made, size=fitted), Path(path))


# -- fit for a paper -------------------------------------------------------------------------------
def figure(
    runs: Sequence[Run],
    out: str | Path,
    x: str = "rounds",
    y: str = "accuracy",
    width: float | str = 3.4,
    bytes: str = "total",
    labels: Sequence[str] = (),
    band: str = "ci",
    target: float | None = None,
) -> str:
    """`fednet figure`: one figure fit for a paper, and its data beside it as CSV. Returns the
    caption. labels: of the lines. y `cost`: what each method needs to reach `target`, in the unit
    of x.

    PDF with embedded TrueType (type 42). width: inches, or a text such as 3.4in, 8.6cm, 86mm.
    Raises ConfigError for an unknown axis, value, width or kind of file, or if no run was
    evaluated.
    """
    path = Path(out)
    if not runs:
        raise ConfigError("figure: expected at least one run directory.")
    for what, name, known in (
        ("--x", x, costs.COSTS),
        ("--y", y, (*names(row for run in runs for row in run.rounds), "cost")),
        ("--band", band, metrics.BANDS),
        ("--bytes", bytes, costs.BYTES),
        ("kind of file", path.suffix[1:], ("pdf", "svg", "png", "eps")),
    ):
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    if (y == "cost") != (target is not None):
        raise ConfigError(
            "--y cost and --target belong together: --y cost --target 0.8 draws what each method "
            "needs to reach an accuracy of 0.8, in the unit of --x."
        )
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target: expected an accuracy above 0 and at most 1, got {target:g}.")
    inches = _inches(width)
    found = groups.group(runs, labels)
    clocks = groups.clocks(found)
    if x == "seconds" and len(clocks) > 1:
        raise ConfigError(
            f"--x seconds: these runs measure time by different clocks: "
            f"{', '.join(costs.CLOCKS[clock] for clock in clocks)}. Draw a figure for each clock."
        )
    if target is not None:
        made = next(to_target(found, target, x, bytes, band), None)
        if made is None:
            raise ConfigError(f"--target {target:g}: none of the runs reaches this accuracy.")
    else:
        made = next(curve(found, x, y, bytes, band=band), None)
    if made is None:
        raise ConfigError(
            f"figure: none of the runs has {groups.titled(found, y)} in its rounds.jsonl."
        )
    settings = {**style.FITTED, **style.PAPER, "lines.linewidth": 1.2}
    with canvas((inches, 0.68 * inches), **settings) as fig:
        made.draw(fig)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved(fig, path, dpi=300)
    write_csv(path.with_suffix(".csv"), made.table)
    return caption(made, found, x, bytes, band)


def caption(
    made: Figure, of: Sequence[Group], x: str, bytes: str = "total", band: str = "ci"
) -> str:
    """Returns the caption of a figure: setting, seeds, band and which bytes count."""
    runs = [r for g in of for r in g.runs]
    text = f"{made.title}: "
    text += f"{', '.join(g.label for g in of)}. {groups.setting(runs)}. {_seeds(of, band)}."
    return f"{text} {costs.counted(bytes)}." if x == "mb" else text


def _seeds(of: Sequence[Group], band: str) -> str:
    """Returns a sentence that says over which seeds a line or bar is the mean."""
    if len({tuple(g.seeds) for g in of}) == 1:
        seeds = ", ".join(map(str, of[0].seeds))
        which = f"seed {seeds}" if len(of[0].seeds) == 1 else f"seeds {seeds}"
    else:
        which = "seeds " + "; ".join(f"{g.label}: {', '.join(map(str, g.seeds))}" for g in of)
    if any(len(g.runs) > 1 for g in of):
        return f"Means over {which}; bands are {metrics.BANDS[band]}"
    return f"One run per method ({which}), so no confidence band"


def _inches(width: float | str) -> float:
    width = width if isinstance(width, str) else f"{width}in"
    found = re.fullmatch(r"\s*([0-9.]+)\s*(in|cm|mm|pt)\s*", width)
    if not found or not 0.5 <= float(found[1]) * INCHES[found[2]] <= 40:
        raise ConfigError(
            f"--width {width}: expected a length such as 3.4in, 8.6cm, 86mm or 245pt, from 0.5 to "
            f"40 inches."
        )
    return float(found[1]) * INCHES[found[2]]


# -- parts of several figures ----------------------------------------------------------------------
def size(n: float) -> str:
    """Returns bytes as text, such as 3.4 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.3g} B"


Bars = tuple[np.ndarray, np.ndarray, float]  # x, height, width


def _binned(rounds: Sequence[int], values: np.ndarray) -> Bars:
    """At most BARS bars; a bar of several rounds is their mean."""
    k = -(-len(rounds) // BARS)
    starts = range(0, len(rounds), k)
    x = np.asarray([np.mean(rounds[i : i + k]) for i in starts])
    return x, np.asarray([values[i : i + k].mean() for i in starts]), float(k)


def _bars(
    ax: Axes,
    x: np.ndarray,
    height: np.ndarray,
    base: np.ndarray | float,
    place: int,
    wide: float = 1.0,
    alpha: float = 1.0,
) -> None:
    ax.bar(
        x,
        height,
        bottom=base,
        width=0.85 * wide,
        color=COLOURS[place % 8],
        alpha=alpha,
        edgecolor="white",
        linewidth=0.2,
    )
    ax.set_xlim(x[0] - 0.6 * wide, x[-1] + 0.6 * wide)
    _whole(ax.xaxis)


def _stack(fig: MplFigure, bars: dict[str, Bars], places: dict[str, int], ylabel: str) -> None:
    """Draws the bars of each round on one another."""
    ax = fig.add_subplot()
    base: np.ndarray | float = 0.0
    for name, (x, height, wide) in bars.items():
        _bars(ax, x, height, base, places[name], wide)
        base = base + height
    ax.set(xlabel="round", ylabel=ylabel)
    _legend(ax, [(COLOURS[i % 8], name) for name, i in places.items()])


def _stacked(bars: dict[str, Bars]) -> JsonDict:
    """Returns the values of stacked bars, for the pointer: it shows all parts of a bar."""
    series = [
        {"l": label, "x": _digits(x.tolist()), "m": _digits(height.tolist())}
        for label, (x, height, _) in bars.items()
    ]
    return {"kind": "lines", "xl": "round", "s": series}


def _digits(values: Sequence[float]) -> list[float | None]:
    """Returns the values for the pointer; None: not finite, which JSON does not have."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


def _shades(fig: MplFigure, table: np.ndarray, ylabel: str, what: str) -> Axes:
    """Draws a grid of values 0..1, rows downwards; cells without a value are blank."""
    ax = fig.add_subplot()
    # Below 0: the darkest colour of the map is as dark as a blank cell of the dark page.
    image = ax.imshow(table, aspect="auto", vmin=-0.25, vmax=1)
    _ground(ax)
    ax.set(ylabel=ylabel)
    _whole(ax.yaxis)
    fig.colorbar(image, label=what).ax.set_ylim(0, 1)
    return ax


def _cells(
    table: np.ndarray, rows: Sequence[object], columns: Sequence[object], what: str, **more: object
) -> JsonDict | None:
    """Returns the values of a grid (rows, columns) of counts, codes or rates, for the pointer; None
    for a grid that is too large.
    """
    if len(rows) * len(columns) > HOVER:
        return None
    if table.dtype.kind in "iu":
        values = table.tolist()
    else:
        values = [[None if math.isnan(v) else round(v, 4) for v in row] for row in table.tolist()]
    labels = {"r": [str(r) for r in rows], "c": [str(c) for c in columns]}
    return {"kind": "heat", "v": values, **labels, "rl": what, "cl": "round", **more}


def _legend(ax: Axes, entries: Sequence[tuple[str, str]]) -> None:
    """Draws a legend of (colour, text) above the axes, four in a row."""
    from matplotlib.patches import Patch

    handles = []
    for colour, text in entries:
        edge = style.GRID if colour == style.BLANK else colour
        handles.append(Patch(facecolor=colour, edgecolor=edge, label=text, linewidth=0.4))
    ax.legend(
        handles=handles,
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _ground(ax: Axes) -> None:
    ax.grid(False)
    ax.set_facecolor(style.BLANK)


def _whole(axis: Axis) -> None:
    """Sets ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # as AutoLocator has it


def _named(axis: Axis, labels: Sequence[str]) -> None:
    if len(labels) <= NAMED:
        axis.set_ticks(np.arange(len(labels)), labels, fontsize=9)


def _room(labels: Sequence[str]) -> float:
    """Returns the left margin, in inches, for names as long as these."""
    return min(2.0, 0.5 + 0.075 * max(map(len, labels)))

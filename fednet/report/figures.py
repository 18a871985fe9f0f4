"""Describes the figures of one run: name, title, note and how each is drawn.

A function for each figure yields a `Figure`, or nothing if the run has no data for it. Below it is
what draws the figure, with matplotlib, from values alone: another process may do it. `canvas` draws
it into a file or into the page. To add a figure, write two such functions and name the first in
`details`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from fednet.plain import JsonDict
from fednet.records import metric
from fednet.report import condensed, costs, metrics, style
from fednet.report.axes import set_names
from fednet.report.canvas import BOTTOM, SIZE, Figure, columns, digits, whole_ticks, write
from fednet.report.read import Run
from fednet.report.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MplFigure

BARS = 60  # at most in a figure: with more rounds, a bar is the mean of several
HOVER = 40_000  # cells of the largest grid that shows its values under the pointer
STEPS = 500  # at most: of more clients, a step is the mean of several
SIZES = 20  # of circles, at most, of which each is drawn once and then placed
NAMED = 30  # ticks that have names at most
WRITTEN = 12  # classes at most of a confusion matrix with its numbers in the cells


def details(run: Run) -> Iterator[Figure]:
    """Yields the figures of one run that cannot be overlaid with those of another run."""
    for made in (
        traffic,
        time_split,
        devices,
        resources,
        participation,
        availability,
        client_accuracy,
        class_accuracy,
        confusion,
        partition,
    ):
        yield from made(run)
    yield from condensed.images(run.dir)


def traffic(run: Run) -> Iterator[Figure]:
    book = costs.ledger(run)
    # Round 0 is what was sent before the first; the evaluation after the last round is left out.
    sent = book.by("round", "direction", "kind")
    rounds = sorted({t for t, _, _ in sent} - {costs.AFTER})
    if not rounds:
        return
    bars: dict[tuple[str, str], Bars] = {}
    for way in ("up", "down"):
        for kind in book.kinds:
            values = np.asarray([sent[t, way, kind] for t in rounds])
            if values.any():
                bars[way, kind] = _bin_rounds(rounds, values / 1e6)
    colours = style.colours((kind for _, kind in bars), style.KINDS)

    note = (
        "MB sent by the clients (up) and to them (down, paler) in each round, by kind of payload."
    )
    if after := book.by_round()[costs.AFTER]:
        note += f" The evaluation after the last round is not included ({size(after)})."
    if predicted := costs.compare_prediction(run, run.summary.predicted):
        off = sum(abs(v["difference"]) for way in predicted.values() for v in way.values())
        note += (
            f" Measured and predicted payload differ by {off:,} bytes."
            if off
            else " The measured payload bytes match the prediction exactly."
        )
    if wasted := costs.wasted_bytes(run):
        reasons = ", ".join(f"{why} {size(n)}" for why, n in wasted.items())
        note += f" Not used, by reason: {reasons}."
        if costs.seconds_key(run) == "seconds_virtual":
            note += " In simulated time a reply that comes after its round is counted in full."
    yield Figure(
        "bytes",
        "Traffic per round",
        note,
        partial(_draw_traffic, bars=bars, colours=colours),
        hover=_values_of_stack(
            {f"{_kind_label(kind)} {way}, MB": bar for (way, kind), bar in bars.items()}
        ),
        legend=[_kind_label(kind) for kind in colours],
    )


def _draw_traffic(
    fig: MplFigure, bars: Mapping[tuple[str, str], Bars], colours: Mapping[str, str]
) -> None:
    ax = fig.add_subplot()
    for way, sign, shade in (("up", 1, 1.0), ("down", -1, 0.55)):
        parts = [
            (colours[k], x, sign * v, wide) for (w, k), (x, v, wide) in bars.items() if w == way
        ]
        _bars(ax, parts, shade)
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
    _legend(ax, {_kind_label(kind): colour for kind, colour in colours.items()})


def _kind_label(kind: str) -> str:
    return "protocol overhead" if kind == costs.ENVELOPE else kind


def time_split(run: Run) -> Iterator[Figure]:
    """What each round's time was spent on, by the run's clock."""
    key = costs.seconds_key(run)
    whole = [float(r[key] or 0.0) for r in run.rounds]
    parts: list[dict[str, float]] = [r[f"{key}_by_phase"] or {} for r in run.rounds]
    phases = list(dict.fromkeys(p for by_phase in parts for p in by_phase))
    table = {p: [float(by_phase.get(p, 0.0)) for by_phase in parts] for p in phases}
    if table:
        rest = [max(0.0, s - sum(v[i] for v in table.values())) for i, s in enumerate(whole)]
        if max(rest) > 0.01 * max(whole):
            table["other"] = rest
    elif any(whole):
        table["all"] = whole
    else:
        return
    clock = costs.CLOCKS[key]
    yield _seconds(
        "time",
        f"Time per round ({clock})",
        "Seconds that each round took, by what the time was spent on.",
        [r.round for r in run.rounds],
        table,
        style.colours(table, style.PHASES),
        f"seconds per round ({clock})",
    )


def devices(run: Run) -> Iterator[Figure]:
    """Which device trained how long: only if there are several."""
    seconds = metrics.client_rows(run).seconds
    if len(seconds) < 2:
        return
    names = sorted(seconds)
    rounds = [r.round for r in run.rounds]
    yield _seconds(
        "devices",
        "Training by device",
        "Seconds that each device trained in each round, summed over its clients.",
        rounds,
        {name: [float(seconds[name][t]) for t in rounds] for name in names},
        {name: COLOURS[i % 8] for i, name in enumerate(names)},
        "seconds of training",
    )


def _seconds(
    name: str,
    title: str,
    note: str,
    rounds: Sequence[int],
    table: dict[str, list[float]],
    colours: dict[str, str],
    ylabel: str,
) -> Figure:
    """Draws the parts of each round on one another. table, colours: by part."""
    bars = {part: _bin_rounds(rounds, np.asarray(values)) for part, values in table.items()}

    hover = _values_of_stack({f"{part}, s": bar for part, bar in bars.items()})
    return Figure(
        name,
        title,
        note,
        partial(_draw_seconds, bars=bars, colours=colours, ylabel=ylabel),
        hover=hover,
        legend=list(table),
    )


def _draw_seconds(
    fig: MplFigure, bars: Mapping[str, Bars], colours: Mapping[str, str], ylabel: str
) -> None:
    ax = fig.add_subplot()
    _bars(ax, [(colours[part], *bar) for part, bar in bars.items()])
    ax.set(xlabel="round", ylabel=ylabel)
    _legend(ax, colours)


def resources(run: Run) -> Iterator[Figure]:
    """What the run took on the server's machine: time of processors and GPUs, and memory."""
    rows = [r for r in run.rounds if r.resources]
    if not rows:
        return
    rounds = [r.round for r in rows]
    names = sorted({name for r in rows for name in r.resources or {}})
    places = style.places(names, style.RESOURCES)
    colours = {name: COLOURS[places[name] % 8] for name in sorted(names, key=places.__getitem__)}

    def values(what: str) -> dict[str, np.ndarray]:
        """Returns the values by part of the run; NaN in a round in which it was not there."""
        return {
            name: np.asarray([(r.resources or {}).get(name, {}).get(what, np.nan) for r in rows])
            for name in colours
        }

    busy = values("busy_s")
    memory = values("memory_mb")

    values_by_label = {f"{name} busy, s": busy[name] for name in busy}
    values_by_label |= {f"{name} memory, MB": memory[name] for name in busy}
    x = np.asarray(rounds)
    yield Figure(
        "resources",
        "Processor and memory",
        "On the server's machine: processor time of the server and of the clients' processes in "
        "each round, and the most memory that they had until then. Of a GPU: for how long it was "
        "busy, and its memory in use.",
        partial(_draw_resources, rounds=rounds, busy=busy, memory=memory, colours=colours),
        hover=_values_of_stack({label: (x, v, 1.0) for label, v in values_by_label.items()}),
        legend=list(colours),
        right=0.75,
    )


def _draw_resources(
    fig: MplFigure,
    rounds: Sequence[int],
    busy: Mapping[str, np.ndarray],
    memory: Mapping[str, np.ndarray],
    colours: Mapping[str, str],
) -> None:
    ax = fig.add_subplot()
    right = ax.twinx()
    for name, colour in colours.items():
        ax.plot(rounds, busy[name], color=colour)
        right.plot(rounds, memory[name], color=colour, linestyle=":")
    ax.set(xlabel="round", ylabel="busy, seconds per round (solid)", ylim=(0, None))
    right.set(ylabel="memory, MB (dotted)", ylim=(0, None))
    right.grid(False)
    whole_ticks(ax.xaxis)
    _legend(ax, colours)


def participation(run: Run) -> Iterator[Figure]:
    """Who was selected, completed and was dropped."""
    # Of a list without a count, numpy would first look for the type of each number.
    selected = [np.fromiter(r.selected, np.intp, len(r.selected)) for r in run.rounds]
    last = max((ids.max() for ids in selected if ids.size), default=-1)
    n = max(int(run.config.get("clients", 0)), 1 + int(last))
    rounds = [r.round for r in run.rounds]
    if not n or not rounds:
        return
    reasons = sorted({why for r in run.rounds for why in r.dropped.values()})
    # 2: neither completed nor dropped in this round: it is still training, or the round was
    # discarded. From 3 on: dropped, for reasons[code - 3].
    words = ["not selected", "completed", "not finished", *reasons]
    grid = np.zeros((len(rounds), n), np.uint8)
    for of, ids, r in zip(grid, selected, run.rounds):
        of[ids] = 2
        of[np.fromiter(r.completed, np.intp, len(r.completed))] = 1
        for client, why in r.dropped.items():
            of[int(client)] = 3 + reasons.index(why)
    grid = np.ascontiguousarray(grid.T)
    kinds = [re.split(r"\W", why)[0] for why in reasons]
    places = style.places(kinds, style.DROPS)
    dropped = [style.CELLS[2 + places[kind] % (len(style.CELLS) - 2)] for kind in kinds]
    colours = [style.BLANK, *style.CELLS[:2], *dropped]
    # "not finished" is rare: it is in the legend only if there is one.
    shown = [code for code in range(len(words)) if code != 2 or (grid == 2).any()]

    pointed = [*words[:3], *(f"dropped: {why}" for why in reasons)]
    yield Figure(
        "participation",
        "Participation",
        "Which clients were selected in each round, and which of them completed it.",
        partial(
            _draw_participation,
            rounds=rounds,
            grid=grid,
            colours=colours,
            legend={words[code]: colours[code] for code in shown},
        ),
        size=(SIZE[0], min(7.0, 2.0 + 0.12 * n)),
        hover=_cells(grid, range(n), rounds, "client", words=pointed),
        legend=[words[code] for code in shown],
    )


def _draw_participation(
    fig: MplFigure,
    rounds: Sequence[int],
    grid: np.ndarray,
    colours: Sequence[str],
    legend: Mapping[str, str],
) -> None:
    from matplotlib.colors import to_rgba_array

    shades = np.rint(255 * to_rgba_array(colours)).astype(np.uint8)
    shades[0] = 0  # transparent
    cells = shades.view(np.uint32)[grid]  # the four bytes of a colour at once
    ax = fig.add_subplot()
    ax.imshow(
        cells.view(np.uint8),
        aspect="auto",
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, len(grid) - 0.5, -0.5),
    )
    ax.grid(False)
    ax.set_facecolor(style.BLANK)
    ax.set(xlabel="round", ylabel="client")
    for axis in (ax.xaxis, ax.yaxis):
        whole_ticks(axis)
    _legend(ax, legend)


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

    yield Figure(
        "availability",
        "Availability",
        "How many clients were available, were selected and completed in each round.",
        partial(_draw_availability, rounds=rounds, counts=counts),
        legend=list(counts),
    )


def _draw_availability(
    fig: MplFigure, rounds: Sequence[int], counts: Mapping[str, Sequence[int]]
) -> None:
    ax = fig.add_subplot()
    for i, values in enumerate(counts.values()):
        ax.plot(rounds, values, color=COLOURS[i], linestyle=("-", "--", ":")[i])
    ax.set(xlabel="round", ylabel="clients", ylim=(0, None))
    whole_ticks(ax.xaxis)
    _legend(ax, dict(zip(counts, COLOURS)))


def client_accuracy(run: Run) -> Iterator[Figure]:
    """The last accuracy of each client, the best first: of the personal models if the method has
    them, else of the global model, as received or at the end, on each client's own tests.
    """
    which = next((w for w in ("personal", "received", "global") if metrics.latest(run, w)), None)
    if which is None:
        return
    found = {c: float(r[f"accuracy_{which}"]) for c, r in metrics.latest(run, which).items()}
    clients = sorted(found, key=lambda c: (-found[c], c))
    last = np.asarray([found[c] for c in clients])
    name = "client_accuracy" if which == "global" else f"{which}_accuracy"
    label = metric(name).full_label(run.own_model)

    yield Figure(
        "clients",
        f"{label.capitalize()}, by client",
        f"The last evaluation of each client: mean over clients {100 * last.mean():.2f} % (each "
        f"client counts the same, not each sample), "
        f"worst {100 * last.min():.2f} %.",
        partial(_draw_client_accuracy, clients=clients, values=last, label=label),
        hover=_cells(last[None], [label], clients, "", cl="client", w=label),
        legend=["above"],
    )


def _draw_client_accuracy(
    fig: MplFigure, clients: Sequence[int], values: np.ndarray, label: str
) -> None:
    ax = fig.add_subplot()
    edges = [*range(0, len(clients), -(-len(clients) // STEPS)), len(clients)]
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    height = [*means, means[-1]]
    left = np.asarray(edges) - 0.5
    # With an edge it would be a `use` on the page, which is not stretched when it is enlarged.
    ax.fill_between(left, height, step="post", facecolor=COLOURS[0], edgecolor="none")
    ax.axhline(
        values.mean(),
        color=COLOURS[2],
        dashes=(4, 2),
        linewidth=1.2,
        label=f"mean {values.mean():.3f}",
    )
    ax.set(xlabel="client, best first", ylabel=label, ylim=(0, 1))
    ax.set_xlim(-0.5, len(clients) - 0.5)
    step = -(-len(clients) // NAMED)
    set_names(ax.xaxis, range(0, len(clients), step), list(map(str, clients[::step])), 9)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1))


def class_accuracy(run: Run) -> Iterator[Figure]:
    every = {r.round: metrics.class_accuracy(r) for r in run.rounds}
    found = {round: by_class for round, by_class in every.items() if by_class is not None}
    if not found:
        return
    rounds = list(found)
    table = np.stack(list(found.values()), axis=1)
    classes = metrics.class_names(run, len(table))
    by_class = 100 * (metrics.class_spread(run) or 0.0)

    yield Figure(
        "classes",
        "Global test accuracy, by class",
        "Accuracy of the global model on each class of the test set. Standard deviation between "
        f"classes, mean over rounds: {by_class:.1f} percentage points.",
        partial(_draw_class_accuracy, rounds=rounds, table=table, classes=classes),
        hover=_cells(table, classes, rounds, "class", w="global test accuracy"),
        left=_room(classes),
        right=0.3,
    )


def _draw_class_accuracy(
    fig: MplFigure, rounds: Sequence[int], table: np.ndarray, classes: Sequence[str]
) -> None:
    ax = _shades(fig, table, "class", "global test accuracy")
    step = max(1, len(rounds) // 10)
    set_names(ax.xaxis, range(0, len(rounds), step), list(map(str, rounds[::step])))
    ax.set(xlabel="evaluated round")
    _set_tick_names(ax.yaxis, classes)


def confusion(run: Run) -> Iterator[Figure]:
    """Which classes the last model confuses: only if a metric counts them."""
    found = run.summary.confusion
    if found is None:
        return
    counts = np.asarray(found["counts"])
    classes = metrics.class_names(run, len(counts))
    shares = counts / np.maximum(1, counts.sum(1, keepdims=True))

    long = max(map(len, classes)) > 3
    tests = "the server's test set" if found["tested_on"] == "server" else "the clients' tests"
    models = "model" if found["model"] == "global" else "models"
    yield Figure(
        "confusion",
        "Confusion matrix",
        f"Samples by true and predicted class, of the last {found['model']} {models} on {tests}.",
        partial(_draw_confusion, counts=counts, shares=shares, classes=classes, turned=long),
        size=(SIZE[0], 3.8),
        hover=_cells(counts, classes, classes, "true class", cl="predicted class", w="samples"),
        left=_room(classes),
        right=0.3,
        bottom=_room(classes) if long else BOTTOM,
    )


def _draw_confusion(
    fig: MplFigure, counts: np.ndarray, shares: np.ndarray, classes: Sequence[str], turned: bool
) -> None:
    ax = _shades(fig, shares, "true class", "share of the true class")
    ax.set(xlabel="predicted class")
    whole_ticks(ax.xaxis)
    _set_tick_names(ax.xaxis, classes)
    _set_tick_names(ax.yaxis, classes)
    ax.tick_params("x", rotation=90 if turned else 0)
    if len(classes) <= WRITTEN:
        for i, j in np.argwhere(counts):
            text = f"{counts[i, j]:.6g}"
            colour = style.ON_LIGHT if shares[i, j] > 0.5 else style.ON_DARK
            cell = ax.text(j, i, text, ha="center", va="center", fontsize=9, color=colour)
            cell.set_clip_on(True)  # the page moves what is clipped when it enlarges a part


def partition(run: Run) -> Iterator[Figure]:
    counts = run.counts
    if counts is not None and counts.ndim == 2 and counts.size:
        yield bubbles(counts, metrics.class_names(run, counts.shape[1]))


def bubbles(counts: np.ndarray, classes: Sequence[str]) -> Figure:
    """counts: (N, C) training samples by client and class."""
    held = counts.sum(1)

    return Figure(
        "partition",
        "Data per client",
        "Training samples of each class at each client: the area of a circle is their number. The "
        f"smallest client has {held.min():,} samples, the largest {held.max():,}.",
        partial(_draw_bubbles, counts=counts, classes=classes),
        hover=_cells(counts.T, classes, range(len(counts)), "class", cl="client", w="samples"),
        legend=["above"],
        left=_room(classes),
    )


def _draw_bubbles(fig: MplFigure, counts: np.ndarray, classes: Sequence[str]) -> None:
    n, c_all = counts.shape
    ax = fig.add_subplot()
    width, height = fig.get_size_inches()
    # Points of a cell.
    across = 72 * (width - 0.9) / n
    down = 72 * (height - 1.0) / c_all
    largest = min(180.0, (0.9 * max(6.0, min(across, down))) ** 2)
    dots = np.argwhere(counts).T
    samples = counts[counts > 0]
    sizes = np.unique(samples)
    many = samples.size > HOVER // 10
    circles = [(dots[:, samples == size], size) for size in sizes]
    if many or len(sizes) > SIZES:
        circles = [(dots, samples)]
    for (i, c), size in circles:
        ax.scatter(
            i,
            c,
            s=largest * size / max(1, counts.max()),
            color=COLOURS[0],
            alpha=0.75,
            linewidth=0,
            rasterized=many,
        )
    ax.set(xlabel="client", ylabel="class", xlim=(-0.5, n - 0.5), ylim=(c_all - 0.5, -0.5))
    whole_ticks(ax.xaxis)
    _set_tick_names(ax.yaxis, classes)
    text = f"{counts.sum():,} samples; the largest circle is {counts.max():,}"
    ax.set_title(text, loc="right", fontsize=9)


def partition_file(counts: np.ndarray, classes: Sequence[str] | None, path: Path | str) -> None:
    """Draws clients against classes into `path` (.png, .svg or .pdf), larger for more of them."""
    made = bubbles(counts, [str(n) for n in classes or range(counts.shape[1])])
    width = 1.2 + 0.32 * counts.shape[0]
    height = 1.2 + 0.34 * counts.shape[1]
    fitted = (min(40.0, max(5.0, width)), min(40.0, max(3.0, height)))
    write(replace(made, size=fitted), Path(path))


# -- parts of several figures ----------------------------------------------------------------------
def size(n: float) -> str:
    """Returns bytes as text, such as 3.4 MB."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:.3g} {name}"
    return f"{n:.3g} B"


Bars = tuple[np.ndarray, np.ndarray, float]  # x, height, width


def _bin_rounds(rounds: Sequence[int], values: np.ndarray) -> Bars:
    """At most BARS bars; a bar of several rounds is their mean."""
    k = -(-len(rounds) // BARS)
    starts = range(0, len(rounds), k)
    x = np.asarray([np.mean(rounds[i : i + k]) for i in starts])
    return x, np.asarray([values[i : i + k].mean() for i in starts]), float(k)


def _bars(
    ax: Axes, parts: Sequence[tuple[str, np.ndarray, np.ndarray, float]], alpha: float = 1.0
) -> None:
    """Draws bars on one another. parts: (colour, x, height, width)."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    base = np.zeros(1)
    for colour, x, height, wide in parts:
        top = base + height
        corners = np.empty((len(x), 4, 2))
        corners[..., 0] = x[:, None] + 0.425 * wide * np.array([-1, 1, 1, -1])
        corners[:, :2, 1] = base[:, None]
        corners[:, 2:, 1] = top[:, None]
        # As one path: matplotlib takes a millisecond for each bar that it draws by itself.
        bars = PathPatch(
            Outline.make_compound_path_from_polys(corners),
            facecolor=colour,
            alpha=alpha,
            edgecolor="white",
            linewidth=0.2,
        )
        bars.sticky_edges.y.append(0)  # no margin below the lowest
        ax.add_artist(bars)
        ax.update_datalim(corners.reshape(-1, 2))
        base = top
        ax.set_xlim(x[0] - 0.6 * wide, x[-1] + 0.6 * wide)
    ax.autoscale_view(scalex=False)
    whole_ticks(ax.xaxis)


def _values_of_stack(bars: dict[str, Bars]) -> JsonDict:
    """Returns the values of stacked bars, for the pointer: it shows all parts of a bar."""
    series = [
        {"l": label, "x": digits(x.tolist()), "m": digits(height.tolist())}
        for label, (x, height, _) in bars.items()
    ]
    return {"kind": "lines", "xl": "round", "s": series}


def _shades(fig: MplFigure, table: np.ndarray, ylabel: str, what: str) -> Axes:
    """Draws a grid of values 0..1, rows downwards; cells without a value are blank."""
    ax = fig.add_subplot()
    # Below 0: the darkest colour of the map is as dark as a blank cell of the dark page.
    image = ax.imshow(table, aspect="auto", vmin=-0.25, vmax=1)
    ax.grid(False)
    ax.set_facecolor(style.BLANK)
    ax.set(ylabel=ylabel)
    whole_ticks(ax.yaxis)
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


def _legend(ax: Axes, colours: Mapping[str, str]) -> None:
    """Draws a legend above the axes, in rows. colours: by text."""
    from matplotlib.patches import Patch

    width = cast("MplFigure", ax.figure).get_figwidth()
    handles = []
    for text, colour in colours.items():
        edge = style.GRID if colour == style.BLANK else colour
        handles.append(Patch(facecolor=colour, edgecolor=edge, label=text, linewidth=0.4))
    ax.legend(
        handles=handles,
        ncols=columns(list(colours), width),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _set_tick_names(axis: Axis, labels: Sequence[str]) -> None:
    if len(labels) <= NAMED:
        set_names(axis, range(len(labels)), labels, 9)


def _room(labels: Sequence[str]) -> float:
    """Returns the left margin, in inches, for names as long as these."""
    return min(2.0, 0.5 + 0.075 * max(map(len, labels)))

"""The figures of a run, and the one figure fit for a paper: what each shows and how.

What they show is from `figures`; `canvas` draws them into files and into the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednet.errors import ConfigError, unknown
from fednet.records import metric, names
from fednet.report import figures, metrics
from fednet.report.canvas import BLANK, TIMELESS, Figure, canvas, write_csv
from fednet.report.figures import Series
from fednet.report.groups import Group, group
from fednet.report.read import Run

INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
BARS = 60  # in a figure at most: where there are more rounds, a bar is the mean of several
HOVER = 40_000  # cells of a grid that a pointer can ask
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


# -- of a run --------------------------------------------------------------------------------------
def of_run(run: Run) -> Iterator[Figure]:
    """The figures that this run has data for."""
    for x in figures.AXES:
        yield from curve(group([run]), x)
    yield from details(run)


def details(run: Run) -> Iterator[Figure]:
    """Those that are of this run alone, and cannot be laid over another's."""
    yield from bytes_by_kind(run)
    yield from time_split(run)
    yield from participation(run)
    yield from client_accuracy(run)
    yield from class_accuracy(run)
    yield from partition(run)


def curve(
    groups: Sequence[Group], x: str = "rounds", y: str = "accuracy", bytes: str = "total"
) -> Iterator[Figure]:
    series = figures.curves(groups, x, y, bytes)
    if not series:
        return
    across = figures.axis(groups, x, bytes)

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        for s in series:
            every = max(1, len(s.x) // 8)
            label = f"{s.label} (n={s.n})" if any(o.n > 1 for o in series) else s.label
            ax.plot(
                s.x,
                s.mean,
                color=s.colour,
                marker=s.marker,
                markevery=every,
                markersize=3.5,
                label=label,
                dashes=s.dash or (None, None),
                gid=f"series-{s.place}",
            )
            if s.n > 1:
                shade = ax.fill_between(s.x, s.low, s.high, color=s.colour, alpha=0.18, linewidth=0)
                shade.set_gid(f"series-{s.place}-band")
        ax.set(xlabel=across, ylabel=metric(y).label)
        ax.set_ylim(*_within(series, metric(y).share))
        if x == "rounds":
            ax.xaxis.get_major_locator().set_params(integer=True)
        if len(series) > 1:
            ax.legend(handlelength=3.2).set_gid("key")

    rows = [
        (s.label, s.n, t, a, m, lo, hi)
        for s in series
        for t, a, m, lo, hi in zip(s.round, s.x, s.mean, s.low, s.high)
    ]
    yield Figure(
        f"{y}_{x}",
        f"{metric(y).label.capitalize()} against {across}",
        ("label", "seeds", "round", x, "mean", "low95", "high95"),
        rows,
        draw,
        hover={
            "kind": "lines",
            "xl": across,
            "s": [
                {
                    "i": s.place,
                    "l": s.label,
                    "t": s.round,
                    "x": _short(s.x),
                    "m": _short(s.mean),
                    "h": _short([b - m for b, m in zip(s.high, s.mean)]) if s.n > 1 else None,
                }
                for s in series
            ],
        },
    )


def _within(series: Sequence[Series], share: bool) -> tuple[float, float]:
    """The range of y. The means have the axis: a band so wide that it would flatten them leaves
    it. share: values are 0..1.
    """
    means = [v for s in series for v in s.mean]
    span = (max(means) - min(means)) or 0.1
    low = max(min(v for s in series for v in s.low) - 0.05 * span, min(means) - 0.4 * span)
    high = min(max(v for s in series for v in s.high) + 0.05 * span, max(means) + 0.4 * span)
    return (max(0.0, low), min(1.0, high)) if share else (low, high)


def _short(values: Sequence[float]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]


def bytes_by_kind(run: Run) -> Iterator[Figure]:
    rounds, table = figures.bytes_by_kind(run)
    if not rounds:
        return
    kinds = list(dict.fromkeys(k for way in table.values() for k in way))
    binned = {
        (way, kind): _binned(rounds, np.asarray(values) / 1e6)
        for way in ("up", "down")
        for kind, values in table[way].items()
    }

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        base: dict[str, Any] = {"up": 0.0, "down": 0.0}
        for (way, kind), (x, height, wide) in binned.items():
            i, sign = kinds.index(kind), 1 if way == "up" else -1
            _bars(ax, x, sign * height, sign * base[way], i, wide, HATCHES[i % 6])
            base[way] = base[way] + height
        ax.axhline(0, color="black", linewidth=0.8)
        ax.yaxis.set_major_formatter(lambda v, _: f"{abs(v):g}")
        ax.set(xlabel="round", ylabel="MB a round:  down  |  up")
        _legend(ax, [(figures.COLOURS[i % 8], k, HATCHES[i % 6]) for i, k in enumerate(kinds)])

    rows = [
        (t, way, k, v[i])
        for way, ks in table.items()
        for k, v in ks.items()
        for i, t in enumerate(rounds)
    ]
    yield Figure(
        "bytes",
        "Bytes a round by kind",
        ("round", "direction", "kind", "bytes"),
        rows,
        draw,
        hover=_stack({f"{kind} {way}, MB": b for (way, kind), b in binned.items()}),
        legend=len(kinds),
    )


def _stack(binned: dict[str, tuple[np.ndarray, np.ndarray, float]]) -> dict[str, Any]:
    """What a pointer may ask of stacked bars: all parts of the bar it is at."""
    return {
        "kind": "lines",
        "xl": "round",
        "s": [
            {"l": label, "x": _short(x.tolist()), "m": _short(height.tolist())}
            for label, (x, height, _) in binned.items()
        ],
    }


def _binned(rounds: Sequence[int], values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """(x, height, width) of at most BARS bars; a bar of several rounds is their mean."""
    k = -(-len(rounds) // BARS)
    starts = range(0, len(rounds), k)
    x = np.asarray([np.mean(rounds[i : i + k]) for i in starts])
    return x, np.asarray([values[i : i + k].mean() for i in starts]), float(k)


def participation(run: Run) -> Iterator[Figure]:
    p = figures.participation(run)
    if not p.grid.size:
        return
    words = ["not asked", "completed", *p.reasons]
    colours = [
        BLANK,
        figures.COLOURS[0],
        *(figures.COLOURS[(2, 1, 5, 7, 4, 3, 6)[i % 7]] for i in range(len(p.reasons))),
    ]

    def draw(fig: Any) -> None:
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
            axis.get_major_locator().set_params(integer=True)
        _legend(ax, [(c, w, "") for c, w in zip(colours, words)])

    rows = [
        (t, i, words[p.grid[i, j]]) for j, t in enumerate(p.rounds) for i in range(p.grid.shape[0])
    ]
    asked = [words[0], words[1], *(f"dropped: {why}" for why in p.reasons)]
    yield Figure(
        "participation",
        "Who took part",
        ("round", "client", "what"),
        rows,
        draw,
        (6.0, min(7.0, 2.0 + 0.12 * p.grid.shape[0])),
        hover=_heat(p.grid.tolist(), range(p.grid.shape[0]), p.rounds, "client", words=asked),
        legend=len(words),
    )


def _heat(
    cells: list[Any], rows: Sequence[Any], columns: Sequence[Any], what: str, **more: Any
) -> dict[str, Any] | None:
    """What a pointer may ask of a grid: its cell by row and column; None of too large a one."""
    if len(rows) * len(columns) > HOVER:
        return None
    names = {"r": [str(r) for r in rows], "c": [str(c) for c in columns]}
    return {"kind": "heat", "v": cells, **names, "rl": what, "cl": "round", **more}


def _cells(table: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in table]


def client_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.client_accuracy(run)
    if found is None:
        return
    which, clients, rounds, table = found
    last = figures.last_of(table)

    def bars(fig: Any) -> None:
        ax = fig.add_subplot()
        if len(clients) <= HOVER // 100:
            _bars(ax, np.arange(len(clients)), last, 0.0, 0)
        else:
            ax.fill_between(range(len(clients)), last, step="mid", color=figures.COLOURS[0])
        ax.axhline(
            last.mean(),
            color=figures.COLOURS[2],
            dashes=(4, 2),
            linewidth=1.2,
            label=f"mean {last.mean():.3f}",
        )
        ax.set(xlabel="client, best first", ylabel=f"{which} accuracy", ylim=(0, 1))
        ax.set_xlim(-0.5, len(clients) - 0.5)
        if len(clients) <= 25:
            ax.set_xticks(np.arange(len(clients)), [str(c) for c in clients], fontsize=9)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1))

    title = f"Accuracy of the {which} model{'s' if which == 'personal' else ''}, client by client"
    said = f"{which} accuracy"
    yield Figure(
        "clients",
        title,
        ("client", f"accuracy_{which}"),
        list(zip(clients, last.tolist())),
        bars,
        hover=_heat(_cells(last[None]), [said], clients, "", cl="client", w=said),
        legend=1,
    )
    rows = [
        (t, c, table[i, j])
        for i, c in enumerate(clients)
        for j, t in enumerate(rounds)
        if not np.isnan(table[i, j])
    ]
    yield Figure(
        "clients_over_time",
        title + " and round by round",
        ("round", "client", f"accuracy_{which}"),
        rows,
        lambda fig: _shades(fig, table, rounds, "client, best first", said),
        hover=_heat(_cells(table), clients, rounds, "client", w=said),
        right=0.3,
    )


def _shades(fig: Any, table: np.ndarray, rounds: Sequence[int], ylabel: str, what: str) -> Any:
    """A grid of values 0..1, rows downwards; blank where nothing was evaluated."""
    ax = fig.add_subplot()
    image = ax.imshow(table, aspect="auto", vmin=0, vmax=1)
    _ground(ax)
    ax.set(xlabel="evaluated round", ylabel=ylabel)
    ax.yaxis.get_major_locator().set_params(integer=True)
    step = max(1, len(rounds) // 10)
    ax.set_xticks(np.arange(0, len(rounds), step), [str(t) for t in rounds[::step]])
    fig.colorbar(image, label=what)
    return ax


def class_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.class_accuracy(run)
    if found is None:
        return
    rounds, table = found
    names = figures.class_names(run, len(table))

    def draw(fig: Any) -> None:
        ax = _shades(fig, table, rounds, "class", "test accuracy")
        _named(ax, names)

    rows = [(t, names[c], table[c, j]) for j, t in enumerate(rounds) for c in range(len(table))]
    yield Figure(
        "classes",
        "Test accuracy by class",
        ("round", "class", "accuracy"),
        rows,
        draw,
        hover=_heat(_cells(table), names, rounds, "class", w="test accuracy"),
        left=_room(names),
        right=0.3,
    )


def partition(run: Run) -> Iterator[Figure]:
    counts = run.counts
    if counts is None or counts.ndim != 2 or not counts.size:
        return
    names = figures.class_names(run, counts.shape[1])
    clients, classes = counts.shape

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        i, c = np.nonzero(counts)
        across, down = 72 * 5.1 / clients, 72 * 2.4 / classes  # points of a cell
        largest = min(180.0, (0.9 * max(6.0, min(across, down))) ** 2)
        ax.scatter(
            i,
            c,
            s=largest * counts[i, c] / max(1, counts.max()),
            color=figures.COLOURS[0],
            alpha=0.75,
            linewidth=0,
            rasterized=len(i) > HOVER // 10,
        )
        ax.set(
            xlabel="client",
            ylabel="class",
            xlim=(-0.5, clients - 0.5),
            ylim=(classes - 0.5, -0.5),
        )
        ax.xaxis.get_major_locator().set_params(integer=True)
        _named(ax, names)
        ax.set_title(f"largest: {counts.max()} samples", loc="right", fontsize=9)

    rows = [(i, names[c], int(counts[i, c])) for i in range(clients) for c in range(classes)]
    yield Figure(
        "partition",
        "Who holds what",
        ("client", "class", "samples"),
        rows,
        draw,
        hover=_heat(counts.T.tolist(), names, range(clients), "class", cl="client", w="samples"),
        legend=1,
        left=_room(names),
    )


def time_split(run: Run) -> Iterator[Figure]:
    rounds, table = figures.time_split(run)
    if not table:
        return
    binned = {phase: _binned(rounds, np.asarray(values)) for phase, values in table.items()}

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        base: Any = 0.0
        for i, (x, height, wide) in enumerate(binned.values()):
            _bars(ax, x, height, base, i, wide)
            base = base + height
        ax.set(xlabel="round", ylabel="seconds a round")
        _legend(ax, [(figures.COLOURS[i % 8], phase, "") for i, phase in enumerate(table)])

    rows = [(t, phase, v[i]) for phase, v in table.items() for i, t in enumerate(rounds)]
    yield Figure(
        "time",
        "Where the time goes",
        ("round", "phase", "seconds"),
        rows,
        draw,
        hover=_stack({f"{phase}, s": b for phase, b in binned.items()}),
        legend=len(table),
    )


# -- what several of them have ---------------------------------------------------------------------
def _bars(
    ax: Any,
    x: np.ndarray,
    height: np.ndarray,
    base: Any,
    place: int,
    wide: float = 1.0,
    hatch: str = "",
) -> None:
    ax.bar(
        x,
        height,
        bottom=base,
        width=0.85 * wide,
        color=figures.COLOURS[place % 8],
        hatch=hatch,
        edgecolor="white",
        linewidth=0.2,
    )
    ax.set_xlim(x[0] - 0.6 * wide, x[-1] + 0.6 * wide)
    ax.xaxis.get_major_locator().set_params(integer=True)


def _legend(ax: Any, entries: Sequence[tuple[str, str, str]]) -> None:
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


def _ground(ax: Any) -> None:
    ax.grid(False)
    ax.set_facecolor(BLANK)


def _named(ax: Any, names: Sequence[str]) -> None:
    if len(names) <= 30:
        ax.set_yticks(np.arange(len(names)), names, fontsize=9)


def _room(names: Sequence[str]) -> float:
    """Inches to the left of names this long."""
    return min(2.0, 0.5 + 0.075 * max(map(len, names)))


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
        ("--bytes", bytes, metrics.BYTES),
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
    made = next(curve(groups, x, y, bytes), None)
    if made is None:
        raise ConfigError(f"figure: none of the runs has {metric(y).label} in its rounds.jsonl.")
    with canvas((inches, 0.68 * inches), **style) as fig:
        made.draw(fig)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, metadata=TIMELESS.get(path.suffix), dpi=300)
    write_csv(made, path.with_suffix(".csv"))
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

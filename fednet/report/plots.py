"""Figures as files: SVG, PNG and their data as CSV, and the one figure fit for a paper.

Matplotlib is imported only where it draws. The same run gives the same files, byte for byte.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednet.errors import ConfigError, unknown
from fednet.report import figures
from fednet.report.groups import group
from fednet.report.read import Run

# So that the same run gives the same file.
TIMELESS = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72}
BARS = 200
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "fednet",
    "figure.constrained_layout.use": True,
    "image.cmap": "cividis",
}


@dataclass(frozen=True)
class Figure:
    """A figure to be drawn. size: inches; rows: the data it shows, under `columns`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    draw: Callable[[Any], None]  # onto a matplotlib Figure
    size: tuple[float, float] = (6.0, 3.6)


# -- of a run --------------------------------------------------------------------------------------
def of_run(run: Run) -> Iterator[Figure]:
    """The figures that this run has data for."""
    for x in figures.AXES:
        yield from curve([run], x)
    yield from bytes_by_kind(run)
    yield from participation(run)
    yield from client_accuracy(run)
    yield from class_accuracy(run)
    yield from partition(run)
    yield from time_split(run)


def curve(
    runs: Sequence[Run],
    x: str = "rounds",
    y: str = "accuracy",
    bytes: str = "total",
    size: tuple[float, float] = (6.0, 3.6),
) -> Iterator[Figure]:
    series = figures.curves(group(runs), x, y, bytes)
    if not series:
        return

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
            )
            if s.n > 1:
                ax.fill_between(s.x, s.low, s.high, color=s.colour, alpha=0.18, linewidth=0)
        ax.set(xlabel=figures.AXES[x], ylabel=figures.VALUES[y])
        if x == "rounds":
            ax.xaxis.get_major_locator().set_params(integer=True)
        if len(series) > 1:
            ax.legend(handlelength=3.2)

    rows = [
        (s.label, s.n, t, a, m, lo, hi)
        for s in series
        for t, a, m, lo, hi in zip(s.round, s.x, s.mean, s.low, s.high)
    ]
    title = f"{figures.VALUES[y].capitalize()} against {figures.AXES[x]}"
    yield Figure(
        f"{y}_{x}",
        title,
        ("label", "seeds", "round", x, "mean", "low95", "high95"),
        rows,
        draw,
        size,
    )


def bytes_by_kind(run: Run) -> Iterator[Figure]:
    rounds, table = figures.bytes_by_kind(run)
    if not rounds:
        return
    kinds = list(dict.fromkeys(k for way in table.values() for k in way))

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        for way, sign in (("up", 1), ("down", -1)):
            base = np.zeros(len(rounds))
            for kind, values in table[way].items():
                height = np.asarray(values) / 1e6
                i = kinds.index(kind)
                _bars(
                    ax,
                    rounds,
                    sign * height,
                    sign * base,
                    i,
                    ("", "//", "..", "xx", "\\\\", "++")[i % 6],
                )
                base += height
        handles = [
            _patch(figures.COLOURS[i % 8], k, ("", "//", "..", "xx", "\\\\", "++")[i % 6])
            for i, k in enumerate(kinds)
        ]
        ax.axhline(0, color="black", linewidth=0.8)
        ax.yaxis.set_major_formatter(lambda v, _: f"{abs(v):g}")
        ax.set(xlabel="round", ylabel="MB a round:  down  |  up")
        ax.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))

    rows = [
        (t, way, k, v[i])
        for way, ks in table.items()
        for k, v in ks.items()
        for i, t in enumerate(rounds)
    ]
    yield Figure(
        "bytes", "Bytes a round by kind", ("round", "direction", "kind", "bytes"), rows, draw
    )


def participation(run: Run) -> Iterator[Figure]:
    p = figures.participation(run)
    if not p.grid.size:
        return
    words = ["not asked", "completed", *p.reasons]
    colours = [
        "#EDEDED",
        figures.COLOURS[0],
        *(figures.COLOURS[(2, 1, 5, 7, 4, 3, 6)[i % 7]] for i in range(len(p.reasons))),
    ]

    def draw(fig: Any) -> None:
        from matplotlib.colors import ListedColormap

        ax = fig.add_subplot()
        ax.imshow(
            p.grid,
            cmap=ListedColormap(colours),
            vmin=0,
            vmax=len(colours) - 1,
            aspect="auto",
            interpolation="nearest",
            extent=(p.rounds[0] - 0.5, p.rounds[-1] + 0.5, p.grid.shape[0] - 0.5, -0.5),
        )
        ax.grid(False)
        ax.set(xlabel="round", ylabel="client")
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.legend(
            handles=[_patch(c, w) for c, w in zip(colours, words)],
            ncols=4,
            loc="upper center",
            bbox_to_anchor=(0.5, 1.16),
        )

    rows = [
        (t, i, words[p.grid[i, j]]) for j, t in enumerate(p.rounds) for i in range(p.grid.shape[0])
    ]
    yield Figure(
        "participation",
        "Who took part",
        ("round", "client", "what"),
        rows,
        draw,
        (6.0, min(7.0, 2.0 + 0.12 * p.grid.shape[0])),
    )


def client_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.client_accuracy(run)
    if found is None:
        return
    which, clients, rounds, table = found
    last = figures.last_of(table)

    def bars(fig: Any) -> None:
        ax = fig.add_subplot()
        _bars(ax, range(len(clients)), last, np.zeros(len(last)), 0)
        ax.axhline(
            last.mean(),
            color=figures.COLOURS[2],
            dashes=(4, 2),
            linewidth=1.2,
            label=f"mean {last.mean():.3f}",
        )
        ax.set(xlabel="client, best first", ylabel=f"{which} accuracy", ylim=(0, 1))
        if len(clients) <= 40:
            ax.set_xticks(np.arange(len(clients)), [str(c) for c in clients], fontsize=7)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1))

    def over_time(fig: Any) -> None:
        ax = fig.add_subplot()
        image = ax.imshow(table, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        ax.grid(False)
        ax.set(xlabel="evaluated round", ylabel="client, best first")
        ax.yaxis.get_major_locator().set_params(integer=True)
        step = max(1, len(rounds) // 10)
        ax.set_xticks(np.arange(0, len(rounds), step), [str(t) for t in rounds[::step]])
        fig.colorbar(image, label=f"{which} accuracy")

    title = f"Accuracy of the {which} model{'s' if which == 'personal' else ''}, client by client"
    yield Figure(
        "clients", title, ("client", f"accuracy_{which}"), list(zip(clients, last.tolist())), bars
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
        over_time,
    )


def class_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.class_accuracy(run)
    if found is None:
        return
    rounds, table = found
    names = figures.class_names(run, len(table))

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        image = ax.imshow(table, aspect="auto", interpolation="nearest", vmin=0, vmax=1)
        ax.grid(False)
        ax.set(xlabel="evaluated round", ylabel="class")
        step = max(1, len(rounds) // 10)
        ax.set_xticks(np.arange(0, len(rounds), step), [str(t) for t in rounds[::step]])
        if len(names) <= 30:
            ax.set_yticks(np.arange(len(names)), names, fontsize=7)
        fig.colorbar(image, label="test accuracy")

    rows = [(t, names[c], table[c, j]) for j, t in enumerate(rounds) for c in range(len(table))]
    yield Figure("classes", "Test accuracy by class", ("round", "class", "accuracy"), rows, draw)


def partition(run: Run) -> Iterator[Figure]:
    counts = run.counts
    if counts is None or counts.ndim != 2:
        return
    names = figures.class_names(run, counts.shape[1])

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        i, c = np.nonzero(counts)
        ax.scatter(
            i,
            c,
            s=180 * counts[i, c] / max(1, counts.max()),
            color=figures.COLOURS[0],
            alpha=0.75,
            linewidth=0,
        )
        ax.set(
            xlabel="client",
            ylabel="class",
            xlim=(-0.7, len(counts) - 0.3),
            ylim=(-0.7, counts.shape[1] - 0.3),
        )
        ax.xaxis.get_major_locator().set_params(integer=True)
        if len(names) <= 30:
            ax.set_yticks(np.arange(len(names)), names, fontsize=7)
        ax.set_title(f"largest: {counts.max()} samples", loc="right", fontsize=8)

    rows = [
        (i, names[c], int(counts[i, c])) for i in range(len(counts)) for c in range(counts.shape[1])
    ]
    yield Figure("partition", "Who holds what", ("client", "class", "samples"), rows, draw)


def time_split(run: Run) -> Iterator[Figure]:
    rounds, table = figures.time_split(run)
    if not table:
        return

    def draw(fig: Any) -> None:
        ax = fig.add_subplot()
        base = np.zeros(len(rounds))
        for i, values in enumerate(table.values()):
            _bars(ax, rounds, np.asarray(values), base, i)
            base += values
        ax.set(xlabel="round", ylabel="seconds a round")
        handles = [_patch(figures.COLOURS[i % 8], phase) for i, phase in enumerate(table)]
        ax.legend(handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16))

    rows = [(t, phase, v[i]) for phase, v in table.items() for i, t in enumerate(rounds)]
    yield Figure("time", "Where the time goes", ("round", "phase", "seconds"), rows, draw)


def _bars(
    ax: Any, x: Sequence[int], height: np.ndarray, base: np.ndarray, place: int, hatch: str = ""
) -> None:
    """Bars on `base`; where there are too many to be told apart, one stepped area, which draws
    faster.
    """
    look = {
        "color": figures.COLOURS[place % 8],
        "hatch": hatch,
        "edgecolor": "white",
        "linewidth": 0.2,
    }
    if len(x) <= BARS:
        ax.bar(x, height, bottom=base, width=0.85, **look)
    else:
        ax.fill_between(x, base, base + height, step="mid", **look)


def _patch(colour: str, label: str, hatch: str = "") -> Any:
    from matplotlib.patches import Patch

    return Patch(
        facecolor=colour,
        label=label,
        hatch=hatch,
        edgecolor="white" if hatch else colour,
        linewidth=0.4,
    )


# -- to files --------------------------------------------------------------------------------------
def save(run: Run, folder: Path) -> list[Path]:
    """Every figure of a run as SVG and PNG, its data as CSV. Returns the files."""
    folder.mkdir(exist_ok=True)
    written = []
    for figure in of_run(run):
        written += write(figure, [folder / f"{figure.name}.{kind}" for kind in ("svg", "png")])
        written.append(_csv(figure, folder / f"{figure.name}.csv"))
    return written


def write(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    """One figure, titled, drawn once, as files of the kinds that their names say."""
    with _canvas(figure.size) as fig:
        figure.draw(fig)
        fig.suptitle(figure.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        for path in paths:
            fig.savefig(path, metadata=TIMELESS.get(path.suffix), dpi=120)
    return list(paths)


@contextmanager
def _canvas(size: tuple[float, float], **style: Any) -> Iterator[Any]:
    """A figure without pyplot: nothing global, no display, no figure left open."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    settings: Any = {**STYLE, **style}
    with matplotlib.rc_context(settings):
        fig = Canvas(figsize=size)
        FigureCanvasAgg(fig)
        yield fig


def _csv(figure: Figure, path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(figure.columns)
        out.writerows(figure.rows)
    return path


def figure(
    runs: Sequence[Run],
    out: str | Path,
    x: str = "rounds",
    y: str = "accuracy",
    width: float | str = 3.4,
    bytes: str = "total",
) -> str:
    """`fednet figure`: one figure fit for a paper, and its data beside it as CSV. Returns the
    caption.

    PDF with embedded TrueType (type 42). width: inches, or a text such as 3.4in, 8.6cm, 86mm.
    Raises ConfigError for an unknown axis, value, width or kind of file, or where no run was
    evaluated.
    """
    path = Path(out)
    if not runs:
        raise ConfigError("figure: expected at least one run directory.")
    for what, name, known in (
        ("--x", x, figures.AXES),
        ("--y", y, figures.VALUES),
        ("--bytes", bytes, ("total", "up", "down")),
        ("kind of file", path.suffix[1:], ("pdf", "svg", "png", "eps")),
    ):
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    inches = _inches(width)
    with _canvas(
        (inches, 0.68 * inches),
        **{"font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7, "lines.linewidth": 1.2},
    ) as fig:
        made = next(curve(runs, x, y, bytes), None)
        if made is None:
            raise ConfigError(
                f"figure: none of the runs has {figures.VALUES[y]} in its rounds.jsonl."
            )
        made.draw(fig)
        path.parent.mkdir(parents=True, exist_ok=True)
        fig.savefig(path, metadata=TIMELESS.get(path.suffix), dpi=300)
    _csv(made, path.with_suffix(".csv"))
    return figures.caption(group(runs), x, y, bytes)


def _inches(width: float | str) -> float:
    width = width if isinstance(width, str) else f"{width}in"
    found = re.fullmatch(r"\s*([0-9.]+)\s*(in|cm|mm|pt)\s*", width)
    if not found or not 0.5 <= float(found[1]) * INCHES[found[2]] <= 40:
        raise ConfigError(
            f"--width {width}: expected a length such as 3.4in, 8.6cm, 86mm or 245pt, from 0.5 to "
            f"40 inches."
        )
    return float(found[1]) * INCHES[found[2]]

"""The figures of one run alone, which cannot be laid over another's: what each shows and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fednet.plain import JsonDict
from fednet.records import metric
from fednet.report import costs
from fednet.report.drawing import figures, marks
from fednet.report.drawing.canvas import BLANK, Figure
from fednet.report.drawing.marks import HATCHES, HOVER
from fednet.report.read import Run
from fednet.report.world import there

UNFINISHED = "#BBBBBB"

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure


def of_run(run: Run) -> Iterator[Figure]:
    """The figures that this run has data for."""
    yield from bytes_by_kind(run)
    yield from time_split(run)
    yield from participation(run)
    yield from there.who_was_there(run)
    yield from client_accuracy(run)
    yield from class_accuracy(run)
    yield from partition(run)


def bytes_by_kind(run: Run) -> Iterator[Figure]:
    rounds, table = figures.bytes_by_kind(run)
    if not rounds:
        return
    kinds = list(dict.fromkeys(k for way in table.values() for k in way))
    binned = {
        (way, kind): marks.binned(rounds, np.asarray(values) / 1e6)
        for way in ("up", "down")
        for kind, values in table[way].items()
    }

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        base: JsonDict = {"up": 0.0, "down": 0.0}
        for (way, kind), (x, height, wide) in binned.items():
            i, sign = kinds.index(kind), 1 if way == "up" else -1
            marks.bars(ax, x, sign * height, sign * base[way], i, wide, HATCHES[i % 6])
            base[way] = base[way] + height
        ax.axhline(0, color="black", linewidth=0.8)
        ax.yaxis.set_major_formatter(lambda v, _: f"{abs(v):g}")
        ax.set(xlabel="round", ylabel="MB a round:  down  |  up")
        marks.legend(ax, [(figures.COLOURS[i % 8], k, HATCHES[i % 6]) for i, k in enumerate(kinds)])

    def rows() -> Iterator[tuple[object, ...]]:
        for way, ks in table.items():
            for k, v in ks.items():
                yield from ((t, way, k, v[i]) for i, t in enumerate(rounds))

    yield Figure(
        "bytes",
        "Bytes a round by kind",
        ("round", "direction", "kind", "bytes"),
        rows,
        draw,
        hover=marks.stack({f"{kind} {way}, MB": b for (way, kind), b in binned.items()}),
        legend=len(kinds),
    )


def time_split(run: Run) -> Iterator[Figure]:
    rounds, table = figures.time_split(run)
    if not table:
        return
    told = figures.CLOCKS[costs.seconds_key(run)]
    binned = {phase: marks.binned(rounds, np.asarray(values)) for phase, values in table.items()}

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        base: np.ndarray | float = 0.0
        for i, (x, height, wide) in enumerate(binned.values()):
            marks.bars(ax, x, height, base, i, wide)
            base = base + height
        ax.set(xlabel="round", ylabel=f"seconds a round, {told}")
        marks.legend(ax, [(figures.COLOURS[i % 8], phase, "") for i, phase in enumerate(table)])

    def rows() -> Iterator[tuple[object, ...]]:
        return ((t, phase, v[i]) for phase, v in table.items() for i, t in enumerate(rounds))

    yield Figure(
        "time",
        f"Where the time goes, {told}",
        ("round", "phase", "seconds"),
        rows,
        draw,
        hover=marks.stack({f"{phase}, s": b for phase, b in binned.items()}),
        legend=len(table),
    )


def participation(run: Run) -> Iterator[Figure]:
    p = figures.participation(run)
    if not p.grid.size:
        return
    words = p.words
    colours = [
        BLANK,
        figures.COLOURS[0],
        UNFINISHED,
        *(figures.COLOURS[(2, 1, 5, 7, 4, 3, 6)[i % 7]] for i in range(len(p.reasons))),
    ]

    # Rare, and so named only where it is.
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
        marks.ground(ax)
        ax.set(xlabel="round", ylabel="client")
        for axis in (ax.xaxis, ax.yaxis):
            marks.whole(axis)
        marks.legend(ax, [(colours[code], words[code], "") for code in shown])

    def rows() -> Iterator[tuple[object, ...]]:
        for t, codes in zip(p.rounds, p.grid.T):
            yield from ((t, i, words[code]) for i, code in enumerate(codes.tolist()))

    asked = [*words[:3], *(f"dropped: {why}" for why in p.reasons)]
    yield Figure(
        "participation",
        "Who took part",
        ("round", "client", "what"),
        rows,
        draw,
        (6.0, min(7.0, 2.0 + 0.12 * p.grid.shape[0])),
        hover=marks.heat(p.grid, range(p.grid.shape[0]), p.rounds, "client", words=asked),
        legend=len(shown),
    )


def client_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.client_accuracy(run)
    if found is None:
        return
    which, clients, rounds, table = found
    last = figures.last_of(table)

    def bars(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        if len(clients) <= HOVER // 100:
            marks.bars(ax, np.arange(len(clients)), last, 0.0, 0)
        else:
            ax.fill_between(range(len(clients)), last, step="mid", color=figures.COLOURS[0])
        ax.axhline(
            last.mean(),
            color=figures.COLOURS[2],
            dashes=(4, 2),
            linewidth=1.2,
            label=f"mean {last.mean():.3f}",
        )
        ax.set(xlabel="client, best first", ylabel=said, ylim=(0, 1))
        ax.set_xlim(-0.5, len(clients) - 0.5)
        marks.sorted_clients(ax.xaxis, clients)
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1))

    said = metric(f"{which}_accuracy" if which != "global" else "client_accuracy").titled(
        run.own_model
    )
    title = f"{said.capitalize()}, client by client"
    yield Figure(
        "clients",
        title,
        ("client", f"accuracy_{which}"),
        lambda: zip(clients, last.tolist()),
        bars,
        hover=marks.heat(last[None], [said], clients, "", cl="client", w=said),
        legend=1,
    )

    def rows() -> Iterator[tuple[object, ...]]:
        for i, j in np.argwhere(~np.isnan(table)).tolist():
            yield rounds[j], clients[i], table[i, j]

    def over_time(fig: MplFigure) -> None:
        ax = marks.shades(fig, table, rounds, "client, best first", said)
        marks.sorted_clients(ax.yaxis, clients)

    yield Figure(
        "clients_over_time",
        title + " and round by round",
        ("round", "client", f"accuracy_{which}"),
        rows,
        over_time,
        hover=marks.heat(table, clients, rounds, "client", w=said),
        right=0.3,
    )


def class_accuracy(run: Run) -> Iterator[Figure]:
    found = figures.class_accuracy(run)
    if found is None:
        return
    rounds, table = found
    names = figures.class_names(run, len(table))

    def draw(fig: MplFigure) -> None:
        ax = marks.shades(fig, table, rounds, "class", "global test accuracy")
        marks.named(ax.yaxis, names)

    def rows() -> Iterator[tuple[object, ...]]:
        return ((t, names[c], table[c, j]) for j, t in enumerate(rounds) for c in range(len(table)))

    yield Figure(
        "classes",
        "Global test accuracy by class",
        ("round", "class", "accuracy"),
        rows,
        draw,
        hover=marks.heat(table, names, rounds, "class", w="global test accuracy"),
        left=marks.room(names),
        right=0.3,
    )


def partition(run: Run) -> Iterator[Figure]:
    counts = run.counts
    if counts is not None and counts.ndim == 2 and counts.size:
        yield bubbles(counts, figures.class_names(run, counts.shape[1]))


def bubbles(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """counts: (clients, C) samples. The area of a circle is proportional to them."""
    clients, classes = counts.shape

    def draw(fig: MplFigure) -> None:
        ax = fig.add_subplot()
        i, c = np.nonzero(counts)
        width, height = fig.get_size_inches()
        across, down = 72 * (width - 0.9) / clients, 72 * (height - 1.0) / classes  # of a cell
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
        marks.whole(ax.xaxis)
        marks.named(ax.yaxis, names)
        text = f"{counts.sum():,} samples; the largest circle is {counts.max():,}"
        ax.set_title(text, loc="right", fontsize=9)

    def rows() -> Iterator[tuple[object, ...]]:
        return (
            (i, names[c], n) for i, held in enumerate(counts) for c, n in enumerate(held.tolist())
        )

    return Figure(
        "partition",
        "Who holds what",
        ("client", "class", "samples"),
        rows,
        draw,
        hover=marks.heat(counts.T, names, range(clients), "class", cl="client", w="samples"),
        legend=1,
        left=marks.room(names),
    )

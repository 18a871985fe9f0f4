"""How a figure is drawn: as files for paper, and inside the page from the same drawing.

Matplotlib is imported only where it draws. The same run gives the same files, byte for byte. On the
page the colours are CSS variables, so that they follow it into the dark, a series can be hidden by
its name, and what a pointer may ask is in `data-hover`, which the page's script reads.
"""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fednet.files import appear, unfinished, write_aside
from fednet.plain import JsonMapping
from fednet.report.drawing.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MplFigure

# So that the same run gives the same file.
TIMELESS = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
STYLE = {
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#c8ccd2",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fednet",
    "image.cmap": "cividis",
    "image.interpolation": "none",
}
# Margins in inches. They are fixed: to fit them to each figure's text takes longer than to draw it.
LEFT, RIGHT, BOTTOM, TITLE, LEGEND_ROW = 0.78, 0.15, 0.5, 0.34, 0.22
BLANK = "#eeeff1"  # the ground of a grid of cells, where there is nothing
ON_PAGE = {
    **{colour.lower(): f"var(--c{i})" for i, colour in enumerate(COLOURS)},
    "#000000": "var(--soft)",
    "#ffffff": "var(--card)",
    "#c8ccd2": "var(--line)",
    BLANK: "var(--empty)",
}


@dataclass(frozen=True)
class Figure:
    """A figure to be drawn. size: inches; rows(): the data it shows, under `columns`.

    hover: what a pointer may ask of its first axes. kind `lines` has series `s` with their label,
    x, value m and half band h; kind `heat` has cells `v` by row r and column c. legend: entries
    above the axes, in rows of 4; left, right: margins in inches. rows are made where they are
    asked for: a grid of many clients has millions, and a page needs none of them.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Callable[[], Iterable[Sequence[object]]]
    draw: Callable[[MplFigure], object]
    size: tuple[float, float] = (6.0, 3.4)
    hover: JsonMapping | None = None
    legend: int = 0
    left: float = LEFT
    right: float = RIGHT


@dataclass(frozen=True)
class Drawn:
    """A figure as SVG, with the place of its first axes in it: left, top, width and height in
    points, and the range of x.
    """

    svg: str
    box: tuple[float, float, float, float]
    x: tuple[float, float]


@contextmanager
def canvas(size: tuple[float, float], **style: object) -> Iterator[MplFigure]:
    """A figure without pyplot: nothing global, no display, no figure left open, and nothing of a
    user's matplotlibrc.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    # Names and values are matplotlib's own.
    settings: Any = {**matplotlib.rcParamsDefault, **STYLE, **style}
    with matplotlib.rc_context(settings):
        fig = Canvas(figsize=size)
        FigureCanvasAgg(fig)
        yield fig


def draw(figure: Figure, png: Path | None = None) -> Drawn:
    """Draws a figure of one axes, titled, and with `png` into that file too."""
    width, height = figure.size
    top = TITLE + LEGEND_ROW * -(-figure.legend // 4)
    with canvas(figure.size) as fig:
        fig.subplots_adjust(
            left=figure.left / width,
            right=1 - figure.right / width,
            bottom=BOTTOM / height,
            top=1 - top / height,
        )
        figure.draw(fig)
        title = fig.suptitle(figure.title, x=0.01, y=1 - 0.06 / height, ha="left", va="top")
        title.set(fontsize=10, fontweight="bold", gid="title")
        ax = fig.axes[0]
        ax.patch.set_gid("ground")
        fig.patch.set_gid("paper")
        text = io.StringIO()
        fig.savefig(text, format="svg", metadata=TIMELESS[".svg"])
        if png is not None:
            saved(fig, png)
        at, (w, h) = ax.get_position(), (72 * width, 72 * height)
        low, high = ax.get_xlim()
    box = (at.x0 * w, (1 - at.y1) * h, at.width * w, at.height * h)
    return Drawn(text.getvalue(), box, (low, high))


def save(figures: Iterator[Figure], folder: Path) -> dict[str, Drawn]:
    """Every figure as SVG and PNG, its data as CSV. Returns what was drawn, by name."""
    folder.mkdir(exist_ok=True)
    made = {}
    for figure in figures:
        made[figure.name] = draw(figure, folder / f"{figure.name}.png")
        write_aside(folder / f"{figure.name}.svg", made[figure.name].svg)
        write_csv(folder / f"{figure.name}.csv", figure.columns, figure.rows())
    return made


def write(figure: Figure, paths: Sequence[Path]) -> list[Path]:
    """One figure, titled, its margins fitted to its text, as files of the kinds that their names
    say.
    """
    with canvas(figure.size, **{"figure.constrained_layout.use": True, "font.size": 9}) as fig:
        figure.draw(fig)
        fig.suptitle(figure.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        for path in paths:
            saved(fig, path)
    return list(paths)


def saved(fig: MplFigure, path: Path, dpi: int = 120) -> Path:
    """Writes a drawing into a file of the kind that its name says."""
    made = io.BytesIO()
    kind = path.suffix.lower()
    fig.savefig(made, format=kind[1:], metadata=TIMELESS.get(kind), dpi=dpi)
    write_aside(path, made.getvalue())
    return path


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with unfinished(path) as aside:
        with aside.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file, lineterminator="\n")
            out.writerow(columns)
            out.writerows(rows)
        appear(aside, path)


# -- on the page -----------------------------------------------------------------------------------
STYLED = ("fill", "stroke", "stop-color")  # as attributes these take no CSS variable
SERIES = re.compile(r"series-(\d+)(-band)?")


def inline(figure: Figure, drawn: Drawn, own: str) -> Markup:
    """The drawing as part of an HTML page: without its title, which the page has itself. own: what
    its names begin with, which must differ between the drawings of a page.
    """
    root = ET.fromstring(drawn.svg)
    for parent in list(root.iter()):
        for child in list(parent):
            name = child.get("id", "")
            if child.tag.endswith(("}metadata", "}style")) or name in ("title", "paper", "key"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        _rename(element, own)
    width, height = (72 * inches for inches in figure.size)
    head = 72 * TITLE - 12
    root.attrib.clear()
    root.set("viewBox", f"0 {head:g} {width:g} {height - head:g}")
    root.set("role", "img")
    root.set("aria-label", figure.title)
    if figure.hover is not None:
        left, top, w, h = (round(v, 2) for v in drawn.box)
        place = {"box": [left, top, w, h], "x": [*drawn.x, left, round(left + w, 2)]}
        root.set("data-hover", json.dumps({**place, **figure.hover}, separators=(",", ":")))
        cross = {"class": "cross", "y1": f"{top}", "y2": f"{round(top + h, 2)}"}
        ET.SubElement(root, "line", cross)
    return Markup(ET.tostring(root, encoding="unicode"))


def _rename(element: ET.Element, own: str) -> None:
    """One element of matplotlib's SVG: names of its own, short numbers, the page's colours."""
    for key, value in list(element.attrib.items()):
        plain = key.rpartition("}")[2]
        if plain != key:
            del element.attrib[key]
            element.set(plain, value)
        if plain == "id":
            if found := SERIES.fullmatch(value):
                element.set("class", "series band" if found[2] else "series")
                element.set("data-series", found[1])
            element.set("id", own + value)
        elif plain == "href" and value.startswith("#"):
            element.set("href", f"#{own}{value[1:]}")
        elif plain == "clip-path":
            element.set(key, value.replace("url(#", f"url(#{own}"))
        elif plain == "d":
            element.set("d", _short(value))
        elif plain in STYLED and value.startswith("#"):
            del element.attrib[key]
            element.set("style", f"{plain}: {_coloured(value)}; {element.get('style', '')}")
        elif plain == "style":
            element.set("style", _coloured(value).replace("url(#", f"url(#{own}"))
    if element.tag != "text":
        element.text = element.text and element.text.strip()
    element.tail = None


def _short(path: str) -> str:
    return " ".join(re.sub(r"\d+\.\d+", lambda v: f"{round(float(v[0]), 2):g}", path).split())


def _coloured(style: str) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda c: ON_PAGE.get(c[0], c[0]), style)

"""Draws a figure into a file, or as a part of the page.

Matplotlib is imported only when something is drawn. The same run gives the same files, byte for
byte. On the page the colours are CSS variables, which follow the light or dark theme; the legend
hides a series by its number; the page's script reads the values for the pointer from `data-hover`.
"""

from __future__ import annotations

import gc
import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fednet.files import write_aside
from fednet.plain import JsonMapping, as_json, visible
from fednet.report import axes, style

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MplFigure

# So that the same run gives the same file.
TIMELESS = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
# Margins in inches. They are fixed: to fit them to each figure's text takes longer than to draw it.
LEFT = 0.78
RIGHT = 0.15
BOTTOM = 0.5
TOP = 0.17
LEGEND_ROW = 0.22
# Inches: legible on a telephone, where a chart is as wide as the screen, and in a column of a page.
SIZE = (4.5, 3.1)


@dataclass(frozen=True)
class Figure:
    """A figure to be drawn."""

    name: str
    title: str
    note: str
    """A sentence about it."""
    draw: Callable[[MplFigure], object]
    size: tuple[float, float] = SIZE
    """In inches."""
    wide: tuple[float, float] | None = None
    """A second size, which the page has for wide screens."""
    hover: JsonMapping | None = None
    """The values that the pointer shows in its first axes. Kind `lines` has series `s` with their
    label, x, value m and half band h; kind `heat` has cells `v` by row r and column c.
    """
    legend: Sequence[str] = ()
    """The entries above the axes, in rows, see `columns`."""
    left: float = LEFT
    """Margin in inches."""
    right: float = RIGHT
    """Margin in inches."""
    bottom: float = BOTTOM
    """Margin in inches."""
    table: Sequence[Sequence[object]] = ()
    """The values of a figure that `fednet figure` writes, under a heading."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, objects that refer to each other are not freed: a figure has some thousand, a run has
    some million numbers, and to look for those that are no longer used takes a tenth of the time.
    """
    searched = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searched:
            gc.enable()


@contextmanager
def drawing(**settings: object) -> Iterator[None]:
    """Inside, figures are drawn with these settings, in addition to `style.BASE`, and without the
    user's matplotlibrc.
    """
    import matplotlib

    rc: Any = {**matplotlib.rcParamsDefault, **style.BASE, **settings}
    del rc["backend"]  # the user's, for which pyplot would be imported; nothing is shown here
    with uncollected(), matplotlib.rc_context(rc):
        yield


@contextmanager
def canvas(size: tuple[float, float], **settings: object) -> Iterator[MplFigure]:
    """A figure that is drawn with these settings, see `drawing`."""
    with drawing(**settings):
        yield blank(size)


def blank(size: tuple[float, float]) -> MplFigure:
    """Returns a figure without pyplot: nothing is global, and no figure is left open."""
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=size)


def write(figure: Figure, path: Path) -> Path:
    """Writes a figure with its title and fitted margins; the ending of the name says the format."""
    with canvas(figure.size, **style.FITTED, **{"font.size": 9}) as fig:
        figure.draw(fig)
        fig.suptitle(figure.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
        return save(fig, path)


def save(fig: MplFigure, path: Path, dpi: int = 120) -> Path:
    """Writes a drawing into a file; the ending of its name says the format."""
    made = io.BytesIO()
    kind = path.suffix.lower()
    fig.savefig(made, format=kind[1:], metadata=TIMELESS.get(kind), dpi=dpi)
    write_aside(path, made.getvalue())
    return path


def whole_ticks(axis: Axis) -> None:
    """Sets ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]  # as AutoLocator has it


def columns(legend: Sequence[str], width: float) -> int:
    """Returns how many entries of a legend fit beside each other in a figure of this width, in
    inches; at most 4.
    """
    longest = max(map(len, legend), default=0)
    return max(1, min(4, int((width - LEFT) / (0.45 + 0.066 * longest))))


def digits(values: Sequence[float]) -> list[float | None]:
    """Returns the values for the pointer; None: not finite, which JSON does not have."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


# -- on the page -----------------------------------------------------------------------------------
STYLED = ("fill", "stroke", "stop-color")  # CSS variables do not work in these attributes
SERIES = re.compile(r"series-(\d+)(-band)?")


def inline(figure: Figure, own: str) -> list[Markup]:
    """Draws a figure of one axes as parts of an HTML page, in each of its sizes. It is without its
    title, which the page shows itself. To be called within `drawing`, which needs only one for
    all figures of a page. own: a prefix of its ids, different for each of them.
    """
    fig = blank(figure.size)
    figure.draw(fig)
    fig.axes[0].patch.set_gid("ground")
    fig.patch.set_gid("paper")
    shown = axes.take(fig)
    sizes = [figure.size]
    if figure.wide is not None:
        sizes.append(figure.wide)
    return [_page_svg(fig, figure, shown, size, f"{own}{k}-") for k, size in enumerate(sizes)]


def _page_svg(
    fig: MplFigure, figure: Figure, shown: Sequence[Axis], size: tuple[float, float], own: str
) -> Markup:
    """Returns the drawing `fig` of a figure, with these axes, in a size, as the page has it."""
    width, height = size
    rows = -(-len(figure.legend) // columns(figure.legend, width))
    top = TOP + LEGEND_ROW * rows
    fig.set_size_inches(size)
    fig.subplots_adjust(
        left=figure.left / width,
        right=1 - figure.right / width,
        bottom=figure.bottom / height,
        top=1 - top / height,
    )
    ax = fig.axes[0]
    text = io.StringIO()
    fig.savefig(text, format="svg", metadata=TIMELESS[".svg"])
    at = ax.get_position()
    xs = ax.get_xlim()
    ys = ax.get_ylim()
    root = ET.fromstring(visible(text.getvalue()))  # no control character may stand in XML
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")) or child.get("id") in ("paper", "key"):
                parent.remove(child)
    w = 72 * width
    h = 72 * height
    for ground in root.iter():
        if ground.get("id") == "ground":  # below all that is drawn
            ground.extend(part for axis in shown for part in axes.elements(axis, w, h))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        _rename(element, own)
    root.attrib.clear()
    root.set("viewBox", f"0 0 {w:g} {h:g}")
    root.set("role", "img")
    root.set("aria-label", figure.title)
    if figure.hover is not None:
        box = [at.x0 * w, (1 - at.y1) * h, at.width * w, at.height * h]
        left, top, wide, high = (round(v, 2) for v in box)
        place = {
            "box": [left, top, wide, high],
            "x": [*xs, left, round(left + wide, 2)],
            "y": ys,
        }
        root.set("data-hover", as_json({**place, **figure.hover}))
        cross = {"class": "cross", "y1": f"{top}", "y2": f"{round(top + high, 2)}"}
        ET.SubElement(root, "line", cross)
    return Markup(ET.tostring(root, encoding="unicode"))


def _rename(element: ET.Element, own: str) -> None:
    """Changes one element of matplotlib's SVG: unique ids, short numbers, the page's colours."""
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
            element.set(
                "style", f"{plain}: {_with_page_colours(value)}; {element.get('style', '')}"
            )
        elif plain == "style":
            element.set("style", _with_page_colours(value).replace("url(#", f"url(#{own}"))
    if element.tag != "text":
        element.text = element.text and element.text.strip()
    element.tail = None


def _short(path: str) -> str:
    return " ".join(re.sub(r"\d+\.\d+", lambda v: f"{round(float(v[0]), 2):g}", path).split())


def _with_page_colours(css: str) -> str:
    return re.sub(r"#[0-9a-f]{6}\b", lambda c: style.ON_PAGE.get(c[0], c[0]), css)

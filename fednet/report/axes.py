"""Draws the axes of a figure on the page: grid, ticks with their names, and labels.

Matplotlib says where the ticks are and what they are called. It would make five objects for each of
them and measure their texts, which takes nine tenths of the time of a drawing.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fednet.plain import visible
from fednet.report import style

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as MplFigure

# Of text, in its size.
CHARACTER = 0.62  # width
ASCENT = 0.76  # above the line on which it stands
DESCENT = 0.24  # below it
MIDDLE = 0.38  # above it
# In points.
PAD = 3.5  # between a tick and its name
GAP = 4.0  # between the names and the label


def take(fig: MplFigure) -> list[Axis]:
    """Returns the axes that a figure shows; it does not draw them itself any more."""
    every: list[Axis] = [axis for ax in fig.axes for axis in (ax.xaxis, ax.yaxis)]
    found = [axis for axis in every if axis.get_visible()]
    for axis in found:
        axis.set_visible(False)
    return found


def set_names(axis: Axis, places: Sequence[float], names: Sequence[str], size: float = 10) -> None:
    """Sets ticks with names; `Axis.set_ticks` would make the objects of each."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(FixedFormatter(names))
    axis.set_tick_params(labelsize=size)


def elements(axis: Axis, width: float, height: float) -> list[ET.Element]:
    """Returns an axis as elements of a drawing of this size, in points: a group of its ticks, and
    its label.
    """
    box = axis.axes.get_position()
    left = width * box.x0
    right = width * box.x1
    top = height * (1 - box.y1)
    bottom = height * (1 - box.y0)
    tick = axis.get_major_ticks(1)[0]  # as all would be
    long = float(tick.tick1line.get_markersize())
    away = long + PAD
    size = float(tick.label1.get_fontsize())
    turned = tick.label1.get_rotation() > 0
    label = axis.label.get_text()
    label_size = float(axis.label.get_fontsize())
    across = axis is axis.axes.xaxis
    group = ET.Element("g", {"class": "xtick" if across else "ytick"})
    if across:
        ticks = _ticks(axis, left, right)
        grid = [f"M{at:.2f} {bottom:.2f}V{top:.2f}" for at, _ in ticks]
        marks = [f"M{at:.2f} {bottom:.2f}v{long:g}" for at, _ in ticks]
        y = bottom + away
        for at, name in ticks:
            if turned:
                group.append(_text(name, at + MIDDLE * size, y, size, "end", turned=True))
            else:
                group.append(_text(name, at, y + ASCENT * size, size, "middle"))
        y += _length(ticks, size) if turned else size
        offset_at = right, y + ASCENT * size, "end"
        y = min(y + GAP + ASCENT * label_size, height - DESCENT * label_size)
        named = _text(label, (left + right) / 2, y, label_size, "middle")
    else:
        ticks = _ticks(axis, bottom, top)
        grid = [f"M{left:.2f} {at:.2f}H{right:.2f}" for at, _ in ticks]
        if axis.get_label_position() == "right":
            marks = [f"M{right:.2f} {at:.2f}h{long:g}" for at, _ in ticks]
            x = right + away
            for at, name in ticks:
                group.append(_text(name, x, at + MIDDLE * size, size, "start"))
            x += _length(ticks, size) + GAP + ASCENT * label_size
            x = min(x, width - DESCENT * label_size)
            offset_at = right, top - GAP, "end"
        else:
            marks = [f"M{left:.2f} {at:.2f}h{-long:g}" for at, _ in ticks]
            x = left - away
            for at, name in ticks:
                group.append(_text(name, x, at + MIDDLE * size, size, "end"))
            x -= _length(ticks, size) + GAP + DESCENT * label_size
            x = max(x, ASCENT * label_size)
            offset_at = left, top - GAP, "start"
        named = _text(label, x, (top + bottom) / 2, label_size, "middle", turned=True)
    if long and ticks:
        group.insert(0, _lines(marks, "#000000", 0.8))
    if tick.gridline.get_visible() and ticks:
        group.insert(0, _lines(grid, style.GRID, 0.5))
    if offset := axis.get_major_formatter().get_offset():  # such as 1e6, of all names
        x, y, anchor = offset_at
        group.append(_text(offset, x, y, size, anchor))
    return [group, named] if label else [group]


def _ticks(axis: Axis, start: float, end: float) -> list[tuple[float, str]]:
    """Returns the place and the name of each tick between the ends of an axis, at these places."""
    low, high = axis.get_view_interval()
    values = axis.get_majorticklocs().tolist()
    names = axis.get_major_formatter().format_ticks(values)
    places = [start + (end - start) * (v - low) / (high - low) for v in values]
    first, last = sorted((start, end))
    return [(at, name) for at, name in zip(places, names) if first - 0.01 < at < last + 0.01]


def _length(ticks: Sequence[tuple[float, str]], size: float) -> float:
    """About the length of the longest name."""
    return CHARACTER * size * max((len(name) for _, name in ticks), default=0)


def _lines(paths: Sequence[str], colour: str, width: float) -> ET.Element:
    css = f"fill: none; stroke: {colour}; stroke-width: {width:g}"
    return ET.Element("path", {"d": "".join(paths), "style": css})


def _text(
    text: str, x: float, y: float, size: float, anchor: str, turned: bool = False
) -> ET.Element:
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "text-anchor": anchor}
    if turned:  # it reads upwards
        place["transform"] = f"rotate(-90 {x:.2f} {y:.2f})"
    found = ET.Element("text", {**place, "style": f"font-size: {size:g}px"})
    found.text = visible(text)
    return found

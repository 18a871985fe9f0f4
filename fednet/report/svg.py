"""Charts as inline SVG for the page: colours are CSS variables, so that they follow the page into
the dark.

What a pointer may ask stands beside each mark as `<title>`, or for lines and heat maps as JSON in
`data-hover`, which the page's script reads. Long runs are binned, so that a page stays a page.
"""

from __future__ import annotations

import base64
import html
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from fednet.report.figures import DASHES, Series

BINS = 160  # bars in a chart at most
MARKS = 4000  # marks with a title of their own at most
HOVER = 40_000  # cells of a heat map that carry their numbers at most


@dataclass(frozen=True)
class Frame:
    """The plot area of a chart, and its two scales."""

    width: int = 960
    height: int = 340
    left: int = 58
    right: int = 16
    top: int = 12
    bottom: int = 42

    @property
    def inner(self) -> tuple[float, float]:
        return self.width - self.left - self.right, self.height - self.top - self.bottom

    def x(self, low: float, high: float) -> Callable[[float], float]:
        w = self.inner[0] / ((high - low) or 1.0)
        return lambda v: round(self.left + (v - low) * w, 2)

    def y(self, low: float, high: float) -> Callable[[float], float]:
        h = self.inner[1] / ((high - low) or 1.0)
        return lambda v: round(self.height - self.bottom - (v - low) * h, 2)


HALF = Frame(width=560, height=300)


def ticks(low: float, high: float, n: int = 6, whole: bool = False) -> list[float]:
    """Round numbers between low and high, about n of them."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / n))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= n)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _axes(
    f: Frame, xs: Mapping[float, str], ys: Mapping[float, str], xlabel: str, ylabel: str
) -> str:
    """Grid lines and labels at pixel positions."""
    out = []
    for v, text in ys.items():
        out.append(f'<line class="grid" x1="{f.left}" x2="{f.width - f.right}" y1="{v}" y2="{v}"/>')
        out.append(
            f'<text class="tick" x="{f.left - 8}" y="{v + 4}" '
            f'text-anchor="end">{html.escape(text)}</text>'
        )
    for v, text in xs.items():
        out.append(
            f'<text class="tick" x="{v}" y="{f.height - f.bottom + 18}" '
            f'text-anchor="middle">{html.escape(text)}</text>'
        )
    across, down = f.left + f.inner[0] / 2, f.top + f.inner[1] / 2
    for x, y, turn, text in (
        (across, f.height - 6, "", xlabel),
        (14, down, f' transform="rotate(-90 14 {down})"', ylabel),
    ):
        out.append(
            f'<text class="label" x="{x}" y="{y}" '
            f'text-anchor="middle"{turn}>{html.escape(text)}</text>'
        )
    return "".join(out)


def _svg(f: Frame, body: str, label: str, hover: Any = None) -> Markup:
    data = (
        f" data-hover='{html.escape(json.dumps(hover, separators=(',', ':')))}'"
        if hover is not None
        else ""
    )
    return Markup(
        f'<svg viewBox="0 0 {f.width} {f.height}" role="img" '
        f'aria-label="{html.escape(label)}"{data}>{body}</svg>'
    )


def number(v: float) -> str:
    """A number as a tick or a tip shows it."""
    if v == 0 or 0.01 <= abs(v) < 1e5:
        return f"{v:,.3f}".rstrip("0").rstrip(".") if abs(v) < 100 else f"{v:,.0f}"
    return f"{v:.2g}"


# -- lines -----------------------------------------------------------------------------------------
def lines(
    series: Sequence[Series], xlabel: str, ylabel: str, f: Frame = Frame(), unit: bool = True
) -> Markup:
    """Curves with their bands. unit: values are 0..1, and the axis stays within."""
    xs = [v for s in series for v in s.x]
    ys = [v for s in series for v in (*s.low, *s.high)]
    x0, x1 = (min(xs), max(xs)) if xlabel == "round" else (0.0, max(xs))
    # The means have the axis; a band so wide that it would flatten them leaves it.
    means = [v for s in series for v in s.mean]
    span = (max(means) - min(means)) or 0.1
    y0 = max(min(ys) - 0.05 * span, min(means) - 0.4 * span)
    y1 = min(max(ys) + 0.05 * span, max(means) + 0.4 * span)
    if unit:
        y0, y1 = max(0.0, y0), min(1.0, y1)
    X, Y = f.x(x0, x1), f.y(y0, y1)
    body = [
        _axes(
            f,
            {X(v): number(v) for v in ticks(x0, x1, 8, whole=xlabel == "round")},
            {Y(v): number(v) for v in ticks(y0, y1)},
            xlabel,
            ylabel,
        )
    ]
    for s in series:
        body.append(f'<g class="series s{s.place % 8}" data-series="{s.place}">')
        if s.n > 1:
            edge = [(X(a), Y(min(v, y1))) for a, v in zip(s.x, s.high)] + [
                (X(a), Y(max(v, y0))) for a, v in zip(s.x[::-1], s.low[::-1])
            ]
            body.append(f'<path class="band" d="{_path(edge)}Z"/>')
        dash = " ".join(map(str, s.dash))
        points = [(X(a), Y(m)) for a, m in zip(s.x, s.mean)]
        mark = (
            f'<circle class="dot" cx="{points[0][0]}" cy="{points[0][1]}" r="3.5"/>'
            if len(points) == 1
            else ""
        )
        body.append(f'<path class="line" d="{_path(points)}" stroke-dasharray="{dash}"/>{mark}</g>')
    body.append(f'<line class="cross" y1="{f.top}" y2="{f.height - f.bottom}"/>')
    hover = {
        "kind": "lines",
        "x": [x0, x1, f.left, f.width - f.right],
        "y": [y0, y1, f.height - f.bottom, f.top],
        "xl": xlabel,
        "s": [
            {
                "i": s.place,
                "l": s.label,
                "t": s.round,
                "x": [_r(v) for v in s.x],
                "m": [_r(v) for v in s.mean],
                **({"h": [_r(b - m) for b, m in zip(s.high, s.mean)]} if s.n > 1 else {}),
            }
            for s in series
        ],
    }
    return _svg(f, "".join(body), f"{ylabel} against {xlabel}", hover)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def _r(v: float) -> float:
    return float(f"{v:.5g}")


# -- bars ------------------------------------------------------------------------------------------
def _binned(rounds: Sequence[int], values: Sequence[float]) -> tuple[list[str], list[float]]:
    """At most BINS bars: a bar of several rounds is their mean."""
    k = math.ceil(len(rounds) / BINS)
    names = [
        f"{rounds[i]}" if k == 1 else f"{rounds[i]}-{rounds[min(i + k, len(rounds)) - 1]}"
        for i in range(0, len(rounds), k)
    ]
    return names, [
        sum(values[i : i + k]) / len(values[i : i + k]) for i in range(0, len(values), k)
    ]


def stacked(
    rounds: Sequence[int],
    up: Mapping[str, Sequence[float]],
    down: Mapping[str, Sequence[float]],
    ylabel: str,
    colour: Mapping[str, int],
    f: Frame = HALF,
    words: tuple[str, str] = ("", ""),
) -> Markup:
    """Stacked bars a round: `up` above the line, `down` below it. colour: kind -> number of its
    colour.
    """
    names, _ = _binned(rounds, [0.0] * len(rounds))
    parts = [
        ({k: _binned(rounds, v)[1] for k, v in side.items()}, sign, word)
        for side, sign, word in ((up, 1, words[0]), (down, -1, words[1]))
    ]
    heights = [
        max((sum(v[i] for v in side.values()) for i in range(len(names))), default=0.0)
        for side, _, _ in parts
    ]
    low, high = -1.05 * heights[1], 1.05 * heights[0] or 1.0
    X, Y = f.x(0, len(names)), f.y(low, high)
    step = max(1, len(names) // 8)
    body = [
        _axes(
            f,
            {X(i + 0.5): names[i].partition("-")[0] for i in range(0, len(names), step)},
            {Y(v): number(abs(v)) for v in ticks(low, high)},
            "round",
            ylabel,
        )
    ]
    w = round(max(0.8, 0.86 * f.inner[0] / max(1, len(names))), 2)
    for side, sign, word in parts:
        base = [0.0] * len(names)
        for kind, values in side.items():
            for i, v in enumerate(values):
                if v <= 0:
                    continue
                a, b = Y(sign * base[i]), Y(sign * (base[i] + v))
                tip = html.escape(f"round {names[i]}\n{kind}{word}: {number(v)}")
                body.append(
                    f'<rect class="f{colour[kind] % 8}" x="{X(i + 0.07)}" y="{min(a, b):g}" '
                    f'width="{w}" height="{abs(a - b):.2f}"><title>{tip}</title></rect>'
                )
                base[i] += v
    body.append(
        f'<line class="axis" x1="{f.left}" x2="{f.width - f.right}" y1="{Y(0)}" y2="{Y(0)}"/>'
    )
    return _svg(f, "".join(body), ylabel)


def bars(
    names: Sequence[str],
    values: Sequence[float],
    xlabel: str,
    ylabel: str,
    tips: Sequence[str],
    f: Frame = HALF,
) -> Markup:
    """Bars of values 0..1 in the order given, with their mean as a line."""
    X, Y = f.x(0, len(names)), f.y(0, 1)
    step = max(1, math.ceil(len(names) / 20))
    body = [
        _axes(
            f,
            {X(i + 0.5): names[i] for i in range(0, len(names), step)},
            {Y(v): number(v) for v in ticks(0, 1, 5)},
            xlabel,
            ylabel,
        )
    ]
    w = round(max(0.5, 0.86 * f.inner[0] / max(1, len(names))), 2)
    for i, v in enumerate(values):
        body.append(
            f'<rect class="f0" x="{X(i + 0.07)}" y="{Y(v)}" width="{w}" '
            f'height="{Y(0) - Y(v):.2f}">'
            f"<title>{html.escape(tips[i])}</title></rect>"
        )
    mean = sum(values) / len(values)
    body.append(
        f'<line class="mean" x1="{f.left}" x2="{f.width - f.right}" y1="{Y(mean)}" y2="{Y(mean)}">'
        f"<title>mean {mean:.4f}</title></line>"
    )
    return _svg(f, "".join(body), f"{ylabel} by {xlabel}")


# -- grids -----------------------------------------------------------------------------------------
def png(codes: np.ndarray, palette: Sequence[tuple[int, int, int, int]]) -> str:
    """A data URL: (h, w) uint8 indices into RGBA colours, as a palette image."""

    def chunk(tag: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))

    h, w = codes.shape
    raw = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in codes)
    body = chunk(b"IHDR", struct.pack(">IIBBBBB", w, h, 8, 3, 0, 0, 0))
    body += chunk(b"PLTE", b"".join(bytes(c[:3]) for c in palette)) + chunk(
        b"tRNS", bytes(c[3] for c in palette)
    )
    body += chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _grid(
    f: Frame,
    codes: np.ndarray,
    palette: Sequence[tuple[int, int, int, int]],
    columns: Sequence[str],
    rows: Sequence[str],
    xlabel: str,
    ylabel: str,
    over: str,
    hover: Any,
) -> Markup:
    h, w = codes.shape
    X, Y = f.x(0, w), f.y(h, 0)
    xstep, ystep = max(1, math.ceil(w / 10)), max(1, math.ceil(h / 12))
    image = (
        f'<image href="{png(codes, palette)}" x="{f.left}" y="{f.top}" width="{f.inner[0]}" '
        f'height="{f.inner[1]}" '
        'preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )
    axes = _axes(
        f,
        {X(i + 0.5): columns[i] for i in range(0, w, xstep)},
        {Y(i + 0.5): rows[i] for i in range(0, h, ystep)},
        xlabel,
        ylabel,
    )
    return _svg(
        f,
        f'<rect class="empty" x="{f.left}" y="{f.top}" width="{f.inner[0]}" '
        f'height="{f.inner[1]}"/>' + axes.replace('class="grid"', 'class="none"') + image + over,
        f"{ylabel} by {xlabel}",
        hover,
    )


def heat(
    values: np.ndarray,
    columns: Sequence[str],
    rows: Sequence[str],
    xlabel: str,
    ylabel: str,
    what: str,
    f: Frame = HALF,
) -> Markup:
    """A heat map of values 0..1; NaN is left blank."""
    from matplotlib import colormaps

    ramp = [tuple(round(255 * c) for c in colormaps["cividis"](i / 254)) for i in range(255)]
    codes = np.where(
        np.isnan(values), 0, 1 + np.round(254 * np.nan_to_num(values)).clip(0, 254)
    ).astype(np.uint8)
    hover = None
    if values.size <= HOVER:
        cells = [[None if np.isnan(v) else round(float(v), 4) for v in row] for row in values]
        hover = {
            "kind": "heat",
            "box": [f.left, f.top, *f.inner],
            "r": list(rows),
            "c": list(columns),
            "v": cells,
            "rl": ylabel.partition(",")[0],
            "cl": "round",
            "w": what,
        }
    palette = [(0, 0, 0, 0), *((r, g, b, 255) for r, g, b, _ in ramp)]
    return _grid(f, codes, palette, columns, rows, xlabel, ylabel, "", hover)


def participation(
    grid: np.ndarray, rounds: Sequence[int], reasons: Sequence[str], f: Frame
) -> Markup:
    """Clients down, rounds across. A dropped one says why when pointed at."""
    palette = [(0, 0, 0, 0), (0, 114, 178, 255), *((0, 0, 0, 0) for _ in reasons)]
    h, w = grid.shape
    X, Y = f.x(0, w), f.y(h, 0)
    cw, ch = round(f.inner[0] / w, 3), round(f.inner[1] / h, 3)
    dropped = np.argwhere(grid >= 2)
    over = []
    for i, j in dropped[:MARKS]:
        why = reasons[grid[i, j] - 2]
        tip = html.escape(f"round {rounds[j]}, client {i}\ndropped: {why}")
        over.append(
            f'<rect class="drop d{(grid[i, j] - 2) % 7}" x="{X(j)}" y="{Y(i)}" width="{cw}" '
            f'height="{ch}"><title>{tip}</title></rect>'
        )
    hover = None
    if grid.size <= HOVER:
        words = ["not asked", "completed", *(f"dropped: {why}" for why in reasons)]
        hover = {
            "kind": "heat",
            "box": [f.left, f.top, *f.inner],
            "r": [str(i) for i in range(h)],
            "c": [str(t) for t in rounds],
            "v": grid.tolist(),
            "rl": "client",
            "cl": "round",
            "words": words,
        }
    return _grid(
        f,
        grid,
        palette,
        [str(t) for t in rounds],
        [str(i) for i in range(h)],
        "round",
        "client",
        "".join(over),
        hover,
    )


def bubbles(counts: np.ndarray, names: Sequence[str], f: Frame) -> Markup:
    """Clients across, classes down; a circle's area is the number of samples."""
    n, c = counts.shape
    X, Y = f.x(-0.5, n - 0.5), f.y(c - 0.5, -0.5)
    step, high = max(1, math.ceil(n / 24)), max(1, int(counts.max()))
    top = 0.48 * min(f.inner[1] / c, max(f.inner[0] / n, 6.0))
    body = [
        _axes(
            f,
            {X(i): str(i) for i in range(0, n, step)},
            {Y(k): names[k] for k in range(0, c, max(1, c // 20))},
            "client",
            "class",
        )
    ]
    for i, k in np.argwhere(counts > 0):
        tip = html.escape(f"client {i}, class {names[k]}\n{counts[i, k]} samples")
        r = max(0.8, top * math.sqrt(counts[i, k] / high))
        body.append(
            f'<circle class="f0 bubble" cx="{X(i)}" cy="{Y(k)}" '
            f'r="{r:.2f}"><title>{tip}</title></circle>'
        )
    return _svg(f, "".join(body), "samples by client and class")


def legend(names: Sequence[str], dashed: bool = False, prefix: str = "f") -> Markup:
    """Swatches. dashed: lines as the series are drawn, which toggle them."""
    out = []
    for i, name in enumerate(names):
        if dashed:
            dash = " ".join(map(str, DASHES[i % 8]))
            stroke = f'<path class="line" d="M0 5L28 5" stroke-dasharray="{dash}"/>'
            mark = f'<svg viewBox="0 0 28 10" class="swatch s{i % 8}">{stroke}</svg>'
            out.append(
                f'<button type="button" data-toggle="{i}" '
                f'aria-pressed="true">{mark}{html.escape(name)}</button>'
            )
        else:
            out.append(
                f'<span><svg viewBox="0 0 10 10" class="swatch dotty"><rect '
                f'class="{prefix}{i % 8}" width="10" '
                f'height="10" rx="2"/></svg>{html.escape(name)}</span>'
            )
    return Markup(f'<div class="legend">{"".join(out)}</div>')

"""Colours, line styles and matplotlib's settings, for every figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from fednet.records.rows import TIMES

# Okabe and Ito's colours, which colour-blind readers can tell apart. They alternate dark and light,
# and each has a dash pattern and a marker, so that a grey print can be read too.
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#5B5B5B", "#B8A500")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2), (3, 1, 1, 1, 1, 1), (8, 3), (2, 3), (10, 2, 2, 2))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
GRID = "#c8ccd2"
BLANK = "#eeeff1"  # the background of a grid of cells
# Text on the cells of a grid.
ON_DARK = "#fefefe"
ON_LIGHT = "#16202c"
# Of the participation grid: completed, not finished, then the reasons of a drop. On the page the
# grid is an image, so these do not change with its theme.
CELLS = ("#2B87C0", "#A9AEB5", "#E0682A", "#E8AE2E", "#C77FA9", "#A89B1C", "#1FA37E", "#7CC4EC")

# Kinds of payload, and parts of a round's time, in the order of their colours: the same in every
# report.
KINDS = (
    "state",
    "delta",
    "control",
    "statistics",
    "accuracy",
    "shared",
    "envelope",
    "condensed",
    "base",
    "keys",
    "shares",
    "masked",
    "consistency",
    "unmask",
)
PHASES = (*TIMES, "other")
RESOURCES = ("server", "clients", *(f"GPU {i}" for i in range(6)))
DROPS = ("deadline", "lost", "absent", "failed", "refused", "left")

BASE = {
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
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
# Margins are fitted to the text. This takes longer than drawing.
FITTED = {"figure.constrained_layout.use": True}
# A figure of a paper: small type, and letters as outlines in SVG.
PAPER = {"svg.fonttype": "path", "font.size": 8, "axes.labelsize": 8, "legend.fontsize": 7}

# What a colour is on the page, where it follows the light or dark theme.
ON_PAGE = {
    **{colour.lower(): f"var(--c{i})" for i, colour in enumerate(COLOURS)},
    "#000000": "var(--soft)",
    "#ffffff": "var(--card)",
    GRID: "var(--line)",
    BLANK: "var(--empty)",
    ON_DARK: "var(--on-dark)",
    ON_LIGHT: "var(--on-light)",
    **{colour.lower(): f"var(--k{i})" for i, colour in enumerate(CELLS)},
}


def places(names: Iterable[str], known: Sequence[str]) -> dict[str, int]:
    """Returns the place of each name in the order of colours. A name that is not known has one
    after the known ones that depends on its text, so that it has the same in other reports.
    """
    found: dict[str, int] = {}
    for name in dict.fromkeys(names):
        place = len(known) + crc32(name.encode()) % 24
        if name in known:
            place = known.index(name)
        while place in found.values():
            place += 1
        found[name] = place
    return found


def colours(names: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    return {name: COLOURS[place % 8] for name, place in places(names, known).items()}


def line(place: int) -> dict[str, Any]:
    """Matplotlib's arguments for the line of the method in this place. No two of 64 are alike."""
    turn = place // len(COLOURS)
    return {
        "color": COLOURS[place % 8],
        "dashes": DASHES[(place + turn) % 8] or (None, None),
        "marker": MARKERS[place % 8],
    }

"""`fednet world`: pictures of a trace, and what to expect of a run with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet.report import style
from fednet.report.canvas import canvas, saved
from fednet.world import Pace, Presence, Rates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MplFigure

DAY, STEP_S = 86_400.0, 600.0
STAYS = (60.0, 600.0, 3600.0)  # seconds that a task may take
SHOWN = 6  # links drawn one by one


def present(presence: Sequence[Presence]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (seconds, available clients), every ten minutes of a week, or until the last client
    has left for good.
    """
    ends = [p.spells[-1][1] for p in presence if p.spells]
    repeats = any(p.period is not None for p in presence)
    last = 7 * DAY if repeats else max(1.0, min(7 * DAY, max(ends, default=0.0)))
    at = np.arange(0.0, last, min(STEP_S, last / 200))
    return at, np.array([sum(p.until(t) is not None for p in presence) for t in at])


@dataclass(frozen=True, slots=True)
class Expected:
    """What to expect of a round that begins at a random time: available clients (mean, minimum,
    maximum), selected clients, and how many of these are still available after some seconds.
    """

    here: float
    least: float
    most: float
    asked: float
    stay: list[tuple[float, float]]


def expected(presence: Sequence[Presence], asked: int) -> Expected:
    """asked: clients that a round selects if so many are available."""
    at, here = present(presence)
    stays = []
    some = at[:: max(1, len(at) // 300)]
    for seconds in STAYS:
        found = []
        for t in some:
            ends = [e for p in presence if (e := p.until(t)) is not None]
            if ends:
                share = sum(e - t >= seconds for e in ends) / len(ends)
                found.append(share * min(asked, len(ends)))
            else:
                found.append(0.0)
        stays.append((seconds, float(np.mean(found))))
    mean_asked = float(np.minimum(here, asked).mean())
    return Expected(float(here.mean()), float(here.min()), float(here.max()), mean_asked, stays)


# -- pictures --------------------------------------------------------------------------------------
def draw_presence(presence: Sequence[Presence], out: Path) -> Path:
    at, here = present(presence)
    lengths = np.sort([b - a for p in presence for a, b in p.spells])
    shares = np.sort([p.share() for p in presence])
    with canvas((9.0, 6.0), **style.FITTED) as fig:
        axes = fig.subplot_mosaic([["here", "here"], ["lengths", "shares"]])
        axes["here"].plot(at / 3600, here, color=style.COLOURS[0])
        axes["here"].set(xlabel="hours from the start", ylabel="available clients", ylim=(0, None))
        _share_of(axes["lengths"], lengths, "session length, s", log=True)
        _share_of(axes["shares"], 100 * shares, "availability of a client, %")
        return _saved(fig, out)


def draw_paces(paces: Sequence[Pace], out: Path) -> Path:
    with canvas((4.5, 3.2), **style.FITTED) as fig:
        steps = np.sort([1e3 * p.step_s for p in paces])
        _share_of(fig.subplots(), steps, "training step, ms", log=bool(steps[0] > 0))
        return _saved(fig, out)


def draw_links(links: Sequence[tuple[Rates, Rates]], out: Path) -> Path:
    """Draws the rates of the first clients' links over time, and the distribution of all rates."""
    with canvas((9.0, 5.6), **style.FITTED) as fig:
        axes = fig.subplots(2, 2, width_ratios=(2, 1))
        for row, (name, which) in zip(axes, (("down", 0), ("up", 1))):
            for i, pair in enumerate(links[:SHOWN]):
                mbps = pair[which].mbps[:300]
                row[0].plot(mbps, color=style.COLOURS[i % 8], linewidth=0.8)
            row[0].set(xlabel="second", ylabel=f"{name}, Mbit/s", ylim=(0, None))
            all_of = np.sort(np.concatenate([pair[which].mbps for pair in links]))
            _share_of(row[1], np.maximum(all_of, 1e-3), f"{name}, Mbit/s", log=True)
        return _saved(fig, out)


def _share_of(ax: Axes, values: np.ndarray, label: str, log: bool = False) -> None:
    """Draws the cumulative distribution of sorted values."""
    ax.step(values, 100 * np.arange(1, len(values) + 1) / max(1, len(values)), where="post")
    ax.set(xlabel=label, ylabel="cumulative share, %", ylim=(0, 100))
    if log:
        ax.set_xscale("log")


def _saved(fig: MplFigure, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return saved(fig, out)

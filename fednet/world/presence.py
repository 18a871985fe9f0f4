"""When a client is available: at second t, until when, and when next; and how many of them are."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Spells = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Presence:
    """One client's availability. spells: (from, to), ascending and apart; at second `to` it is not
    available any more. period: seconds after which they repeat; None: never.
    """

    spells: tuple[tuple[float, float], ...]
    period: float | None = None

    def until(self, t: float) -> float | None:
        """Returns the second at which a client that is available at t leaves (infinite: never);
        None if it is not available.
        """
        lap, second = self._split(t)
        number = self._next_spell(second) - 1
        if number < 0 or second >= self.spells[number][1]:
            return None
        end = self.spells[number][1]
        # A spell may go on where the trace repeats.
        while self.period is not None and end == self.period and self.spells[0][0] == 0:
            if len(self.spells) == 1 and self.spells[0][1] == self.period:
                return math.inf
            lap, end = lap + 1, self.spells[0][1]
        return lap * (self.period or 0.0) + end

    def next(self, t: float) -> float:
        """Returns the first second from t on at which it is available; infinite if never again."""
        if self.until(t) is not None:
            return t
        lap, second = self._split(t)
        number = self._next_spell(second)
        if number < len(self.spells):
            return lap * (self.period or 0.0) + self.spells[number][0]
        if self.period is None or not self.spells:
            return math.inf
        return (lap + 1) * self.period + self.spells[0][0]

    def share(self) -> float:
        """Returns the share of the time in which the client is available, 0..1."""
        whole = self.period if self.period is not None else (self.spells or ((0, 0),))[-1][1]
        return sum(b - a for a, b in self.spells) / whole if whole else 0.0

    def _split(self, t: float) -> tuple[int, float]:
        """Returns (periods that are over at t, the second within the current one)."""
        if self.period is None:
            return 0, t
        lap = math.floor(t / self.period)
        return lap, t - lap * self.period

    def _next_spell(self, second: float) -> int:
        """Returns the number of the first spell that begins after this second."""
        return bisect.bisect_right(self.spells, (second, math.inf))


def cyclic(spells: Spells, period: float) -> Presence:
    """Returns these spells, none longer than the period, as ones that repeat after it."""
    parts = []
    for a, b in spells:
        start = a % period
        end = start + (b - a)
        parts += [(start, min(end, period)), (0.0, end - period)]
    return Presence(joined(parts), period)


def joined(spells: Spells) -> tuple[tuple[float, float], ...]:
    """Returns the spells ascending and apart: those that touch as one, none without a length."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(s for s in spells if s[1] > s[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)


# -- what to expect of a run (`fednet world`) ------------------------------------------------------
STEP_S, WEEK_S = 600.0, 7 * 86_400.0
STAYS = (60.0, 600.0, 3600.0)  # seconds that a task may take


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
    # Every ten minutes of a week, or until the last client has left for good.
    ends = [p.spells[-1][1] for p in presence if p.spells]
    repeats = any(p.period is not None for p in presence)
    last = WEEK_S if repeats else max(1.0, min(WEEK_S, max(ends, default=0.0)))
    at = np.arange(0.0, last, min(STEP_S, last / 200))
    here = np.array([sum(p.until(t) is not None for p in presence) for t in at])
    stays = []
    some = at[:: max(1, len(at) // 300)]
    for seconds in STAYS:
        found = []
        for t in some:
            ends = [e for p in presence if (e := p.until(t)) is not None]
            stay = sum(e - t >= seconds for e in ends)
            found.append(stay / max(1, len(ends)) * min(asked, len(ends)))
        stays.append((seconds, float(np.mean(found))))
    mean_asked = float(np.minimum(here, asked).mean())
    return Expected(float(here.mean()), float(here.min()), float(here.max()), mean_asked, stays)

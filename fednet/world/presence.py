"""When a client is available: at second t, until when, and when next; and how many of them are."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Spells = Sequence[tuple[float, float]]
STEP_S = 600.0
WEEK_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Presence:
    """One client's availability. spells: (from, to), ascending and apart; at second `to` it is not
    available any more. period: seconds after which they repeat; None: never.
    """

    spells: tuple[tuple[float, float], ...]
    period: float | None = None

    def until(self, t: float) -> float | None:
        """Returns the second after t at which a client that is available at t leaves (infinite:
        never); None if it is not available.
        """
        end = self._end(t)
        while end is not None and (later := self._end(end)) is not None:
            end = max(later, _after(end))  # the sum of whole periods was rounded down
        return end

    def next(self, t: float) -> float:
        """Returns the first second from t on at which it is available; infinite if never again."""
        if self._end(t) is not None:
            return t
        at = self._begin(t)
        while self._end(at) is None and math.isfinite(at):
            at = max(self._begin(at), _after(at))  # the sum of whole periods was rounded down
        return at

    def _end(self, t: float) -> float | None:
        """Returns where the spell of a second ends; None between spells."""
        if math.isinf(t):
            return None
        lap, second = self._split(t)
        number = self._next_spell(second) - 1
        if number < 0 or second >= self.spells[number][1]:
            return None
        end = self.spells[number][1]
        # A spell may go on where the trace repeats.
        while self.period is not None and end == self.period and self.spells[0][0] == 0:
            if len(self.spells) == 1 and self.spells[0][1] == self.period:
                return math.inf
            lap = lap + 1
            end = self.spells[0][1]
        return lap * (self.period or 0.0) + end

    def _begin(self, t: float) -> float:
        """Returns where the first spell after a second begins; infinite if there is none."""
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


def _after(second: float) -> float:
    return math.nextafter(second, math.inf)


def cyclic(spells: Spells, period: float) -> Presence:
    """Returns these spells, none longer than the period, as ones that repeat after it."""
    parts = []
    for a, b in spells:
        start = a % period
        end = start + (b - a)
        parts += [(start, min(end, period)), (0.0, end - period)]
    return Presence(merge_spells(parts), period)


def merge_spells(spells: Spells) -> tuple[tuple[float, float], ...]:
    """Returns the spells ascending and apart: those that touch as one, none without a length."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(s for s in spells if s[1] > s[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)


def available(presence: Sequence[Presence]) -> np.ndarray:
    """Returns how many clients are available, every ten minutes of a week, or until the last client
    has left for good.
    """
    last = WEEK_S
    if all(p.period is None for p in presence):
        ends = [p.spells[-1][1] for p in presence if p.spells]
        last = max(1.0, min(WEEK_S, max(ends, default=0.0)))
    seconds = np.arange(0.0, last, min(STEP_S, last / 200))
    return np.array([sum(p.until(t) is not None for p in presence) for t in seconds])

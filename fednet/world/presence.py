"""Who is there at second t, until when, and when the next one comes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

Spells = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Presence:
    """One client's spells, ascending and apart: it is there from the first second of each up to,
    and without, the second. period: after so many seconds they come again; None: never.
    """

    spells: tuple[tuple[float, float], ...]
    period: float | None = None

    def until(self, t: float) -> float | None:
        """The second at which a client that is there at t leaves (infinite: never); None where it
        is not there.
        """
        found = self._at(t)
        if found is None:
            return None
        lap, number = found
        end = self.spells[number][1]
        # A spell may go on where the trace begins again.
        while self.period is not None and end == self.period and self.spells[0][0] == 0:
            if len(self.spells) == 1 and self.spells[0][1] == self.period:
                return math.inf
            lap, end = lap + 1, self.spells[0][1]
        return lap * (self.period or 0.0) + end

    def next(self, t: float) -> float:
        """The first second from t on at which it is there; infinite where it never is again."""
        if self._at(t) is not None:
            return t
        lap, second = self._split(t)
        number = bisect.bisect_right(self.spells, (second, math.inf))
        if number < len(self.spells):
            return lap * (self.period or 0.0) + self.spells[number][0]
        if self.period is None or not self.spells:
            return math.inf
        return (lap + 1) * self.period + self.spells[0][0]

    def share(self) -> float:
        """The share of the time that the client is there, 0..1."""
        whole = self.period if self.period is not None else (self.spells or ((0, 0),))[-1][1]
        return sum(b - a for a, b in self.spells) / whole if whole else 0.0

    def _split(self, t: float) -> tuple[float, float]:
        if self.period is None:
            return 0.0, t
        lap = math.floor(t / self.period)
        return float(lap), t - lap * self.period

    def _at(self, t: float) -> tuple[float, int] | None:
        lap, second = self._split(t)
        number = bisect.bisect_right(self.spells, (second, math.inf)) - 1
        if number >= 0 and second < self.spells[number][1]:
            return lap, number
        return None


def cyclic(spells: Spells, period: float) -> Presence:
    """Spells, none longer than the period, that come again after it. What touches is one spell;
    what has no length is none.
    """
    parts = []
    for a, b in spells:
        start = a % period
        end = start + (b - a)
        parts += [(start, min(end, period)), (0.0, end - period)]
    return Presence(joined(parts), period)


def joined(spells: Spells) -> tuple[tuple[float, float], ...]:
    """Ascending, and apart."""
    out: list[tuple[float, float]] = []
    for a, b in sorted(s for s in spells if s[1] > s[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return tuple(out)

"""`fednet world`: what to expect of a run with a trace of availability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fednet.world import Presence

DAY, STEP_S = 86_400.0, 600.0
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
    last = 7 * DAY if repeats else max(1.0, min(7 * DAY, max(ends, default=0.0)))
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

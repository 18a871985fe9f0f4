"""How fast a client's link is, whose rate changes each second."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BYTES = 1e6 / 8  # a second, of one Mbit/s


class Rates:
    """A link in one direction. mbps: 10^6 bits a second, one number for each second; the last one
    is followed by the first. Raises ValueError if nothing ever gets through, or more than can be
    counted.
    """

    __slots__ = ("_sums", "_total", "mbps")

    def __init__(self, mbps: Sequence[float] | np.ndarray) -> None:
        self.mbps = np.asarray(mbps, dtype=np.float64)
        if not len(self.mbps) or not self.mbps.any():
            raise ValueError("there is no second in which it carries anything")
        with np.errstate(over="ignore"):
            self._sums = np.concatenate([[0.0], np.cumsum(self.mbps * BYTES)])
        self._total = float(self._sums[-1])
        if not 1 <= self._total < math.inf:
            raise ValueError(f"all its seconds together carry {self._total:g} bytes")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rates) and np.array_equal(self.mbps, other.mbps)

    def __hash__(self) -> int:
        return hash(self.mbps.tobytes())

    def bytes(self, t: float) -> float:
        """Returns the bytes that get through from second 0 to t."""
        laps, second = divmod(t, len(self.mbps))
        whole = min(int(second), len(self.mbps) - 1)
        part = float(self._sums[whole]) + (second - whole) * float(self.mbps[whole]) * BYTES
        return laps * self._total + part

    def seconds(self, nbytes: float, t: float = 0.0) -> float:
        """Returns the seconds from t until so many bytes are through."""
        if nbytes <= 0:
            return 0.0
        laps, rest = divmod(self.bytes(t) + nbytes, self._total)
        if not rest:  # they end exactly with a lap
            laps = laps - 1
            rest = self._total
        # The first second by whose end so many bytes have passed.
        whole = int(np.searchsorted(self._sums, rest, side="left")) - 1
        left = rest - float(self._sums[whole])
        done = laps * len(self.mbps) + whole + left / (float(self.mbps[whole]) * BYTES)
        return max(0.0, float(done) - t)

    def longest_silence(self) -> int:
        """Returns the most seconds in a row in which nothing gets through."""
        carrying = np.flatnonzero(np.concatenate([self.mbps, self.mbps]))
        return int(max(np.diff(carrying), default=1)) - 1

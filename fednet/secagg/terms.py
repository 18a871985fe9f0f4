"""The terms of a round of secure aggregation: its clients, how many of them are needed, the
neighbours of each, the length of the vector and the width of its entries.

Both compute it from the run's configuration, so that the server cannot lower a threshold or choose
a client's neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

Protocol = Literal["secagg", "secagg+"]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
STEPS = ("keys", "shares", "masked", "consistency", "unmask")


@dataclass(frozen=True)
class Terms:
    """The terms of a round."""

    protocol: Protocol
    cohort: tuple[int, ...]
    """Its clients, ascending."""
    threshold: float
    """The share of them that must answer in each step."""
    length: int
    """Entries of a vector."""
    largest: int
    """Absolute value of an entry at one client."""
    context: bytes
    """Bytes that differ from round to round."""
    degree: int = 0
    """Of the graph (secagg+)."""
    order: tuple[int, ...] = ()
    """A permutation of the cohort's places, by which the graph is drawn."""

    def wrong(self) -> str:
        """Returns why nothing can be aggregated under these terms, or ""."""
        n = len(self.cohort)
        if n < 3:
            return f"{n} clients in a round; of fewer than 3, a sum shows too much of each"
        if self.width == 0:
            return f"a sum of {n} entries up to {self.largest}; expected one of 63 bits"
        return ""

    @property
    def needed(self) -> int:
        """How many clients must answer in each step (Bonawitz's t)."""
        return max(2, math.ceil(self.threshold * len(self.cohort) - 1e-9))

    # -- the ring ----------------------------------------------------------------------------------
    @cached_property
    def width(self) -> int:
        """Bytes of an entry on the wire; 0 if no sum fits."""
        most = len(self.cohort) * self.largest
        return next((b for b in range(1, 9) if most < 1 << (8 * b - 1)), 0)

    @property
    def modulus(self) -> int:
        return 1 << (8 * self.width)

    # -- the graph ---------------------------------------------------------------------------------
    @cached_property
    def circle(self) -> dict[int, tuple[int, ...]]:
        """By client, the clients that share secrets with it, with itself, ascending.

        secagg+ draws Bell et al.'s graph (their Section 3.2): the clients are in a random order on
        a circle, and the neighbours of each are the degree / 2 next on either side. Departs from
        the paper: a client holds a share of its own secrets too, as in Bonawitz et al.
        """
        n = len(self.cohort)
        half = self.degree // 2
        if self.protocol != "secagg+" or 2 * half >= n - 1:
            return dict.fromkeys(self.cohort, self.cohort)
        ring = [self.cohort[place] for place in self.order or range(n)]
        return {
            who: tuple(sorted({ring[(at + step) % n] for step in range(-half, half + 1)}))
            for at, who in enumerate(ring)
        }

    def share_threshold(self, who: int) -> int:
        """Returns how many shares reconstruct a secret of this client."""
        return max(2, math.ceil(self.threshold * len(self.circle[who]) - 1e-9))

    def place(self, of: int, at: int) -> int:
        """Returns the point at which `at` holds its share of a secret of `of`, from 1."""
        return self.circle[of].index(at) + 1


def draw_order(n: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Draws an order of a circle of n."""
    return tuple(int(i) for i in rng.permutation(n))

"""Who takes part: each round's seeded order of all clients, and which of them are available.

Neither looks at connections, so all methods that are compared with one seed see the same clients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from fednet import seeds
from fednet.config import AvailabilitySection, Config
from fednet.errors import ConfigError
from fednet.world import held_out


def cohort(config: Config, round: int, here: Sequence[bool] | None = None) -> list[int]:
    """Returns the clients asked in a round (from 1), ascending: the first `config.asked` of the
    round's order that are available. here: who is, where that depends on the time and not on the
    round.
    """
    present = available(config, round) if here is None else here
    return sorted(order(config, round, present)[: config.asked])


def order(config: Config, round: int, here: Sequence[bool] | np.ndarray) -> list[int]:
    """Returns the round's order of the clients that are there and may train."""
    drawn = seeds.rng(config.seed, "selection", round).permutation(config.clients)
    left_out = held_out(config)
    return [int(i) for i in drawn if here[i] and int(i) not in left_out]


T = TypeVar("T")


def available(config: Config, round: int) -> np.ndarray:
    """Returns (N,) bool: which clients are available in a round, by `availability`."""
    section = config.availability
    n = config.clients
    if section.model == "bernoulli":
        return seeds.rng(config.seed, "availability", round).random(n) < _given(
            section, "p", section.p
        )
    if section.model == "markov":
        up = _given(section, "up", section.up)
        down = _given(section, "down", section.down)
        return _chains(config.seed, n, up, down).at(round)
    return np.ones(n, dtype=bool)


def _given(section: AvailabilitySection, key: str, value: T | None) -> T:
    if value is None:
        raise ConfigError(f"availability.{key} is missing; the model {section.model} needs it.")
    return value


class _Chains:
    """Draws Markov chains, one for each client: off -> on with probability `up`, on -> off with
    `down`, from their stationary distribution. Any thread may ask.
    """

    def __init__(self, seed: int, n: int, up: float, down: float) -> None:
        self._seed = seed
        self._n = n
        self._up = up
        self._down = down
        stationary = up / (up + down) if up + down else 1.0
        # By round, from the start on: (N,) bool.
        self._known = [seeds.rng(seed, "availability", 0).random(n) < stationary]
        self._lock = threading.Lock()

    def at(self, round: int) -> np.ndarray:
        """Returns (N,) bool, read-only: which clients are available in a round."""
        with self._lock:
            while len(self._known) <= round:
                draw = seeds.rng(self._seed, "availability", len(self._known)).random(self._n)
                here = np.where(self._known[-1], draw >= self._down, draw < self._up)
                here.setflags(write=False)
                self._known.append(here)
            return self._known[round]


_chains = functools.lru_cache(maxsize=4)(_Chains)

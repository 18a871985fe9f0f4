"""Who takes part: each round's seeded order of all clients, and which of them are available.

Neither looks at connections, so all methods that are compared with one seed see the same clients.
Who is selected by what was replied says candidates.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import numpy as np

from fednet import ids, registry, seeds
from fednet.config import Config
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
    left_out = held_out(config) | clients_gone(config, round)
    return [int(i) for i in drawn if here[i] and int(i) not in left_out]


def clients_gone(config: Config, round: int) -> frozenset[int]:
    """Returns the clients that are out of the run in a round (`round.gone`)."""
    return frozenset(c for c, first in gone_from(config).items() if round >= first)


def gone_from(config: Config) -> dict[int, int]:
    """Returns, by client, the first round without it; of two that are named the first counts."""
    found: dict[int, int] = {}
    for pattern, first in config.round.gone.items():
        for client in ids.parse(pattern, "round.gone").resolve(config.clients):
            found[client] = min(first, found.get(client, first))
    return found


def is_planned(config: Config) -> bool:
    """Returns whether the cohorts follow from the configuration alone, and not from what happens
    in the run: from its time, or from what clients replied.
    """
    own = config.selection.name is not None or registry.algorithm.get(config.algorithm.name).selects
    return config.availability.trace is None and not own


_stepping = threading.Lock()


def available(config: Config, round: int) -> np.ndarray:
    """Returns (N,) bool, read-only: which clients are available in a round, by `availability`."""
    section = config.availability
    n = config.clients
    if section.model == "bernoulli":
        assert section.p is not None
        return seeds.rng(config.seed, "availability", round).random(n) < section.p
    if section.model == "always":
        return np.ones(n, dtype=bool)
    # A Markov chain for each client: off -> on with probability `up`, on -> off with `down`.
    assert section.up is not None and section.down is not None  # noqa: PT018
    with _stepping:
        known = _markov(config.seed, n, section.up, section.down)
        while len(known) <= round:
            draw = seeds.rng(config.seed, "availability", len(known)).random(n)
            here = np.where(known[-1], draw >= section.down, draw < section.up)
            here.setflags(write=False)
            known.append(here)
        return known[round]


@functools.lru_cache(maxsize=4)
def _markov(seed: int, n: int, up: float, down: float) -> list[np.ndarray]:
    """Returns the states of the chains by round, as far as they are known: at first that of round
    0, drawn from the stationary distribution.
    """
    stationary = up / (up + down) if up + down else 1.0
    return [seeds.rng(seed, "availability", 0).random(n) < stationary]

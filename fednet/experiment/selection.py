"""Who takes part: each round's seeded order of all ids, and who of them is there at all.

Neither looks at connections, so all methods that are compared on one seed see the same clients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from fednet import seeds
from fednet.config import AvailabilitySection, Config
from fednet.descriptors import named
from fednet.errors import ConfigError


def cohort(config: Config, round: int, here: Sequence[bool] | None = None) -> list[int]:
    """The ids asked in a round (from 1), ascending: the first `config.asked` of the round's order
    that are available. here: who is, where that depends on the time and not on the round.
    """
    present = available(config, round) if here is None else here
    return sorted(order(config, round, present)[: config.asked])


def order(config: Config, round: int, here: Sequence[bool] | np.ndarray) -> list[int]:
    """The round's order of the ids that are there."""
    drawn = seeds.rng(config.seed, "selection", round).permutation(config.clients)
    return [int(i) for i in drawn if here[i]]


T = TypeVar("T")


def available(config: Config, round: int) -> np.ndarray:
    """(N,) bool: who the availability model calls present in a round."""
    section, n = config.availability, config.clients
    if section.model == "bernoulli":
        return seeds.rng(config.seed, "availability", round).random(n) < _given(
            section, "p", section.p
        )
    if section.model == "markov":
        return _markov(
            config.seed,
            n,
            round,
            _given(section, "up", section.up),
            _given(section, "down", section.down),
        )
    if section.model == "trace":
        return _trace(_given(section, "path", section.path), n, round)
    return np.ones(n, dtype=bool)


def _given(section: AvailabilitySection, key: str, value: T | None) -> T:
    if value is None:
        raise ConfigError(f"availability.{key} is missing; the model {section.model} needs it.")
    return value


def _markov(seed: int, n: int, round: int, up: float, down: float) -> np.ndarray:
    """On/off chains, one a client: off -> on with probability `up`, on -> off with `down`;
    stationary at the start.
    """
    here = seeds.rng(seed, "availability", 0).random(n) < (up / (up + down) if up + down else 1.0)
    for t in range(1, round + 1):
        draw = seeds.rng(seed, "availability", t).random(n)
        here = np.where(here, draw >= down, draw < up)
    return here


def _trace(path: str, n: int, round: int) -> np.ndarray:
    """A file of `client, from, to` lines (CSV, rounds, both inclusive) or a JSON list of such
    triples.
    """
    try:
        text = named(path).read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [line.split(",") for line in text.splitlines() if line.strip()]
        )
    except OSError as broken:
        raise ConfigError(f"availability.path: {path}: {broken.strerror}.") from broken
    except (ValueError, RecursionError) as broken:
        raise ConfigError(f"availability.path: {path} is no text, or no JSON: {broken}.") from None
    here = np.zeros(n, dtype=bool)
    for number, row in enumerate(rows, 1):
        try:
            client, first, last = (int(str(x).strip()) for x in row)
        except (TypeError, ValueError):
            words = isinstance(row, list) and not any(str(x).strip().isdecimal() for x in row)
            if number == 1 and words:  # a header line
                continue
            raise ConfigError(
                f"{path}:{number}: expected client, from, to (whole numbers), got {str(row)[:60]}."
            ) from None
        if 0 <= client < n and first <= round <= last:
            here[client] = True
    return here

"""Quantity skew: clients differ in how much they hold, not in what."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import TRIES, enough, hopeless, proportions, repaired
from fednet.errors import ConfigError
from fednet.registry import partitioner


@partitioner("quantity")
def quantity(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[
        float, "Concentration of Dir(alpha), above 0; the smaller, the less even the sizes."
    ] = 0.5,
    min_samples: Annotated[int, "Samples that every client gets at least. [samples]"] = 1,
) -> list[np.ndarray]:
    """Quantity skew: sizes q ~ Dir(alpha) over clients, without regard to class.

    As in Li et al., ICDE 2022 (arXiv:2102.02079), section IV: a shuffled pool is cut at
    floor(cumsum(q) n). Drawn again until every client has min_samples, at least one. Where 1000
    tries do not succeed (fewer where it is plain after 20 that none can), the last one is repaired:
    each client that is short gets what it lacks, one sample at a time from the client that then
    holds most.
    """
    n, least = len(y), max(1, min_samples)
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"data.partition.alpha: expected a number > 0, got {alpha}.")
    enough(n, clients, least)
    fewest = clients
    for tried in range(1, TRIES + 1):
        q = proportions(rng, clients, alpha)
        cuts = np.clip(np.floor(np.cumsum(q) * n).astype(np.int64)[:-1], 0, n)
        sizes = np.diff(cuts, prepend=0, append=n)
        short = int((sizes < least).sum())
        fewest = min(fewest, short)
        if not short or hopeless(tried, fewest):
            break
    if short:
        sizes = repaired(sizes[None], q[None], least)[0]
    return np.split(rng.permutation(n), np.cumsum(sizes)[:-1])

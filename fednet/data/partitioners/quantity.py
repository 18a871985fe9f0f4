"""Quantity skew: clients differ in how much they hold, not in what."""

from __future__ import annotations

import numpy as np

from fednet.data.partitioners.dirichlet import TRIES, enough, proportions
from fednet.errors import ConfigError
from fednet.registry import partitioner


@partitioner("quantity")
def quantity(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.5,
    min_samples: int = 1,
) -> list[np.ndarray]:
    """Quantity skew: sizes q ~ Dir(alpha) over clients, without regard to class. Options: alpha,
    min_samples.

    As in Li et al., ICDE 2022 (arXiv:2102.02079), section IV: a shuffled pool is cut at
    floor(cumsum(q) n). Drawn again until every client has min_samples, 1000 times at most; then
    ConfigError.
    """
    n, least = len(y), max(1, min_samples)
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"data.partition.alpha: expected a number > 0, got {alpha}.")
    enough(n, clients, least)
    for _ in range(TRIES):
        cuts = np.clip(
            np.floor(np.cumsum(proportions(rng, clients, alpha)) * n).astype(np.int64)[:-1], 0, n
        )
        if np.diff(cuts, prepend=0, append=n).min() >= least:
            return np.split(rng.permutation(n), cuts)
    raise ConfigError(
        f"data.partition: no draw of {TRIES} gave each of {clients} clients {least} of {n} "
        f"samples "
        f"(quantity, alpha {alpha}); use a larger alpha, fewer clients or a smaller min_samples."
    )

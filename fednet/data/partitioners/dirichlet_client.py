"""Label skew: each client has its own Dirichlet draw over the classes."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import dealt, enough, proportions
from fednet.errors import ConfigError
from fednet.registry import partitioner

WIDEST = 20  # one client has all but one of the samples long before; e^(20 x) is still finite


@partitioner("dirichlet_client")
def dirichlet_client(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[
        float, "Concentration of Dir(alpha), above 0; the smaller, the fewer classes per client."
    ] = 0.3,
    sigma: Annotated[
        float,
        "Sigma of the log-normal that clients' sizes are drawn from, 0 to 20; 0: all have the same "
        "size.",
    ] = 0.0,
) -> list[np.ndarray]:
    """Label skew: for each client q ~ Dir(alpha) over the classes.

    `dirichlet` divides each class over the clients, so sizes differ; here every client has
    floor(n / N) samples and draws the classes of its own. FedDyn (Acar et al. 2021), those who took
    its splits, such as FedSMU, and Hsu et al. 2019 (arXiv:1909.06335, for even classes) mean this
    by "Dirichlet"; NIID-Bench, MOON, FedDPC and PFLlib mean `dirichlet`. The same alpha gives less
    skew here.

    With sigma, sizes are those of FedDyn's unbalanced splits: at least 1, and in all at most n.
    Samples are drawn one at a time without replacement, for the clients in random order. Once a
    class is used up, q is renormalised over what is left.
    """
    if not 0 <= sigma <= WIDEST:
        raise ConfigError(
            f"data.partition.sigma: expected a number from 0 to {WIDEST}, got {sigma}."
        )
    enough(len(y), clients)
    _, y, left = np.unique(y, return_inverse=True, return_counts=True)
    q = np.stack([proportions(rng, len(left), alpha) for _ in range(clients)])
    held = draw_counts(q, left, sizes(len(y), clients, sigma, rng), rng)
    return dealt(y, held.T, rng)


dirichlet_client.by_class = True  # type: ignore[attr-defined]


def sizes(n: int, clients: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Draws (N,) samples of each client, each at least 1, in all at most n."""
    if sigma == 0:
        return np.full(clients, n // clients, dtype=np.int64)
    drawn = rng.lognormal(0.0, sigma, clients)
    return 1 + np.floor((n - clients) * drawn / drawn.sum()).astype(np.int64)


def draw_counts(
    q: np.ndarray, left: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Draws (N, C) how many samples of each class each client gets. left: (C,) samples of each
    class; wanted: (N,) samples of each client.
    """
    counts = np.zeros(q.shape, dtype=np.int64)
    left = left.copy()
    turns = rng.permutation(np.repeat(np.arange(len(q)), wanted))
    draws = rng.random(len(turns))
    weights = q.copy()
    cumulated = np.cumsum(weights, axis=1)
    for client, u in zip(turns, draws):
        row = cumulated[client]
        if row[-1] <= 0:  # all its classes are used up: it draws from what is left
            row = np.cumsum(left.astype(float))
        c = int(np.searchsorted(row, u * row[-1], side="right"))
        counts[client, c] += 1
        left[c] -= 1
        if not left[c]:
            weights[:, c] = 0.0
            cumulated = np.cumsum(weights, axis=1)
    return counts

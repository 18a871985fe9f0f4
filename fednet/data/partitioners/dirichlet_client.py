"""Label skew: each client has its own Dirichlet draw over the classes."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import enough, proportions
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
    prior: Annotated[
        bool, "Draw from Dir(alpha p), with p the classes' shares of all samples (Hsu et al.)."
    ] = False,
    sigma: Annotated[
        float,
        "Sigma of the log-normal that clients' sizes are drawn from, 0 to 20; 0: all have the same "
        "size.",
    ] = 0.0,
) -> list[np.ndarray]:
    """Label skew: for each client q ~ Dir(alpha) over classes.

    The other convention than `dirichlet`, where each class is divided over the clients and sizes
    differ: here every client has floor(n / N) samples and draws what it has of each class. This is
    what Hsu et al. 2019 (arXiv:1909.06335; prior: true, q ~ Dir(alpha p) with p the shares of the
    classes, as they write it), and FedDyn (Acar et al. 2021) and those who took its splits, such as
    FedSMU, mean by "Dirichlet"; NIID-Bench, MOON, FedDPC and PFLlib mean `dirichlet`. The same
    alpha is milder here.

    Sizes are at least 1, and in all at most n; with sigma they are FedDyn's unbalanced splits.
    Samples are drawn one at a time without replacement, for
    the clients in random order; where a class is used up, a client's q is renormalised over what is
    left.
    """
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"data.partition.alpha: expected a number > 0, got {alpha}.")
    if not 0 <= sigma <= WIDEST:
        raise ConfigError(
            f"data.partition.sigma: expected a number from 0 to {WIDEST}, got {sigma}."
        )
    enough(len(y), clients)
    classes, left = np.unique(y, return_counts=True)
    q = np.stack(
        [
            _shares(left / len(y) if prior else None, len(classes), alpha, rng)
            for _ in range(clients)
        ]
    )
    held = _dealt(q, left, sizes(len(y), clients, sigma, rng), rng)
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for at, c in enumerate(classes):
        order = rng.permutation(np.flatnonzero(y == c))
        for part, piece in zip(parts, np.split(order, np.cumsum(held[:, at]))):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]


dirichlet_client.by_class = True  # type: ignore[attr-defined]


def sizes(n: int, clients: int, sigma: float, rng: np.random.Generator) -> np.ndarray:
    """(N,) samples of each client, each at least 1, n or fewer in all."""
    if sigma == 0:
        return np.full(clients, n // clients, dtype=np.int64)
    drawn = rng.lognormal(0.0, sigma, clients)
    return 1 + np.floor((n - clients) * drawn / drawn.sum()).astype(np.int64)


def _shares(
    prior: np.ndarray | None, classes: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """(C,) one client's q."""
    if prior is None:
        return proportions(rng, classes, alpha)
    q = rng.gamma(np.maximum(alpha * prior, np.finfo(float).tiny))
    # For a very small alpha every gamma may round to 0: the client then has one class.
    return q / q.sum() if q.sum() > 0 else np.eye(classes)[rng.choice(classes, p=prior)]


def _dealt(
    q: np.ndarray, left: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(N, C) how many samples of each class each client draws. left: (C,) in all."""
    held, left = np.zeros(q.shape, dtype=np.int64), left.copy()
    turns = rng.permutation(np.repeat(np.arange(len(q)), wanted))
    draws = rng.random(len(turns))
    weights = q.copy()
    upto = np.cumsum(weights, axis=1)
    for client, u in zip(turns, draws):
        if upto[client, -1] <= 0:  # all its classes are used up: what is left, as it is left
            row = np.cumsum(left.astype(float))
        else:
            row = upto[client]
        c = int(np.searchsorted(row, u * row[-1], side="right"))
        held[client, c] += 1
        left[c] -= 1
        if not left[c]:
            weights[:, c] = 0.0
            upto = np.cumsum(weights, axis=1)
    return held

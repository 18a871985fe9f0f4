"""Label skew: each class is dealt to the clients by its own Dirichlet draw (algorithms.md 6.2)."""

from __future__ import annotations

import numpy as np

from fednet.errors import ConfigError
from fednet.registry import partitioner

TRIES = 1000


@partitioner("dirichlet")
def dirichlet(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 0.3,
    min_samples: int = 1,
    cap: bool = False,
) -> list[np.ndarray]:
    """Label skew: for each class p ~ Dir(alpha) over clients. Options: alpha, min_samples, cap.

    cap: a client that already holds n/N samples gets none of the following classes, and the rest
    shares them (with min_samples 10: Yurochkin et al.). Tried again from scratch until every client
    has min_samples, at most 1000 times; then ConfigError.
    """
    n, least = len(y), max(1, min_samples)
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"data.partition.alpha: expected a number > 0, got {alpha}.")
    enough(n, clients, least)
    totals = np.bincount(y)
    for _ in range(TRIES):
        # Only sizes are drawn until a try holds: which samples they are is decided once.
        sizes = _sizes(totals, clients, rng, alpha, n / clients if cap else None)
        if sizes.sum(axis=0).min() >= least:
            return _deal(y, sizes, rng)
    raise ConfigError(
        f"data.partition: no draw of {TRIES} gave each of {clients} clients {least} of {n} "
        f"samples "
        f"(dirichlet, alpha {alpha}); use a larger alpha, fewer clients or a smaller min_samples."
    )


dirichlet.by_class = True  # type: ignore[attr-defined]


def _sizes(
    totals: np.ndarray, clients: int, rng: np.random.Generator, alpha: float, cap: float | None
) -> np.ndarray:
    """(C, N) samples of each class for each client."""
    sizes = np.zeros((len(totals), clients), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    for c, total in enumerate(totals):
        p = proportions(rng, clients, alpha)
        if cap is not None:
            p = capped(p, held < cap)
        cuts = np.floor(np.cumsum(p) * total).astype(np.int64)[:-1]
        sizes[c] = np.diff(np.clip(cuts, 0, total), prepend=0, append=total)
        held += sizes[c]
    return sizes


def proportions(rng: np.random.Generator, clients: int, alpha: float) -> np.ndarray:
    """One p ~ Dir(alpha) over clients. For very small alpha NumPy may return NaN or a row of zeros:
    drawn again.
    """
    for _ in range(TRIES):
        p = rng.dirichlet(np.full(clients, alpha))
        if np.isfinite(p).all() and p.sum() > 0:
            return p
    raise ConfigError(f"data.partition.alpha: {alpha} is too small to draw proportions from.")


def capped(p: np.ndarray, room: np.ndarray) -> np.ndarray:
    """p where there is room, summing to one; p as it was where that leaves nothing."""
    kept = p * room
    total = kept.sum()
    return kept / total if np.isfinite(total) and total > 0 else p


def _deal(y: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(sizes.shape[1])]
    for c, row in enumerate(sizes):
        for part, piece in zip(
            parts, np.split(rng.permutation(np.flatnonzero(y == c)), np.cumsum(row)[:-1])
        ):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def enough(n: int, clients: int, least: int = 1) -> None:
    """ConfigError where n samples can never give every client its `least`."""
    if n < clients * least:
        raise ConfigError(
            f"data.partition: {n} samples cannot give each of {clients} clients {least}."
        )

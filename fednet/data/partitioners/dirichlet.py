"""Divisions by shares: a Dirichlet draw for each class (label skew), one for the sizes (quantity
skew), or equal shares (iid).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.errors import ConfigError
from fednet.registry import partitioner

TRIES = 1000
FIRST_TRIES = 20  # after these it is decided whether further tries can succeed
TOO_MANY_SHORT = 50  # clients, in each of them: the chance of none is then below exp(-50)


@partitioner("dirichlet")
def dirichlet(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[
        float, "Concentration of Dir(alpha), above 0; the smaller, the fewer classes per client."
    ] = 0.3,
    min_samples: Annotated[int, "Samples that every client gets at least. [samples]"] = 1,
    cap: Annotated[
        bool, "Whether a client that has n/N samples gets none of the following classes."
    ] = False,
) -> list[np.ndarray]:
    """Label skew: for each class p ~ Dir(alpha) over clients.

    With cap and min_samples 10 this is the division of Yurochkin et al. As there, the whole draw is
    repeated until every client has min_samples, at least one. If 1000 tries do not succeed, as with
    thousands of clients (fewer tries if after 20 it is plain that none can), the last one is
    repaired: each client that is short gets samples of the class that its own draw gave it the
    largest share of, one at a time from the client that holds most of that class (see
    `raise_to_least`).
    """
    n = len(y)
    least = max(1, min_samples)
    enough(n, clients, least)
    totals = np.bincount(y)
    # Only sizes are drawn in each try; the samples are chosen once, at the end.
    sizes = np.zeros((len(totals), clients), dtype=np.int64)
    shares = np.zeros((len(totals), clients))  # before rounding
    fewest = clients
    for tried in range(1, TRIES + 1):
        held = np.zeros(clients, dtype=np.int64)
        for c, total in enumerate(totals):
            p = proportions(rng, clients, alpha)
            if cap:
                p = shares_with_room(p, held < n / clients)
            cuts = np.clip(np.floor(np.cumsum(p) * total).astype(np.int64)[:-1], 0, total)
            sizes[c] = np.diff(cuts, prepend=0, append=total)
            shares[c] = p * total
            held += sizes[c]
        short = int((held < least).sum())
        fewest = min(fewest, short)
        if not short or cannot_succeed(tried, fewest):
            break
    return dealt(y, raise_to_least(sizes, shares, least), rng)


dirichlet.by_class = True  # type: ignore[attr-defined]


def cannot_succeed(tried: int, fewest: int) -> bool:
    """Whether further tries are useless. fewest: the fewest clients short of samples in any try.
    Clients are short nearly independently, so if 50 are on average, a draw without any does not
    happen.
    """
    return tried >= FIRST_TRIES and fewest >= TOO_MANY_SHORT


def raise_to_least(sizes: np.ndarray, shares: np.ndarray, least: int) -> np.ndarray:
    """Returns (C, N) sizes with at least `least` for every client, and the same sum of each class.

    In ascending id, a client that is short takes one sample at a time: of the class with its
    largest share that any client can spare, from the client that holds most of it (of equals the
    lowest id) and has more than `least` in all. There are enough samples for all.
    """
    sizes = sizes.copy()
    held = sizes.sum(axis=0)
    for client in np.flatnonzero(held < least):
        for c in np.argsort(-shares[:, client], kind="stable"):
            while held[client] < least:
                giver = np.where(held > least, sizes[c], 0).argmax()
                if held[giver] <= least or not sizes[c, giver]:
                    break
                sizes[c, [giver, client]] += -1, 1
                held[[giver, client]] += -1, 1
    return sizes


def proportions(rng: np.random.Generator, clients: int, alpha: float) -> np.ndarray:
    """Draws p ~ Dir(alpha) over clients. For very small alpha NumPy may return NaN or zeros; then
    it draws again. Raises ConfigError for another alpha than a number > 0.
    """
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"data.partition.alpha: expected a number > 0, got {alpha}.")
    for _ in range(TRIES):
        p = rng.dirichlet(np.full(clients, alpha))
        if np.isfinite(p).all() and p.sum() > 0:
            return p
    raise ConfigError(f"data.partition.alpha: {alpha} is too small to draw proportions from.")


def shares_with_room(p: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns p for clients with room, scaled to sum 1; p unchanged if that leaves nothing."""
    kept = p * room
    total = kept.sum()
    return kept / total if np.isfinite(total) and total > 0 else p


def dealt(y: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Deals the samples of each class in random order. sizes: (C, N) samples of each class of y,
    0..C-1, for each client; what is left over is used by nobody.
    """
    parts: list[list[np.ndarray]] = [[] for _ in range(sizes.shape[1])]
    for c, row in enumerate(sizes):
        pieces = np.split(rng.permutation(np.flatnonzero(y == c)), np.cumsum(row))
        for part, piece in zip(parts, pieces):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def enough(n: int, clients: int, least: int = 1) -> None:
    """Raises ConfigError if n samples are too few for `least` each."""
    if n < clients * least:
        raise ConfigError(
            f"data.partition: {n} samples cannot give each of {clients} clients {least}; "
            f"expected at most {n // least} clients."
        )


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
    return dirichlet(np.zeros_like(y), clients, rng, alpha=alpha, min_samples=min_samples)


@partitioner("iid")
def iid(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    min_samples: Annotated[int, "Samples that every client gets at least. [samples]"] = 1,
) -> list[np.ndarray]:
    """No skew: a permutation cut into N parts whose sizes differ by one at most."""
    enough(len(y), clients, max(1, min_samples))
    return np.array_split(rng.permutation(len(y)), clients)

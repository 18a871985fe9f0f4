"""Label skew by number: every client holds samples of exactly k classes (`labels`), or a few shards
of the samples sorted by label (`shards`).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import enough
from fednet.errors import ConfigError
from fednet.registry import partitioner


@partitioner("labels")
def labels(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    per_client: Annotated[int, "Classes k of each client, at least 1. [classes]"] = 2,
) -> list[np.ndarray]:
    """Each client has samples of per_client classes, `#C = k` of NIID-Bench.

    As in Li et al., ICDE 2022 (arXiv:2102.02079), section IV, and their code: client i owns class
    i mod C and per_client - 1 others drawn at random; a class's samples, shuffled, are divided
    evenly among its owners. With fewer clients than classes a class may have no owner: nobody
    trains on its samples. Raises ConfigError where a class has fewer samples than owners.
    """
    enough(len(y), clients)
    classes = np.unique(y)
    if not 1 <= per_client <= len(classes):
        raise ConfigError(
            f"data.partition.per_client: expected 1 to {len(classes)}, the classes that there are, "
            f"got {per_client}."
        )
    owned = np.stack(
        [_owned(i % len(classes), len(classes), per_client, rng) for i in range(clients)]
    )
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for at, c in enumerate(classes):
        owners = np.flatnonzero((owned == at).any(axis=1))
        samples = rng.permutation(np.flatnonzero(y == c))
        if len(samples) < len(owners):
            raise ConfigError(
                f"data.partition: class {c} has {len(samples)} samples for {len(owners)} clients "
                f"that own it; use fewer clients or a smaller per_client."
            )
        for owner, piece in zip(owners, np.array_split(samples, max(1, len(owners)))):
            parts[owner].append(piece)
    return [np.concatenate(pieces) for pieces in parts]


labels.by_class = True  # type: ignore[attr-defined]


def _owned(first: int, classes: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Draws (k,) classes: `first`, and k - 1 of the others, each choice equally likely."""
    others = np.delete(np.arange(classes), first)
    return np.append(first, rng.choice(others, size=k - 1, replace=False))


@partitioner("shards")
def shards(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    *,
    per_client: Annotated[int, "Shards of each client, at least 1. [shards]"] = 2,
) -> list[np.ndarray]:
    """Label skew by sorting: N * per_client equal shards of the samples sorted by label, per_client
    to each client.

    The shards hold floor(n / (N * per_client)) samples; the remainder is used by nobody. A client
    sees at most per_client labels, or more where a shard straddles two.
    """
    _enough_shards(len(y), clients * per_client, "training")
    return _deal_shards(y, assignment(clients, per_client, rng), rng)


def assignment(clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """Draws (N, per_client) numbers of each client's shards. It is the stream's first draw, so that
    the test set can repeat it.
    """
    if per_client < 1:
        raise ConfigError(
            f"data.partition.per_client: expected a whole number >= 1, got {per_client}."
        )
    return rng.permutation(clients * per_client).reshape(clients, per_client)


def for_test(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    test_rng: np.random.Generator,
    *,
    per_client: int = 2,
) -> list[np.ndarray]:
    """Returns test shards with the numbers of the client's training shards."""
    _enough_shards(len(y), clients * per_client, "test")
    return _deal_shards(y, assignment(clients, per_client, rng), test_rng)


def _enough_shards(samples: int, shards: int, what: str) -> None:
    if samples < shards:
        hint = ", or data.client_test: none." if what == "test" else "."
        raise ConfigError(
            f"data.partition (scheme 'shards'): {samples} {what} samples cannot fill {shards} "
            f"shards; use fewer clients or a smaller per_client{hint}"
        )


def _deal_shards(y: np.ndarray, given: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    size = len(y) // given.size
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]  # by label, ties in shuffled order
    return [
        order[: size * given.size].reshape(given.size, size)[mine].reshape(-1) for mine in given
    ]


shards.test = for_test  # type: ignore[attr-defined]
shards.by_class = True  # type: ignore[attr-defined]

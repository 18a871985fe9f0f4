"""Label skew by sorting: every client gets a few shards of one label each."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.errors import ConfigError
from fednet.registry import partitioner


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
    _enough(len(y), clients * per_client, "training")
    return _deal(y, assignment(clients, per_client, rng), rng)


def assignment(clients: int, per_client: int, rng: np.random.Generator) -> np.ndarray:
    """(N, per_client) numbers of each client's shards: the stream's first draw, so the test set
    repeats it.
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
    """Test shards with the same numbers as the client's training shards."""
    _enough(len(y), clients * per_client, "test")
    return _deal(y, assignment(clients, per_client, rng), test_rng)


def _enough(samples: int, shards: int, what: str) -> None:
    if samples < shards:
        hint = ", or data.client_test: none." if what == "test" else "."
        raise ConfigError(
            f"data.partition (scheme 'shards'): {samples} {what} samples cannot fill {shards} "
            f"shards; use fewer clients or a smaller per_client{hint}"
        )


def _deal(y: np.ndarray, given: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    size = len(y) // given.size
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]  # by label, ties in shuffled order
    return [
        order[: size * given.size].reshape(given.size, size)[mine].reshape(-1) for mine in given
    ]


shards.test = for_test  # type: ignore[attr-defined]
shards.by_class = True  # type: ignore[attr-defined]

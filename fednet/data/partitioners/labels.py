"""Label skew by number: every client holds samples of exactly k classes (`labels`), or a few shards
of the samples sorted by label (`shards`).
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import dealt, enough
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
    classes, y, counts = np.unique(y, return_inverse=True, return_counts=True)
    if not 1 <= per_client <= len(classes):
        raise ConfigError(
            f"data.partition.per_client: expected 1 to {len(classes)}, the classes that there are, "
            f"got {per_client}."
        )
    owned = np.zeros((len(classes), clients), dtype=np.int64)  # 1: the client owns the class
    for client in range(clients):
        first = client % len(classes)
        others = np.delete(np.arange(len(classes)), first)
        owned[rng.choice(others, size=per_client - 1, replace=False), client] = 1
        owned[first, client] = 1
    owners = owned.sum(axis=1)
    if (counts < owners).any():
        c = int((counts < owners).argmax())
        raise ConfigError(
            f"data.partition: class {classes[c]} has {counts[c]} samples for {owners[c]} clients "
            f"that own it; use fewer clients or a smaller per_client."
        )
    even, rest = np.divmod(counts, np.maximum(1, owners))
    sizes = even[:, None] + (np.cumsum(owned, axis=1) <= rest[:, None])
    return dealt(y, owned * sizes, rng)


labels.by_class = True  # type: ignore[attr-defined]


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
    return _shards(y, clients, per_client, rng, rng, "training")


def for_test(
    y: np.ndarray,
    clients: int,
    rng: np.random.Generator,
    test_rng: np.random.Generator,
    *,
    per_client: int = 2,
) -> list[np.ndarray]:
    """Returns test shards with the numbers of the client's training shards."""
    return _shards(y, clients, per_client, rng, test_rng, "test")


def _shards(
    y: np.ndarray,
    clients: int,
    per_client: int,
    numbers: np.random.Generator,
    samples: np.random.Generator,
    what: str,
) -> list[np.ndarray]:
    """numbers: draws those of each client's shards first, so that the test set can repeat them."""
    if per_client < 1:
        raise ConfigError(
            f"data.partition.per_client: expected a whole number >= 1, got {per_client}."
        )
    count = clients * per_client
    if len(y) < count:
        hint = ", or data.client_test: none." if what == "test" else "."
        raise ConfigError(
            f"data.partition (scheme 'shards'): {len(y)} {what} samples cannot fill {count} "
            f"shards; use fewer clients or a smaller per_client{hint}"
        )
    given = numbers.permutation(count).reshape(clients, per_client)
    order = samples.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]  # by label, ties in shuffled order
    size = len(y) // count
    whole = order[: size * count].reshape(count, size)
    return [whole[mine].reshape(-1) for mine in given]


shards.test = for_test  # type: ignore[attr-defined]
shards.by_class = True  # type: ignore[attr-defined]

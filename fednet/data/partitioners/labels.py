"""Label skew by number of classes: every client holds samples of exactly k of them."""

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
    """(k,) classes: `first`, and k - 1 of the others, each choice equally likely."""
    others = np.delete(np.arange(classes), first)
    return np.append(first, rng.choice(others, size=k - 1, replace=False))

"""The owners that the data themselves name."""

from __future__ import annotations

import numpy as np

from fednet.errors import ConfigError
from fednet.registry import partitioner


@partitioner("natural")
def natural(groups: np.ndarray | None, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The dataset's own groups, such as writers or sensors: one a client, or whole groups dealt
    evenly where more.

    With as many groups as clients, client i is the i-th group in ascending order.
    """
    if groups is None:
        raise ConfigError(
            "data.partition: scheme natural wants a dataset with groups, and this one has none."
        )
    owners = np.unique(groups)
    if len(owners) < clients:
        raise ConfigError(
            f"data.partition: {clients} clients want as many natural groups; there are "
            f"{len(owners)}."
        )
    dealt = np.array_split(owners if len(owners) == clients else rng.permutation(owners), clients)
    return [np.flatnonzero(np.isin(groups, mine)) for mine in dealt]

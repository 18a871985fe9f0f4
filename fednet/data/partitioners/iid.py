"""No skew."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.data.partitioners.dirichlet import enough
from fednet.registry import partitioner


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

from __future__ import annotations

import copy
import math
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fednet.errors import ConfigError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Indices, Select


@compressor("topk")
class TopK(Select):
    """Keeps the `share` of the values that are largest in magnitude, at least one; of equal ones
    those that come first.

    With error feedback: what was not sent is added to what is sent next. On the wire: where they
    stand, in 2 + log2(n/k) bits each (`base.pack_indices`), then the values, as the rest of the
    chain writes them.
    """

    paper = "Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599"
    biased = True

    def __init__(
        self,
        share: Annotated[float, "Share of the values that is sent, above 0 and at most 1. [share]"],
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(
                f"topk({share}): expected a share of the values, above 0 and at most 1."
            )
        self.share = float(share)

    def count(self, n: int) -> int:
        return min(n, max(1, math.floor(self.share * n + 0.5)))

    def select(self, x: Floats) -> Indices:
        # What is not finite is sent, and refused there.
        return smallest(-np.nan_to_num(np.abs(x), nan=np.inf, posinf=np.inf), self.count(x.size))

    def at(self, share: float) -> TopK:
        """The same with another share."""
        other = copy.copy(self)
        other.share = share
        return other


def smallest(x: npt.NDArray[np.floating], k: int) -> Indices:
    """(k,) ascending indices of the k smallest of x, (n,); of equal ones those that come first."""
    if k == 0:
        return np.zeros(0, dtype=np.uint32)
    most = np.partition(x, k - 1)[k - 1]
    keep = x < most
    ties = np.flatnonzero(x == most)
    keep[ties[: k - int(np.count_nonzero(keep))]] = True
    return np.flatnonzero(keep).astype(np.uint32)

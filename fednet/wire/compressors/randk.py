from __future__ import annotations

import copy
from typing import Annotated

import numpy as np

from fednet.errors import ConfigError
from fednet.registry import compressor
from fednet.wire.compressors.base import Feedback, Floats, Indices, Memory, Reduce
from fednet.wire.compressors.topk import smallest

SEED = 8  # bytes


@compressor("randk")
class RandK(Reduce):
    """Keeps a `share` of the values, at least one, chosen at random; both ends draw which from a
    seed of 8 bytes, so that no index crosses.

    C(x) = n/k * x on the k chosen of n, and 0 elsewhere: E C(x) = x and E||C(x) - x||^2 =
    (n/k - 1) ||x||^2 (sparsification with equal probabilities k/n). Under ef, ef21 and delta, which
    want a contraction, without the n/k: E||C(x) - x||^2 = (1 - k/n) ||x||^2 (Definition 2.1 of
    Stich et al. 2018).

    Chosen are the k smallest of n draws of Philox4x64 under the seed as key, whose stream NumPy
    keeps as it is.
    """

    paper = "Wangni et al. 2018, Gradient Sparsification, arXiv:1710.09854"

    def __init__(
        self,
        share: Annotated[float, "Share of the values that is sent, above 0 and at most 1. [share]"],
    ) -> None:
        if not 0 < share <= 1:
            raise ConfigError(
                f"randk({share}): expected a share of the values, above 0 and at most 1."
            )
        self.share, self.scaled = float(share), True
        self.omega = 1 / self.share - 1

    def count(self, n: int) -> int:
        return min(n, max(1, int(self.share * n + 0.5)))

    def head(self, n: int, k: int) -> int:
        return SEED

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        seed = int(rng.integers(0, 2**63)).to_bytes(SEED, "little")
        kept = x[self._chosen(seed, x.size)]
        # What is not finite may be among what is not chosen: it is sent, and refused there.
        return seed, kept if bool(np.isfinite(x).all()) else np.full_like(kept, np.nan)

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        out = np.zeros(n, dtype=np.float32)
        factor = n / max(1, numbers.size) if self.scaled else 1.0
        with np.errstate(over="ignore"):  # beyond float32: infinite, and refused as that
            out[self._chosen(bytes(head), n)] = numbers * np.float32(factor)
        return out

    def under(self, feedback: Feedback) -> Reduce:
        other = copy.copy(self)
        other.scaled = feedback.scaled
        return other

    def _chosen(self, seed: bytes, n: int) -> Indices:
        draws = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(n)
        return smallest(np.atleast_1d(draws), self.count(n))

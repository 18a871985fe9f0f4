"""Compressors that send some of the values: the largest, those above a threshold, random ones."""

from __future__ import annotations

import copy
import math
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import (
    Feedback,
    Floats,
    Indices,
    Memory,
    Reduce,
    Select,
    index_bytes,
)


def valid_share(name: str, share: float) -> float:
    """Returns the share of a compressor of that name. Raises ConfigError if it is none."""
    if not 0 < share <= 1:
        raise ConfigError(
            f"{name}({share}): expected a share of the values, above 0 and at most 1."
        )
    return float(share)


def values_of(share: float, n: int) -> int:
    """Returns how many of n values a share is, rounded: at least one, unless there is none."""
    return min(n, max(1, math.floor(share * n + 0.5)))


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
        self.share = valid_share("topk", share)

    def count(self, n: int) -> int:
        return values_of(self.share, n)

    def select(self, x: Floats) -> Indices:
        # A value that is not finite is sent, so that the receiver refuses the message.
        return smallest(-np.nan_to_num(np.abs(x), nan=np.inf, posinf=np.inf), self.count(x.size))


def smallest(x: npt.NDArray[np.floating], k: int) -> Indices:
    """(k,) ascending indices of the k smallest of x, (n,); of equal ones those that come first."""
    if k == 0:
        return np.zeros(0, dtype=np.uint32)
    most = np.partition(x, k - 1)[k - 1]
    keep = x < most
    ties = np.flatnonzero(x == most)
    keep[ties[: k - int(np.count_nonzero(keep))]] = True
    return np.flatnonzero(keep).astype(np.uint32)


COUNT = 4  # bytes


@compressor("threshold")
class Threshold(Select):
    """Keeps the values of at least `least` in magnitude, however many these are.

    C(x)_i = x_i where |x_i| >= lambda, else 0 (the hard-threshold sparsifier with an absolute
    lambda), with error feedback: ||C(x) - x||^2 <= n lambda^2. On the wire: how many, where they
    stand, as topk has it, then the values. Sizes that are predicted are bounds: they follow from
    the values.
    """

    paper = "Sahu et al. 2021, Rethinking Gradient Sparsification, arXiv:2108.00951"
    biased = True
    fixed = False

    def __init__(
        self, least: Annotated[float, "Smallest magnitude lambda that is sent, above 0."]
    ) -> None:
        if not least > 0:
            raise ConfigError(f"threshold({least}): expected a magnitude above 0.")
        self.least = float(least)

    def count(self, n: int) -> int:
        return n

    def head(self, n: int, k: int) -> int:
        return COUNT + index_bytes(n, k)

    def select(self, x: Floats) -> Indices:
        return np.flatnonzero(~(np.abs(x) < self.least)).astype(np.uint32)

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        where, kept = super().reduce(x, rng, memory)
        return kept.size.to_bytes(COUNT, "little") + where, kept

    def read_count(self, data: memoryview, n: int) -> int:
        k = int.from_bytes(data[:COUNT], "little")
        if len(data) < COUNT or k > n:
            raise RemoteProtocolError(f"threshold: {k} values announced of {n}.")
        return k

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        return super().expand(head[COUNT:], numbers, n)


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
        self.share = valid_share("randk", share)
        self.scaled = True
        self.omega = 1 / self.share - 1

    def count(self, n: int) -> int:
        return values_of(self.share, n)

    def head(self, n: int, k: int) -> int:
        return SEED

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        seed = int(rng.integers(0, 2**63)).to_bytes(SEED, "little")
        kept = x[self._chosen(seed, x.size)]
        # A value that is not finite may not be among those chosen. Then NaN is sent, so that the
        # receiver refuses the message.
        return seed, kept if bool(np.isfinite(x).all()) else np.full_like(kept, np.nan)

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        out = np.zeros(n, dtype=np.float32)
        factor = n / max(1, numbers.size) if self.scaled else 1.0
        out[self._chosen(bytes(head), n)] = numbers * np.float32(factor)
        return out

    def with_feedback(self, feedback: Feedback) -> Reduce:
        other = copy.copy(self)
        other.scaled = feedback.scaled
        return other

    def _chosen(self, seed: bytes, n: int) -> Indices:
        draws = np.random.Philox(key=int.from_bytes(seed, "little")).random_raw(n)
        return smallest(np.atleast_1d(draws), self.count(n))

from __future__ import annotations

from typing import Annotated

import numpy as np

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Indices, Memory, Select, index_bytes

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

    def left(self, data: memoryview, n: int) -> int:
        k = int.from_bytes(data[:COUNT], "little")
        if len(data) < COUNT or k > n:
            raise RemoteProtocolError(f"threshold: {k} values announced of {n}.")
        return k

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        return super().expand(head[COUNT:], numbers, n)

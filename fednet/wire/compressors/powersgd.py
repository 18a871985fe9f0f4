from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch

from fednet.errors import ConfigError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Memory, Reduce

Wide = npt.NDArray[np.float64]


@compressor("powersgd")
class PowerSGD(Reduce):
    """Each weight matrix as a product of two of rank `rank`, by one step of subspace iteration from
    the last message's factor; with error feedback.

    P = M Q, P orthonormalised, Q = M^T P; P Q^T stands for M (Algorithm 1, less its two means over
    the workers: here each client sends both of its own factors, in one message). M is a tensor as
    (first dimension) x (all others); Q is warm: the last message's, the first drawn from N(0, 1).
    What two factors would not shorten, biases above all, crosses whole.

    On the wire: tensor by tensor P and Q, or the values, as the rest of the chain writes them. Both
    ends multiply in the same order, element by element.
    """

    paper = "Vogels, Karimireddy and Jaggi 2019, PowerSGD, arXiv:1905.13727"
    biased = True
    remembers = True

    def __init__(self, rank: Annotated[int, "Rank of the two factors, 1 to 256."]) -> None:
        if rank != int(rank) or not 1 <= rank <= 256:
            raise ConfigError(f"powersgd({rank}): expected a rank from 1 to 256.")
        self.rank = int(rank)
        self._shapes: tuple[tuple[int, ...], ...] = ()

    def for_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Reduce:
        other = copy.copy(self)
        other._shapes = shapes
        return other

    def count(self, n: int) -> int:
        return sum(r * (a + b) if r else a * b for _, a, b, r in self._matrices(n))

    def head(self, n: int, k: int) -> int:
        return 0

    def reduce(
        self, x: Floats, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[bytes, Floats]:
        # A product may hide values that are not finite. Then NaN is sent, so that the receiver
        # refuses the message.
        if not bool(np.isfinite(x).all()):
            return b"", np.full(self.count(x.size), np.nan, dtype=np.float32)
        warm = None if memory is None else memory.get("q")
        last = None if warm is None else warm.numpy()
        numbers = list[Floats]()
        kept = list[Floats]()
        for at, a, b, r in self._matrices(x.size):
            part = x[at : at + a * b]
            if not r:
                numbers.append(part)
                continue
            start = sum(q.size for q in kept)
            q = np.zeros((b, r)) if last is None else last[start : start + b * r].reshape(b, r)
            p, q = _factors(part.reshape(a, b).astype(np.float64), q.astype(np.float64), rng)
            numbers += [p.astype(np.float32).reshape(-1), q.astype(np.float32).reshape(-1)]
            kept.append(numbers[-1])
        if memory is not None and kept:
            memory.set(torch.from_numpy(np.concatenate(kept)), "q")
        return b"", np.concatenate(numbers) if numbers else x

    def expand(self, head: memoryview, numbers: Floats, n: int) -> Floats:
        out = np.zeros(n, dtype=np.float32)
        here = 0
        for at, a, b, r in self._matrices(n):
            if not r:
                out[at : at + a * b] = numbers[here : here + a * b]
                here += a * b
                continue
            p = numbers[here : here + a * r].reshape(a, r)
            q = numbers[here + a * r : here + r * (a + b)].reshape(b, r)
            here += r * (a + b)
            product = out[at : at + a * b].reshape(a, b)
            for k in range(r):
                product += p[:, k : k + 1] * q[:, k]
        return out

    def _matrices(self, n: int) -> Iterator[tuple[int, int, int, int]]:
        """(start, rows, columns, rank of its factors; 0: it crosses whole) of each tensor; of a
        vector of unknown parts: as nearly square as it can be, and the rest.
        """
        shapes = self._shapes
        at = 0
        if sum(math.prod(shape) for shape in shapes) != n:
            side = max(1, math.isqrt(n))
            shapes = ((side, n // side), (n % side,)) if n else ()
        for shape in shapes:
            size = math.prod(shape)
            a = shape[0] if len(shape) > 1 else 1
            b = size // max(1, a)
            r = min(self.rank, a, b)
            yield at, a, b, r if r * (a + b) < a * b else 0
            at += size


def _factors(m: Wide, q: Wide, rng: np.random.Generator) -> tuple[Wide, Wide]:
    """Returns P, with orthonormal columns, and Q. Columns of q that are 0 are drawn again."""
    empty = ~q.any(axis=0)
    q[:, empty] = rng.standard_normal((q.shape[0], int(empty.sum())))
    p = m @ q
    for k in range(p.shape[1]):  # Gram-Schmidt, modified
        whole = float(np.linalg.norm(p[:, k]))
        for _ in range(2):  # once more: what is left may be rounding alone
            p[:, k] -= p[:, :k] @ (p[:, :k].T @ p[:, k])
        left = float(np.linalg.norm(p[:, k]))
        p[:, k] = p[:, k] / left if left > 1e-9 * whole else 0.0
    return p, m.T @ p

"""The three places a compressor can take in a chain.

A part is a class under `@compressor("name")` that derives from one of these; the arguments of its
`__init__` are those in the parentheses of `topk(0.01)`, and it raises ConfigError where they are
out of range. Its attribute `paper` cites what it was taken from. What is encoded must be of a
length that follows from the number of values alone (except `Lossless`), and `decode` raises
RemoteProtocolError for what it cannot make sense of.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fednet.errors import RemoteProtocolError

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


class Part:
    """biased: the mean of what is decoded is not what was encoded, so that error feedback is
    needed.
    """

    paper: ClassVar[str] = ""
    lossy: ClassVar[bool] = True
    biased: ClassVar[bool] = False


class Select(Part):
    """Keeps some of the values; comes first."""

    def count(self, n: int) -> int:
        """How many of n values are kept."""
        raise NotImplementedError

    def select(self, x: Floats) -> Indices:
        """(count(n),) ascending indices into x, (n,)."""
        raise NotImplementedError


class Values(Part):
    """Writes values with fewer bits."""

    def nbytes(self, n: int) -> int:
        """Length of n encoded values."""
        raise NotImplementedError

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        """x: (n,) to nbytes(n) bytes. What is not finite must come out not finite, or be refused by
        `decode`.
        """
        raise NotImplementedError

    def decode(self, data: memoryview, n: int) -> Floats:
        """data, of nbytes(n) bytes as the chain has checked, to (n,)."""
        raise NotImplementedError


class Lossless(Part):
    """Shortens bytes; comes last."""

    lossy: ClassVar[bool] = False

    def bound(self, nbytes: int) -> int:
        """The longest that nbytes bytes can become."""
        raise NotImplementedError

    def encode(self, data: bytes) -> bytes:
        raise NotImplementedError

    def decode(self, data: memoryview, nbytes: int) -> bytes:
        """To exactly nbytes bytes; never allocates more than that."""
        raise NotImplementedError


def scales(data: memoryview, what: str) -> Floats:
    """Little-endian float32 scales, refused unless finite and not negative."""
    found: Any = np.frombuffer(data, dtype="<f4")
    if not bool(np.isfinite(found).all()) or bool((found < 0).any()):
        raise RemoteProtocolError(f"{what}: a scale is negative or not finite.")
    return found.astype(np.float32)

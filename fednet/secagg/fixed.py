"""Fixed point: real vectors as integers of a ring, in which sums are exact.

An entry x in [-c, c] becomes the integer rint(x L / c), L = 2^(bits - 1) - 1, with an error of at
most c / (2 L); an entry outside is clipped. A weight w of at most w_max multiplies the entry before
it is rounded, as w / w_max, so that the integer needs no more bits; the weight itself is sent as
one more entry. The sum of m such integers has an error of at most m / 2, and the weighted mean one
of at most m c w_max / (2 L W), W the sum of weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class FixedPoint:
    """Whole numbers that stand for real ones (symbols as above)."""

    bits: int
    """Of an entry, its sign included."""
    clip: float
    """c, the largest absolute value of an entry."""
    most: int = 1
    """w_max, the largest weight."""

    @property
    def levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def largest(self) -> int:
        """The largest absolute value of an entry, or of the weight, as an integer."""
        return max(self.levels, self.most)

    def encode(self, x: Floats, weight: int = 1) -> Integers:
        """Returns (d + 1,) integers: the entries, then the weight, of at most w_max."""
        weight = min(max(0, int(weight)), self.most)
        scale = self.levels * weight / (self.clip * self.most)
        out = np.empty(len(x) + 1, dtype=np.int64)
        wide = np.clip(np.asarray(x, dtype=np.float64), -self.clip, self.clip)
        np.rint(wide * scale, casting="unsafe", out=out[:-1])
        out[-1] = weight
        return out

    def count_outside(self, x: Floats) -> int:
        """Returns how many entries are outside [-c, c]."""
        return int(np.count_nonzero(np.abs(x) > self.clip))

    def decode(self, total: Integers) -> tuple[Floats, int]:
        """Returns the weighted sum of the vectors and the sum of weights, of a sum of encoded
        vectors.
        """
        return total[:-1] * (self.clip * self.most / self.levels), int(total[-1])

    def possible(self, total: Integers, clients: int) -> bool:
        """Whether so many vectors, encoded as above, can have this sum."""
        weight = int(total[-1])
        if (self.most == 1 and weight != clients) or not 0 <= weight <= clients * self.most:
            return False
        entries = total[:-1]
        largest = max(-int(entries.min(initial=0)), int(entries.max(initial=0)))
        return largest * self.most <= self.levels * weight + clients * self.most


def lift(values: npt.NDArray[np.uint64], modulus: int) -> Integers:
    """Returns the integers nearest to 0 with these residues."""
    signed = values.astype(np.int64)
    if modulus == 1 << 64:
        return signed
    return np.where(values > np.uint64(modulus // 2), signed - modulus, signed)


def residues(values: Integers, modulus: int) -> npt.NDArray[np.uint64]:
    """Returns the residues of integers."""
    if modulus == 1 << 64:
        return values.astype(np.uint64)
    return np.mod(values, np.int64(modulus)).astype(np.uint64)


def pack(values: npt.NDArray[np.uint64], width: int) -> bytes:
    """Returns residues below 2^(8 width) as bytes, `width` each, little-endian."""
    wide = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return wide[:, :width].tobytes()


def unpack(data: bytes | memoryview, width: int) -> npt.NDArray[np.uint64]:
    narrow = np.frombuffer(data, np.uint8).reshape(-1, width)
    wide = np.zeros((len(narrow), 8), dtype=np.uint8)
    wide[:, :width] = narrow
    return wide.view("<u8").reshape(-1).astype(np.uint64, copy=False)

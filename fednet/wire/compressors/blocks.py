from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Values, scales

BLOCKS = (16, 65536)


class Blocks(Values):
    """Whole numbers from -s to s, s = 2**(bits-1) - 1, in blocks that have a scale each.

    With m the largest magnitude of all, and m_b that of a block, r_b is m_b/m, rounded up to
    float16; a value is the whole number nearest to s v / (m r_b), and is read as that times
    m r_b / s. So |Q(v) - v| <= m r_b / 2s, and never more than |v|.

    On the wire: float32 m, float16 r_b of each block, then the numbers + s. Scales relative to m
    keep float16 from overflowing, and from losing the bits of small updates.
    """

    bits: int

    def __init__(
        self,
        block: Annotated[int, "Values that share a scale, 16 to 65536. [values]"] = 64,
    ) -> None:
        if block != int(block) or not BLOCKS[0] <= block <= BLOCKS[1]:
            raise ConfigError(
                f"int{self.bits}({block}): expected a block of {BLOCKS[0]} to {BLOCKS[1]} values."
            )
        self.block = int(block)
        self.s = 2 ** (self.bits - 1) - 1

    def nbytes(self, n: int) -> int:
        return 4 + 2 * self._blocks(n) + -(-n * self.bits // 8)

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        n, count = x.size, self._blocks(x.size)
        rows = np.zeros((count, self.block), dtype=np.float32)
        rows.reshape(-1)[:n] = x
        largest = np.abs(rows).max(axis=1, initial=0.0)
        m = np.float32(largest.max(initial=0.0))
        if not np.isfinite(m):  # `decode` refuses such a scale
            rows[:], largest[:] = 0, 0
        share = _up(largest / m if np.isfinite(m) and m > 0 else largest)
        step = (m if np.isfinite(m) else np.float32(0)) * share.astype(np.float32)
        level = rows / np.where(step > 0, step, np.float32(1))[:, None] * np.float32(self.s)
        codes = np.clip(np.rint(level), -self.s, self.s).reshape(-1)[:n] + self.s
        head = np.array([m], dtype="<f4").tobytes() + share.astype("<f2").tobytes()
        return head + self._packed(codes.astype(np.uint8))

    def decode(self, data: memoryview, n: int) -> Floats:
        m, cut = scales(data[:4], f"int{self.bits}")[0], 4 + 2 * self._blocks(n)
        share = np.frombuffer(data[4:cut], dtype="<f2").astype(np.float32)
        if not bool(((share >= 0) & (share <= 1)).all()):
            raise RemoteProtocolError(f"int{self.bits}: a block's scale is not from 0 to 1.")
        codes = self._unpacked(data[cut:], n)
        if n and int(codes.max()) > 2 * self.s:
            raise RemoteProtocolError(f"int{self.bits}: a code is above {2 * self.s}.")
        levels = np.arange(-self.s, self.s + 1, dtype=np.float32) / np.float32(self.s)  # -1 .. 1
        return levels[codes] * np.repeat(m * share, self.block)[:n]

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)

    def _packed(self, codes: npt.NDArray[np.uint8]) -> bytes:
        if self.bits == 8:
            return codes.tobytes()
        two = np.zeros((-(-codes.size // 2), 2), dtype=np.uint8)
        two.reshape(-1)[: codes.size] = codes
        return (two[:, 0] | two[:, 1] << np.uint8(4)).tobytes()

    def _unpacked(self, data: memoryview, n: int) -> npt.NDArray[np.uint8]:
        packed = np.frombuffer(data, dtype=np.uint8)
        if self.bits == 8:
            return packed
        codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=1).reshape(-1)
        if bool(codes[n:].any()):
            raise RemoteProtocolError("int4: the bits after the last value are not 0.")
        return codes[:n]


@compressor("int8")
class Int8(Blocks):
    """8-bit whole numbers, rounded to the nearest, in blocks of 64 (`int8(256)`: of 256) with a
    float16 scale each: 8.25 bits a value.
    """

    paper = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861"
    bits = 8


@compressor("int4")
class Int4(Blocks):
    """4-bit whole numbers, rounded to the nearest, in blocks of 64 (`int4(32)`: of 32) with a
    float16 scale each: 4.25 bits a value. `ef` before it sends later what rounding loses.
    """

    paper = "Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861"
    bits = 4


def _up(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """To float16, never to less than it was: no value then lies beyond its block's scale."""
    near = x.astype(np.float16)
    return np.where(near.astype(np.float32) < x, np.nextafter(near, np.float16(np.inf)), near)

"""Compressors that write each value in fewer bits: half precision, its sign, or a whole number."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Values


class Half(Values):
    """A floating-point number of 2 bytes a value. Finite values beyond its largest saturate."""

    omega = 0.0
    dtype: torch.dtype

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        values = torch.from_numpy(x)
        most = torch.finfo(self.dtype).max
        bounded = torch.where(values.isinf(), values, values.clamp(-most, most))
        return bounded.to(self.dtype).view(torch.int16).numpy().astype("<i2").tobytes()

    def decode(self, data: memoryview, n: int) -> Floats:
        read = torch.from_numpy(np.frombuffer(data, dtype="<i2").astype(np.int16))
        found: Floats = read.view(self.dtype).float().numpy()
        return found


@compressor("fp16")
class Fp16(Half):
    """Half precision: 2 bytes a value, 11 significant bits. Finite values beyond 65504 saturate."""

    paper = "IEEE 754-2008 binary16"
    dtype = torch.float16


@compressor("bf16")
class Bf16(Half):
    """bfloat16: 2 bytes a value, float32's range with 8 significant bits, rounded to the
    nearest.
    """

    paper = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322"
    dtype = torch.bfloat16


@compressor("sign")
class Sign(Values):
    """One bit a value: its sign, times the mean magnitude: C(v) = ||v||_1/d * sign(v) (Section 4).
    0 counts as +.

    On the wire: float32 scale, then a bit a value, 1 for negative, the first value in the lowest.
    """

    paper = "Karimireddy et al. 2019, Error Feedback Fixes SignSGD, arXiv:1901.09847"
    biased = True

    def nbytes(self, n: int) -> int:
        return 4 + -(-n // 8)

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        scale = np.abs(x).mean(dtype=np.float64) if x.size else 0.0
        return (
            np.array([scale], dtype="<f4").tobytes()
            + np.packbits(x < 0, bitorder="little").tobytes()
        )

    def decode(self, data: memoryview, n: int) -> Floats:
        scale = np.frombuffer(data[:4], dtype="<f4")[0]
        bits = np.unpackbits(np.frombuffer(data[4:], dtype=np.uint8), bitorder="little")
        return np.where(bits[:n] == 1, -scale, scale).astype(np.float32)


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
        n = x.size
        count = self._blocks(x.size)
        rows = np.zeros((count, self.block), dtype=np.float32)
        rows.reshape(-1)[:n] = x
        largest = np.abs(rows).max(axis=1, initial=0.0)
        m = np.float32(largest.max(initial=0.0))
        if not np.isfinite(m):  # then no value decoded with it is finite
            rows[:] = 0
            largest[:] = 0
        ratio = largest / m if np.isfinite(m) and m > 0 else largest
        share = ratio.astype(np.float16)
        # Rounded up: no value then lies beyond its block's scale.
        above = np.nextafter(share, np.float16(np.inf))
        share = np.where(share.astype(np.float32) < ratio, above, share)
        step = (m if np.isfinite(m) else np.float32(0)) * share.astype(np.float32)
        level = rows / np.where(step > 0, step, np.float32(1))[:, None] * np.float32(self.s)
        codes = np.clip(np.rint(level), -self.s, self.s).reshape(-1)[:n] + self.s
        head = np.array([m], dtype="<f4").tobytes() + share.astype("<f2").tobytes()
        return head + pack_integers(codes, self.bits)

    def decode(self, data: memoryview, n: int) -> Floats:
        cut = 4 + 2 * self._blocks(n)
        m = np.frombuffer(data[:4], dtype="<f4")[0]
        share = np.frombuffer(data[4:cut], dtype="<f2").astype(np.float32)
        levels = unpack_integers(data[cut:], self.bits, n, f"int{self.bits}")
        return levels * np.repeat(m * share, self.block)[:n]

    def _blocks(self, n: int) -> int:
        return -(-n // self.block)


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


BUCKET = 512  # values that share a scale, as in the paper's experiments
BITS = (2, 4, 8, 16)


@compressor("qsgd")
class Qsgd(Values):
    """Stochastic quantization to `bits` bits a value: unbiased, its error below one level.

    s = 2**(bits-1) - 1 levels either side of 0. In each bucket of 512 values, with m its largest
    magnitude, Q(v) = m * sgn(v) * l/s, where l is s*abs(v)/m rounded down or up at random such that
    E[Q(v)] = v (Section 3.1, with the max-norm in the place of the 2-norm, as the paper's
    experiments have it). So abs(Q(v) - v) < m/s, and Var Q(v) <= (m/2s)**2.

    On the wire: float32 m of each bucket, then l*sgn(v) + s in `bits` bits, the first value in the
    lowest.
    """

    paper = (
        "Alistarh et al. 2017, QSGD, arXiv:1610.02132; "
        "as in FedPAQ, Reisizadeh et al. 2020, arXiv:1909.13014"
    )

    def __init__(self, bits: Annotated[int, "Bits per value: 2, 4, 8 or 16. [bits]"]) -> None:
        if bits not in BITS:
            raise ConfigError(f"qsgd({bits}): expected 2, 4, 8 or 16 bits a value.")
        self.bits = int(bits)
        self.s = 2 ** (self.bits - 1) - 1
        # Lemma 3.1, with at most m/2s for a value's standard deviation.
        self.omega = min(BUCKET / (2 * self.s) ** 2, BUCKET**0.5 / self.s)
        self.contracts = self.omega < 1

    def nbytes(self, n: int) -> int:
        return 4 * _buckets(n) + -(-n * self.bits // 8)

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        n = x.size
        rows = np.zeros((_buckets(n), BUCKET), dtype=np.float32)
        rows.reshape(-1)[:n] = x
        # not finite if a value is not: then no value decoded with it is finite
        m = np.abs(rows).max(axis=1)
        rows[~np.isfinite(m)] = 0
        level = (
            np.abs(rows)
            / np.where(np.isfinite(m) & (m > 0), m, np.float32(1))[:, None]
            * np.float32(self.s)
        )
        low = np.floor(level)
        low += rng.random(level.shape, dtype=np.float32) < level - low
        codes = (np.copysign(np.minimum(low, self.s), rows) + self.s).reshape(-1)[:n]
        return m.astype("<f4").tobytes() + pack_integers(codes, self.bits)

    def decode(self, data: memoryview, n: int) -> Floats:
        head = 4 * _buckets(n)
        m = np.frombuffer(data[:head], dtype="<f4").astype(np.float32)
        levels = unpack_integers(data[head:], self.bits, n, f"qsgd({self.bits})")
        return levels * np.repeat(m, BUCKET)[:n]


def _buckets(n: int) -> int:
    return -(-n // BUCKET)


# -- whole numbers of few bits ---------------------------------------------------------------------
def pack_integers(codes: npt.NDArray[np.floating], bits: int) -> bytes:
    """Whole numbers in 2, 4, 8 or 16 bits each, the first in the lowest bits."""
    if bits == 16:
        return codes.astype("<u2").tobytes()
    each = 8 // bits
    padded = np.zeros((-(-codes.size // each), each), dtype=np.uint8)
    padded.reshape(-1)[: codes.size] = codes.astype(np.uint8)
    out = np.zeros(len(padded), dtype=np.uint8)
    for k in range(each):
        out |= padded[:, k] << np.uint8(k * bits)
    return out.tobytes()


def unpack_integers(data: memoryview, bits: int, n: int, name: str) -> Floats:
    """The numbers that `pack_integers` wrote, which are from 0 to 2s, as shares of s from -1 to 1.
    name: of the compressor, for an error.
    """
    s = 2 ** (bits - 1) - 1
    codes: npt.NDArray[np.uint8 | np.uint16]
    if bits == 16:
        codes = np.frombuffer(data, dtype="<u2")
    else:
        bytes_ = np.frombuffer(data, dtype=np.uint8)
        each = 8 // bits
        mask = np.uint8(2**bits - 1)
        columns = [(bytes_ >> np.uint8(k * bits)) & mask for k in range(each)]
        codes = np.stack(columns, axis=1).reshape(-1)[:n]
    if n and int(codes.max()) > 2 * s:
        raise RemoteProtocolError(f"{name}: a code is above {2 * s}.")
    shares = np.arange(-s, s + 1, dtype=np.float32) / np.float32(s)
    return shares[codes]

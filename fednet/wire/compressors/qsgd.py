from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

from fednet.errors import ConfigError, RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Values, scales

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
        # NaN or infinite where a value is: `decode` refuses such a scale
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
        return m.astype("<f4").tobytes() + _pack(codes.astype(np.uint16), self.bits)

    def decode(self, data: memoryview, n: int) -> Floats:
        head = 4 * _buckets(n)
        m = scales(data[:head], "qsgd")
        codes = _unpack(data[head:], self.bits, n)
        if n and int(codes.max()) > 2 * self.s:
            raise RemoteProtocolError(f"qsgd({self.bits}): a code is above {2 * self.s}.")
        levels = np.arange(-self.s, self.s + 1, dtype=np.float32) / np.float32(self.s)  # -1 .. 1
        return levels[codes] * np.repeat(m, BUCKET)[:n]


def _buckets(n: int) -> int:
    return -(-n // BUCKET)


def _pack(codes: npt.NDArray[np.uint16], bits: int) -> bytes:
    if bits == 16:
        return codes.astype("<u2").tobytes()
    each = 8 // bits
    padded = np.zeros((-(-codes.size // each), each), dtype=np.uint8)
    padded.reshape(-1)[: codes.size] = codes
    packed = np.zeros(len(padded), dtype=np.uint8)
    for k in range(each):
        packed |= padded[:, k] << np.uint8(k * bits)
    return packed.tobytes()


def _unpack(data: memoryview, bits: int, n: int) -> npt.NDArray[np.uint8 | np.uint16]:
    if bits == 16:
        return np.frombuffer(data, dtype="<u2")
    packed = np.frombuffer(data, dtype=np.uint8)
    each, mask = 8 // bits, np.uint8(2**bits - 1)
    codes = np.stack([(packed >> np.uint8(k * bits)) & mask for k in range(each)], axis=1).reshape(
        -1
    )
    if bool(codes[n:].any()):
        raise RemoteProtocolError(f"qsgd({bits}): the bits after the last value are not 0.")
    return codes[:n]

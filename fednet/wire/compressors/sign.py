from __future__ import annotations

import numpy as np

from fednet.errors import RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Values, scales


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
        scale = scales(data[:4], "sign")[0]
        bits = np.unpackbits(np.frombuffer(data[4:], dtype=np.uint8), bitorder="little")
        if bool(bits[n:].any()):
            raise RemoteProtocolError("sign: the bits after the last value are not 0.")
        return np.where(bits[:n] == 1, -scale, scale).astype(np.float32)

"""Compressors that write each value in fewer bits: half precision, or its sign."""

from __future__ import annotations

import numpy as np
import torch

from fednet.errors import RemoteProtocolError
from fednet.registry import compressor
from fednet.wire.compressors.base import Floats, Values, scales

FP16_MAX = float(np.finfo(np.float16).max)  # 65504


@compressor("fp16")
class Fp16(Values):
    """Half precision: 2 bytes a value, 11 significant bits. Finite values beyond 65504 saturate."""

    paper = "IEEE 754-2008 binary16"

    omega = 0.0

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        bounded = np.where(np.isinf(x), x, np.clip(x, -FP16_MAX, FP16_MAX))
        return bounded.astype("<f2").tobytes()

    def decode(self, data: memoryview, n: int) -> Floats:
        return np.frombuffer(data, dtype="<f2").astype(np.float32)


BF16_MAX = torch.finfo(torch.bfloat16).max  # 3.39e38


@compressor("bf16")
class Bf16(Values):
    """bfloat16: 2 bytes a value, float32's range with 8 significant bits, rounded to the
    nearest.
    """

    paper = "Kalamkar et al. 2019, A Study of BFLOAT16 for Deep Learning Training, arXiv:1905.12322"

    omega = 0.0

    def nbytes(self, n: int) -> int:
        return 2 * n

    def encode(self, x: Floats, rng: np.random.Generator) -> bytes:
        # The few float32 above bfloat16's largest would round to infinity.
        bounded = np.where(np.isinf(x), x, np.clip(x, -BF16_MAX, BF16_MAX)).astype(np.float32)
        return (
            torch.from_numpy(bounded).bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()
        )

    def decode(self, data: memoryview, n: int) -> Floats:
        # A bfloat16 is the upper half of a float32.
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)


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

"""What a chain of compressors costs: seconds to encode and to decode one model's update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fednet.wire import compress
from fednet.wire.compressors.base import Memory

REPEATS = 5


def shapes(model: Path) -> tuple[tuple[int, ...], ...]:
    """The shapes of the float32 tensors in a model.safetensors, in the order of their names."""
    from safetensors import safe_open

    with safe_open(model, "pt") as file:
        found = [file.get_slice(name) for name in sorted(file.keys())]
        return tuple(tuple(s.get_shape()) for s in found if s.get_dtype() == "F32")


def seconds(items: Sequence[str], of: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    """(to encode, to decode) normal draws for tensors of these shapes, the median of five messages
    one after the other: the first has nothing to remember yet, and is left out.
    """
    chain, known = compress.parse(items).fitted(of), dict[str, torch.Tensor]()
    rng, n = np.random.default_rng(0), sum(int(np.prod(shape)) for shape in of)
    other, took = dict[str, torch.Tensor](), list[tuple[float, float]]()
    for _ in range(1 + REPEATS):
        x = torch.from_numpy(rng.standard_normal(n, dtype=np.float32) * np.float32(1e-3))
        began = time.perf_counter()
        data, _ = chain.send(x, rng, Memory(known, known, "x"))
        sent = time.perf_counter()
        chain.receive(memoryview(data), n, Memory(other, other, "x"))
        took.append((sent - began, time.perf_counter() - sent))
    # A sender decodes too: it must know what the receiver has.
    encode, decode = (statistics.median(t[i] for t in took[1:]) for i in (0, 1))
    return encode, decode

"""Samples made on the spot, of any shape, that a model can learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fednet.data.base import Data
from fednet.data.cache import once
from fednet.errors import ConfigError
from fednet.registry import dataset
from fednet.seeds import rng

COARSE = 4  # an image class is a pattern of COARSE x COARSE patches, so that convolutions can see it too
SHARED_FROM = 1 << 26  # values: a larger set is kept in the user's cache, and mapped by all who use it
BLOCK = 1000  # samples made at a time, to bound memory


@dataset("synthetic")
def synthetic(seed: int, *, samples: int = 10000, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10,
              noise: float = 1.0) -> Data:
    """Class means plus Gaussian noise; samples / 5 more for testing. Options: samples, shape, classes, noise.

    Images (three sides) are uint8 and hold 128 + 40 (mean + noise * N(0, 1)) clipped to 0..255; any other shape is
    float32 and holds mean + noise * N(0, 1). Labels are 0, 1, ..., C-1, 0, ... shuffled, so that classes are even.
    """
    if samples < 1 or classes < 2 or not shape or min(shape) < 1 or noise < 0:
        raise ConfigError(f"data (dataset 'synthetic'): expected samples >= 1, classes >= 2, positive sides and "
                          f"noise >= 0, got samples {samples}, classes {classes}, shape {list(shape)}, noise {noise}.")
    means = _means(rng(seed, "synthetic/means"), classes, shape)
    made = []
    for purpose, n in (("synthetic/train", samples), ("synthetic/test", max(classes, samples // 5))):
        draw = rng(seed, purpose)
        y = draw.permutation(np.arange(n) % classes)
        made.append((_kept((seed, purpose, n, shape, classes, noise), lambda: _samples(draw, means, y, noise, image=len(shape) == 3)), y))  # noqa: B023
    half = (0.5,) * shape[0] if len(shape) == 3 else None
    return Data(train=made[0], test=made[1], classes=classes, mean=half, std=half and (0.25,) * shape[0])


def _kept(facts: tuple[object, ...], make: Callable[[], np.ndarray]) -> Any:
    """What is large is made once a machine, and its memory shared by all processes."""
    _, _, n, shape, *_ = facts
    return once(["synthetic 1", *facts], lambda: torch.from_numpy(make())) if n * math.prod(shape) >= SHARED_FROM else make()  # type: ignore[operator,call-overload]


def _means(draw: np.random.Generator, classes: int, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 3:
        return draw.standard_normal((classes, *shape), dtype=np.float32)
    c, h, w = shape
    coarse = draw.standard_normal((classes, c, COARSE, COARSE), dtype=np.float32)
    return coarse[:, :, np.arange(h) * COARSE // h][:, :, :, np.arange(w) * COARSE // w]


def _samples(draw: np.random.Generator, means: np.ndarray, y: np.ndarray, noise: float, image: bool) -> np.ndarray:
    out = np.empty((len(y), *means.shape[1:]), dtype=np.uint8 if image else np.float32)
    for start in range(0, len(y), BLOCK):
        of = means[y[start : start + BLOCK]]
        x = of + np.float32(noise) * draw.standard_normal(of.shape, dtype=np.float32)
        out[start : start + BLOCK] = np.clip(np.rint(128 + 40 * x), 0, 255) if image else x
    return out

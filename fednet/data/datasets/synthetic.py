"""Samples made on the spot, of any shape, that a model can learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated

import numpy as np
import torch

from fednet import capacity, places
from fednet.data import cache
from fednet.data.base import Data
from fednet.errors import ConfigError
from fednet.registry import dataset
from fednet.seeds import rng

# An image class is a pattern of COARSE x COARSE patches, so that convolutions can see it too.
COARSE = 4
# Values: a larger set is kept in the user's cache, and mapped by all who use it.
SHARED_FROM = 1 << 26
BLOCK = 1000  # samples made at a time, to bound memory


@dataset("synthetic")
def synthetic(
    seed: int,
    *,
    samples: Annotated[
        int, "Training samples; a fifth as many more are for testing. [samples]"
    ] = 10000,
    shape: Annotated[
        tuple[int, ...], "Shape of one input; with three sides it is a uint8 image, else float32."
    ] = (3, 32, 32),
    classes: Annotated[int, "Number of classes, at least 2. [classes]"] = 10,
    noise: Annotated[
        float, "Standard deviation of the noise around a class's mean, at least 0."
    ] = 1.0,
) -> Data:
    """Class means plus Gaussian noise.

    Images (three sides) are uint8 and hold 128 + 40 (mean + noise * N(0, 1)) clipped to 0..255; any
    other shape is float32 and holds mean + noise * N(0, 1). Labels are 0, 1, ..., C-1, 0, ...
    shuffled, so that classes are even.
    """
    if samples < 1 or classes < 2 or not shape or min(shape) < 1 or noise < 0:
        raise ConfigError(
            f"data (dataset 'synthetic'): expected samples >= 1, classes >= 2, positive sides and "
            f"noise >= 0, got samples {samples}, classes {classes}, shape {list(shape)}, noise "
            f"{noise}."
        )
    _fits(samples, shape, classes)
    means = _means(rng(seed, "synthetic/means"), classes, shape)
    made = []
    for purpose, n in (
        ("synthetic/train", samples),
        ("synthetic/test", max(classes, samples // 5)),
    ):
        facts = "synthetic 1", seed, purpose, n, shape, classes, noise
        made.append(
            (
                _kept(
                    facts,
                    (n, *shape),
                    lambda: _samples(means, *_labels(seed, purpose, n, classes), noise),  # noqa: B023
                ),
                _labels(seed, purpose, n, classes)[0],
            )
        )
    half = (0.5,) * shape[0] if len(shape) == 3 else None
    return Data(
        train=made[0], test=made[1], classes=classes, mean=half, std=half and (0.25,) * shape[0]
    )


def _fits(samples: int, shape: tuple[int, ...], classes: int) -> None:
    """Raises ConfigError where the machine cannot hold what `synthetic` would make."""
    what = f"data (dataset 'synthetic'): samples {samples}, shape {list(shape)}, classes {classes}"
    one, n = math.prod(shape), samples + max(classes, samples // 5)
    pixels = n * one * (1 if len(shape) == 3 else 4)
    capacity.check_memory(
        8 * (classes * one + 3 * n), what
    )  # means, and labels while they are shuffled
    if samples * one >= SHARED_FROM:
        capacity.check_disk(pixels, places.cache(), what)
    else:
        capacity.check_memory(pixels, what)


def _kept(
    facts: tuple[object, ...], size: tuple[int, ...], blocks: Callable[[], Iterator[np.ndarray]]
) -> torch.Tensor | np.ndarray:
    """A large set is made once per machine, and all processes share its memory."""
    dtype = "uint8" if len(size) == 4 else "float32"
    if math.prod(size) >= SHARED_FROM:
        return cache.once(facts, size, dtype, blocks)
    return cache.gathered(size, dtype, blocks())


def _means(draw: np.random.Generator, classes: int, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) != 3:
        return draw.standard_normal((classes, *shape), dtype=np.float32)
    c, h, w = shape
    coarse = draw.standard_normal((classes, c, COARSE, COARSE), dtype=np.float32)
    return coarse[:, :, np.arange(h) * COARSE // h][:, :, :, np.arange(w) * COARSE // w]


def _labels(
    seed: int, purpose: str, n: int, classes: int
) -> tuple[np.ndarray, np.random.Generator]:
    """The labels, and the generator whose next draws are the noise."""
    draw = rng(seed, purpose)
    return draw.permutation(np.arange(n) % classes), draw


def _samples(
    means: np.ndarray, y: np.ndarray, draw: np.random.Generator, noise: float
) -> Iterator[np.ndarray]:
    for start in range(0, len(y), BLOCK):
        of = means[y[start : start + BLOCK]]
        x = of + np.float32(noise) * draw.standard_normal(of.shape, dtype=np.float32)
        yield np.clip(np.rint(128 + 40 * x), 0, 255).astype(np.uint8) if of.ndim == 4 else x

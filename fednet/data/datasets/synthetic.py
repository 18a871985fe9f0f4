"""Synthetic samples of any shape that a model can learn."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np

from fednet import capacity
from fednet.data.raw import Raw
from fednet.errors import ConfigError
from fednet.registry import dataset
from fednet.seeds import rng

# An image class is a pattern of COARSE x COARSE patches, so that convolutions can see it too.
COARSE = 4
BLOCK = 16  # samples made at a time: few enough that they stay in the processor's cache


@dataset("synthetic")
def synthetic(
    seed: int,
    with_test: bool = True,
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
) -> Raw:
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
    n_test = max(classes, samples // 5) if with_test else 0
    nbytes = (samples + n_test) * math.prod(shape) * (1 if len(shape) == 3 else 4)
    nbytes += 8 * (classes * math.prod(shape) + 3 * (samples + n_test))  # means, labels
    what = f"data (dataset 'synthetic'): samples {samples}, shape {list(shape)}, classes {classes}"
    capacity.check_memory(nbytes, what)
    draw = rng(seed, "synthetic/means")
    if len(shape) == 3:
        c, h, w = shape
        coarse = draw.standard_normal((classes, c, COARSE, COARSE), dtype=np.float32)
        means = coarse[:, :, np.arange(h) * COARSE // h][:, :, :, np.arange(w) * COARSE // w]
    else:
        means = draw.standard_normal((classes, *shape), dtype=np.float32)
    test = None
    if with_test:
        test = _samples(rng(seed, "synthetic/test"), n_test, means, noise)
    half = (0.5,) * shape[0] if len(shape) == 3 else None
    return Raw(
        train=_samples(rng(seed, "synthetic/train"), samples, means, noise),
        test=test,
        classes=classes,
        mean=half,
        std=half and (0.25,) * shape[0],
    )


def _samples(
    draw: np.random.Generator, n: int, means: np.ndarray, noise: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draws n samples (x, y). means: of each class, (C, ...)."""
    image = means.ndim == 4
    y = draw.permutation(np.arange(n) % len(means))
    x = np.empty((n, *means.shape[1:]), np.uint8 if image else np.float32)
    block = np.empty((BLOCK, *means.shape[1:]), np.float32)
    chosen = np.empty_like(block)  # a new one for each block took a tenth of the time
    for start in range(0, n, BLOCK):
        labels = y[start : start + BLOCK]
        values = block[: len(labels)]
        draw.standard_normal(out=values, dtype=np.float32)
        values *= np.float32(noise)
        values += np.take(means, labels, axis=0, out=chosen[: len(labels)], mode="clip")
        if image:
            values *= 40
            values += 128
            np.rint(values, out=values)
            np.clip(values, 0, 255, out=values)
        x[start : start + BLOCK] = values
    return x, y

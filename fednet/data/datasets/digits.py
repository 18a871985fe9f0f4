"""Real handwritten digits that need no download."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np

from fednet.data.raw import Raw
from fednet.registry import dataset
from fednet.seeds import rng

SAMPLES = 1797
SIDE = 28
TEST_SHARE = 5  # one in five of each class


@dataset("digits")
def digits() -> Raw:
    """1797 handwritten digits of the UCI repository, scaled to uint8 1x28x28, one in five for
    testing; no download.
    """
    # DIGITS.md has the form of the file, and its terms.
    packed = (Path(__file__).parent / "digits.xz").read_bytes()
    values = np.frombuffer(lzma.decompress(packed), dtype=np.uint8).astype(np.int64)
    y = values[:SAMPLES]
    x = bilinear(values[SAMPLES:].reshape(SAMPLES, 8, 8))
    draw = rng(0, "digits")  # the split is part of the dataset: the same for every run's seed
    test = np.zeros(len(y), dtype=bool)
    for c in range(10):
        of_class = draw.permutation(np.flatnonzero(y == c))
        test[of_class[: len(of_class) // TEST_SHARE]] = True
    return Raw(
        train=(x[~test], y[~test]),
        test=(x[test], y[test]),
        classes=10,
        mean=(0.3046,),
        std=(0.3241,),
        names=tuple("0123456789"),
    )


def bilinear(small: np.ndarray) -> np.ndarray:
    """Scales (n, 8, 8) values 0..16 to (n, 1, 28, 28) uint8, bilinear with half-pixel centres,
    rounded half up.

    In whole numbers, so that every machine makes the same bytes: the centre of pixel i is at
    (i + 1/2) 8/28 - 1/2 = (4i - 5)/14 in the source, so both weights are whole 14ths.
    """
    at = np.clip(4 * np.arange(SIDE) - 5, 0, 14 * 7)
    low = at // 14
    right = at % 14
    high = np.minimum(low + 1, 7)
    rows = small[:, low, :] * (14 - right)[None, :, None] + small[:, high, :] * right[None, :, None]
    both = rows[:, :, low] * (14 - right) + rows[:, :, high] * right  # 196 times the value
    whole = 196 * 16
    return ((both * 255 * 2 + whole) // (2 * whole)).astype(np.uint8)[:, None]

"""What a dataset's file needs if it is to import no torch, so that its samples can be made beside
the import of torch (see `ahead`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fednet.errors import DataError

# The target that stands for no label, as in torch.nn.CrossEntropyLoss.
IGNORED = -100


class Raw:
    """A dataset as NumPy arrays, before it is checked: the fields of a `Data`, by name."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


def absent(what: str, path: str, looked: Path) -> DataError:
    """The error for a data.path at which there is nothing. looked: where else it was looked for."""
    also = "" if looked == Path(path) else f", and none {looked}"
    return DataError(f"data.path: there is no {what} {path}{also}.")


def channel_statistics(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns (mean, std) by channel of uint8 images (n, c, h, w), in units of 0..1. The sums are
    of whole numbers, so exact.
    """
    channels = x.shape[1]
    total = np.zeros(channels, np.int64)
    square = np.zeros(channels, np.int64)
    for start in range(0, len(x), 1000):  # bounds the memory of the wide copy
        wide = x[start : start + 1000].astype(np.int64)
        total += wide.sum(axis=(0, 2, 3))
        square += (wide * wide).sum(axis=(0, 2, 3))
    n = max(1, x.size // max(1, channels))
    mean = [t / n for t in total.tolist()]
    std = [max(0.0, s / n - m * m) ** 0.5 or 255.0 for s, m in zip(square.tolist(), mean)]
    return tuple(m / 255 for m in mean), tuple(s / 255 for s in std)

"""A dataset as torch or Hugging Face has them, one sample at a time, read into arrays once."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from fednet import capacity
from fednet.data import cache
from fednet.data.columns import Columns, is_split
from fednet.errors import DataError

BLOCK = 2**26  # bytes that are widened at a time
SHARE = 0.5  # of the memory that is free: what takes more is read into a file


def is_dataset(found: object) -> TypeGuard[Dataset]:
    """Whether it has a length and samples by number, as `torch.utils.data.Dataset` has."""
    return hasattr(found, "__getitem__") and hasattr(found, "__len__")


class Dataset(Protocol):
    """What `is_dataset` finds."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> object: ...


def read(dataset: Dataset, which: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of all its samples, each a pair of numbers, arrays or images (as (c, h, w)) of one
    shape, in the widths that `Data` keeps. What is larger than half of the memory that is free lies
    in a file of the user's temporary folder, of which only what is being read is in memory; it goes
    with the process. Raises DataError.
    """
    if is_split(dataset):
        dataset = Columns(dataset)
    if not len(dataset):
        raise DataError(f"{which}: the dataset has no samples.")
    x0, y0 = _pair(dataset, 0, which)
    # Of what is true or false, `Data` knows whether it stands for classes or for values.
    kinds = _kept(x0.dtype), y0.dtype if y0.dtype == bool else _kept(y0.dtype)
    x, y = (_room((len(dataset), *one.shape), kind) for one, kind in zip((x0, y0), kinds))
    for i in range(len(dataset)):
        a, b = (x0, y0) if i == 0 else _pair(dataset, i, which)
        if (a.shape, b.shape) != (x0.shape, y0.shape):
            raise DataError(
                f"{which}: sample {i} has the shapes {a.shape} and {b.shape}, sample 0 has "
                f"{x0.shape} and {y0.shape}; give each the same, such as by a transform."
            )
        x[i], y[i] = a, b
    return x, y


def held(x: np.ndarray) -> torch.Tensor:
    """An array in the width that `Data` keeps, in memory that torch may write to: where it lies, if
    it can stay there, mapped from its file if it was. What has to be made anew has room as in
    `read`.
    """
    dtype = _kept(x.dtype)
    if x.dtype == dtype and x.flags.c_contiguous:
        if x.flags.writeable:
            return torch.from_numpy(x)
        if (again := cache.mapped_again(x)) is not None:
            return again
    made = _room(x.shape, dtype)
    step = max(1, BLOCK // max(1, made[:1].nbytes))
    with np.errstate(over="ignore"):  # a value beyond float32 is infinite, and refused as that
        for start in range(0, len(x), step):
            made[start : start + step] = x[start : start + step]
    return torch.from_numpy(made)


def _pair(dataset: Dataset, i: int, which: str) -> tuple[np.ndarray, np.ndarray]:
    sample = dataset[i]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise DataError(
            f"{which}: sample {i} of the dataset is a {type(sample).__name__}; expected a pair "
            f"(x, y)."
        )
    x, y = (_array(part) for part in sample)
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
        raise DataError(
            f"{which}: sample {i} of the dataset holds {x.dtype} and {y.dtype}; expected numbers, "
            f"such as by torchvision.transforms.ToTensor."
        )
    return x, y


def _array(part: Any) -> np.ndarray:  # what a dataset gives for a sample
    if not hasattr(part, "getbands"):
        return np.asarray(part)
    # A palette's numbers are no brightness: what they stand for is taken.
    made = np.asarray(part.convert("RGB") if part.mode == "P" else part)
    return made[None] if made.ndim == 2 else made.transpose(2, 0, 1)  # an image of Pillow's


def _kept(dtype: np.dtype) -> np.dtype:
    """What `Data` keeps of that type: wider, it would be made anew there, in memory."""
    if dtype == np.uint8:
        return dtype
    return np.dtype(np.int64 if dtype.kind in "iu" else np.float32)


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes, folder = math.prod(shape) * dtype.itemsize, Path(tempfile.gettempdir())
    if nbytes <= SHARE * capacity.room():
        return np.empty(shape, dtype)
    capacity.ask_disk(nbytes, folder, "the dataset")
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape)  # the map keeps the file

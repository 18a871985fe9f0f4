"""Reads datasets of torch and Hugging Face, which return one sample at a time, into arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import torch

from fednet import capacity
from fednet.data import cache
from fednet.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    import datasets
    from PIL.Image import Image

Collate = Callable[[list[Any]], Any]  # as the collate_fn of a torch.utils.data.DataLoader
LABELS = ("labels", "label")  # names of the targets in what a Collate returns

TWICE = 8  # samples that are read twice, to detect random transforms


class Dataset(Protocol):
    """The interface of `torch.utils.data.Dataset`: a length, and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> object: ...


def is_dataset(found: object) -> TypeGuard[Dataset]:
    """Whether it has a length and samples by number."""
    return hasattr(found, "__getitem__") and hasattr(found, "__len__")


def read(dataset: Dataset, which: str) -> tuple[np.ndarray, np.ndarray, bool]:
    """Reads all samples of a dataset of pairs. Returns (x, y, random): whether a second reading of
    a sample gives another one.

    A sample is a pair of numbers, arrays or images (as (c, h, w)), all of one shape; y may be text.
    The arrays have the types that `Data` keeps. Raises DataError, or ConfigError if memory cannot
    hold them.
    """
    if is_split(dataset):
        dataset = Columns(dataset)
    if not len(dataset):
        raise DataError(f"{which}: the dataset has no samples.")
    x0, y0 = _pair(dataset, 0, which)
    x_shape, y_shape = (len(dataset), *x0.shape), (len(dataset), *y0.shape)
    _check_room(x_shape, _kept(x0.dtype))
    x = np.empty(x_shape, _kept(x0.dtype))
    y = np.empty(y_shape, _kept_of_labels(y0.dtype))
    random = False
    for i in range(len(dataset)):
        a, b = _pair(dataset, i, which)
        if (a.shape, b.shape) != (x0.shape, y0.shape):
            raise DataError(
                f"{which}: sample {i} has the shapes {a.shape} and {b.shape}, sample 0 has "
                f"{x0.shape} and {y0.shape}; give each the same, such as by a transform, or give "
                f"Data a collate function that pads them."
            )
        if (_kept(a.dtype), _kept_of_labels(b.dtype)) != (x.dtype, y.dtype):
            raise DataError(
                f"{which}: sample {i} holds {a.dtype} and {b.dtype}, sample 0 holds {x0.dtype} and "
                f"{y0.dtype}; give all samples the same type."
            )
        x[i], y[i] = a, b
        if i < TWICE and not random:
            random = not all(map(_same, (a, b), _pair(dataset, i, which)))
    return x, y.astype(str) if y.dtype.kind == "O" else y, random


def collated(
    given: Mapping[str, Any], collate: Collate
) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Reads all samples of the datasets by one call of collate. Returns (x, y) of each, and the
    names of those that are drawn at random: whose first samples are other ones a second time.
    """
    samples = list[Any]()
    ends = dict[str, int]()
    random = list[str]()
    for which, dataset in given.items():
        if isinstance(dataset, tuple) or not is_dataset(dataset):
            raise DataError(
                f"{which}: collate takes a list of samples or a dataset of them, got "
                f"{type(dataset).__name__}."
            )
        first, again = (
            _parted(collate([dataset[i] for i in range(min(TWICE, len(dataset)))]))
            for _ in range(2)
        )
        if not all(map(_equal, first, again)):
            random.append(which)
        samples += [dataset[i] for i in range(len(dataset))]
        ends[which] = len(samples)
    x, y = _parted(collate(samples))
    if len(y) != len(samples):
        raise DataError(f"collate returned {len(y)} targets for {len(samples)} samples.")
    start = 0
    read = {}
    for which, end in ends.items():
        part = slice(start, end)
        cut = {name: v[part] for name, v in x.items()} if isinstance(x, dict) else x[part]
        read[which] = cut, y[part]
        start = end
    return read, random


def _parted(made: Any) -> tuple[Any, Any]:
    """Returns (x, y) of what a Collate returned."""
    if isinstance(made, Mapping):
        for name in LABELS:
            if name in made and len(made) > 1:
                return {k: v for k, v in made.items() if k != name}, made[name]
        raise DataError(
            f"collate returned a dict of {', '.join(map(str, made))}; expected inputs, and the "
            f"targets as {LABELS[0]!r}."
        )
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise DataError(
            f"collate returned a {type(made).__name__}; expected (x, y), or a dict with "
            f"{LABELS[0]!r}."
        )
    return dict(made[0]) if isinstance(made[0], Mapping) else made[0], made[1]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_equal(a[name], b[name]) for name in a)
    return _same(np.asarray(a), np.asarray(b))


def held(x: np.ndarray) -> torch.Tensor:
    """Returns an array as a tensor of a type that `Data` keeps, in memory that torch may write to.
    It is copied only if necessary; a mapped file stays mapped.
    """
    dtype = _kept(x.dtype)
    if x.dtype == dtype and x.flags.c_contiguous:
        if x.flags.writeable:
            return torch.from_numpy(x)
        if (again := cache.mapped_again(x)) is not None:
            return again
    _check_room(x.shape, dtype)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are refused
        return torch.from_numpy(x.astype(dtype, order="C"))


def eight_bits(image: Image) -> Image:
    """Returns a Pillow image with at most 8 bits a channel. 16 bits are scaled, since Pillow would
    clip them at 255. Raises DataError for 32 bits, whose range is unknown.
    """
    if image.mode in ("I", "F"):
        raise DataError(
            f"mode {image.mode}: values of 32 bits, of unknown range; save images of 8 or 16 bits "
            f"a channel, or give the values as they are with dataset: arrays"
        )
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    wide = np.asarray(image).astype(np.int64)
    return Image.fromarray(((wide + 128) // 257).astype(np.uint8))  # round(255 v / 65535)


def _pair(dataset: Dataset, i: int, which: str) -> tuple[np.ndarray, np.ndarray]:
    sample = dataset[i]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise DataError(
            f"{which}: sample {i} of the dataset is a {type(sample).__name__}; expected a pair "
            f"(x, y), or a collate function in Data that makes x and y of such samples."
        )
    try:
        x, y = map(_array, sample)
    except DataError as wrong:
        raise DataError(f"{which}: sample {i} of the dataset: {wrong}.") from None
    is_text = y.dtype.kind == "U" and y.ndim == 0
    if x.dtype.kind not in "biuf" or not (is_text or y.dtype.kind in "biuf"):
        raise DataError(
            f"{which}: sample {i} of the dataset holds {x.dtype} and {y.dtype}; expected numbers, "
            f"such as by torchvision.transforms.ToTensor, or a collate function in Data."
        )
    return x, y


def _array(part: Any) -> np.ndarray:  # Any: whatever a dataset gives for a sample
    if not hasattr(part, "getbands"):
        return np.asarray(part)
    # An image of Pillow. Numbers of a palette are converted to their colours.
    image = part.convert("RGB") if part.mode == "P" else eight_bits(part)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def _kept(dtype: np.dtype) -> np.dtype:
    """Returns the type in which `Data` keeps an array of that type."""
    if dtype == np.uint8:
        return dtype
    return np.dtype(np.int64 if dtype.kind in "iu" else np.float32)


def _kept_of_labels(dtype: np.dtype) -> np.dtype:
    """Returns the same for labels. `Data` converts text and booleans itself."""
    if dtype.kind == "U":
        return np.dtype(object)
    return dtype if dtype.kind == "b" else _kept(dtype)


def _check_room(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises ConfigError if an array does not fit into memory."""
    capacity.check_memory(math.prod(shape) * dtype.itemsize, f"a dataset of the shape {shape}")


# -- splits of Hugging Face ------------------------------------------------------------------------
class Columns:
    """The pairs (x, y) of a split of Hugging Face's `datasets`, as a dataset.

    x: the column of inputs (default: the only one of images, else the only one that is neither
    label nor in `others`); y: the column of labels (default: the only ClassLabel, else `label`).
    Raises ConfigError.
    """

    def __init__(
        self,
        split: datasets.Dataset,
        x: str | None = None,
        y: str | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        # A user's transform stays, with the columns that it makes. The package's own formats are
        # replaced by Python objects.
        own = split.format["type"] == "custom"
        kinds = split.features
        if own:
            kinds = {column: kinds.get(column) for column in split[0]}
        for key, column in (("x", x), ("y", y), *(("group", other) for other in others)):
            if column is not None and column not in kinds:
                raise ConfigError(f"data.{key}: {unknown('column', column, list(kinds))}")
        self.y = y or _label(kinds)
        self.x = x or _inputs(kinds, (self.y, *others))
        self.names: tuple[str, ...] | None = getattr(kinds[self.y], "names", None)
        self.rows = split if own else split.with_format(None).select_columns([self.x, self.y])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[object, object]:
        row = self.rows[i]
        x, y = row[self.x], row[self.y]
        if isinstance(x, list):  # of numbers, nested to one shape
            try:
                x = np.array(x)
            except ValueError as ragged:
                raise DataError(f"column {self.x!r} of row {i}: {ragged}.") from ragged
        if isinstance(x, str):
            raise DataError(
                f"column {self.x!r} of row {i} holds {x[:40]!r}; expected numbers, such as the "
                f"numbers of a tokenizer."
            )
        for column, value in ((self.x, x), (self.y, y)):
            if value is None or (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
                raise DataError(
                    f"column {column!r} of row {i} lacks a value; fill it in, or leave the row out."
                )
        return x, y


def is_split(found: object) -> bool:
    """Whether it is a split of Hugging Face. The package need not be installed."""
    return all(hasattr(found, name) for name in ("features", "with_format", "select_columns"))


def _label(columns: datasets.Features) -> str:
    named = [c for c, kind in columns.items() if hasattr(kind, "names")]
    if len(named) == 1:
        return str(named[0])
    if "label" in columns:
        return "label"
    raise ConfigError(f"data.y: name the column of labels, one of {', '.join(columns)}.")


def _inputs(columns: datasets.Features, others: tuple[str, ...]) -> str:
    rest = [c for c in columns if c not in others]
    images = [c for c in rest if type(columns[c]).__name__ == "Image"]
    for found in (images, rest):
        if len(found) == 1:
            return str(found[0])
    raise ConfigError(f"data.x: name the column of inputs, one of {', '.join(columns)}.")

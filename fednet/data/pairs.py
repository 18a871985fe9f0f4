"""Reads datasets of torch and Hugging Face, which return one sample at a time, into arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import torch

from fednet import capacity
from fednet.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    import datasets

Collate = Callable[[list[Any]], Any]  # as the collate_fn of a torch.utils.data.DataLoader
LABELS = ("labels", "label")  # names of the targets in what a Collate returns

TWICE = 8  # samples that are read twice, to detect random transforms
RANDOM = (
    "{}: samples are drawn at random as they are read (two readings of a sample differ). Each is "
    "read once, and every round uses what was read then; for new draws in every round set "
    "data.augment, or draw in the model."
)


class Dataset(Protocol):
    """The interface of `torch.utils.data.Dataset`: a length, and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> object: ...


def is_dataset(found: object) -> TypeGuard[Dataset]:
    """Whether it has a length and samples by number."""
    return hasattr(found, "__getitem__") and hasattr(found, "__len__")


def read(dataset: Dataset, which: str, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Reads all samples of a dataset of pairs. Returns (x, y), in the types that `Data` keeps.

    A sample is a pair of numbers, arrays or images (as (c, h, w)), all of one shape; y may be text.
    Adds to the notes if a second reading of a sample gives another one. Raises DataError, or
    ConfigError if memory cannot hold the samples.
    """
    # A split of Hugging Face; the package need not be installed.
    if all(hasattr(dataset, name) for name in ("features", "with_format", "select_columns")):
        dataset = Columns(dataset)
    if not len(dataset):
        raise DataError(f"{which}: the dataset has no samples.")
    first, _ = _pair(dataset, 0, which)
    dtype = kept_type(first.dtype)
    shape = (len(dataset), *first.shape)
    _check_room(shape, dtype)
    x = np.empty(shape, dtype)
    labels = []
    for i in range(len(dataset)):
        sample, label = _pair(dataset, i, which)
        if sample.shape != first.shape or kept_type(sample.dtype) != dtype:
            raise DataError(
                f"{which}: sample {i} is {sample.dtype} of shape {sample.shape}, sample 0 is "
                f"{first.dtype} of shape {first.shape}; give each the same, such as by a "
                f"transform, or give Data a collate function that pads them."
            )
        x[i] = sample
        labels.append(label)
    again = [_pair(dataset, i, which) for i in range(min(TWICE, len(dataset)))]
    if not all(_same(x[i], a) and _same(labels[i], b) for i, (a, b) in enumerate(again)):
        notes.append(RANDOM.format(which))
    try:
        return x, np.array(labels)
    except ValueError as ragged:
        raise DataError(f"{which}: targets of unlike shapes ({ragged}).") from None


def read_collated(
    given: Mapping[str, Any], collate: Collate, notes: list[str]
) -> dict[str, tuple[Any, Any]]:
    """Reads all samples of the datasets by one call of collate. Returns (x, y) of each. Adds to the
    notes if the first samples are others a second time.
    """
    samples = list[Any]()
    ends = dict[str, int]()
    for which, dataset in given.items():
        if isinstance(dataset, tuple) or not is_dataset(dataset):
            raise DataError(
                f"{which}: collate takes a list of samples or a dataset of them, got "
                f"{type(dataset).__name__}."
            )
        few = range(min(TWICE, len(dataset)))
        once, again = (_inputs_and_targets(collate([dataset[i] for i in few])) for _ in range(2))
        if not all(map(_same, _inputs(*once), _inputs(*again))):
            notes.append(RANDOM.format(which))
        samples += [dataset[i] for i in range(len(dataset))]
        ends[which] = len(samples)
    x, y = _inputs_and_targets(collate(samples))
    if len(y) != len(samples):
        raise DataError(f"collate returned {len(y)} targets for {len(samples)} samples.")
    start = 0
    read = {}
    for which, end in ends.items():
        part = slice(start, end)
        cut = {name: v[part] for name, v in x.items()} if isinstance(x, Mapping) else x[part]
        read[which] = cut, y[part]
        start = end
    return read


def _inputs_and_targets(made: Any) -> tuple[Any, Any]:
    """Returns (x, y) of what a Collate returned."""
    if isinstance(made, Mapping):
        for name in LABELS:
            if name in made and len(made) > 1:
                return {k: v for k, v in made.items() if k != name}, made[name]
    elif isinstance(made, (tuple, list)) and len(made) == 2:
        return made[0], made[1]
    raise DataError(
        f"collate returned a {type(made).__name__}; expected (x, y), or a dict of inputs, with the "
        f"targets as {LABELS[0]!r}."
    )


def _inputs(x: Any, y: Any) -> list[Any]:
    return [*(x.values() if isinstance(x, Mapping) else [x]), y]


def to_kept_tensor(x: np.ndarray) -> torch.Tensor:
    """Returns an array as a tensor of a type that `Data` keeps, in memory that torch may write to.
    It is copied only if necessary: a file that is mapped with mode "c" stays mapped.
    """
    dtype = kept_type(x.dtype)
    if x.dtype == dtype and x.flags.c_contiguous and x.flags.writeable:
        return torch.from_numpy(x)
    _check_room(x.shape, dtype)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite, and are refused
        return torch.from_numpy(x.astype(dtype, order="C"))


def _pair(dataset: Dataset, i: int, which: str) -> tuple[np.ndarray, np.ndarray]:
    sample = dataset[i]
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise DataError(
            f"{which}: sample {i} of the dataset is a {type(sample).__name__}; expected a pair "
            f"(x, y), or a collate function in Data that makes x and y of such samples."
        )
    try:
        x, y = map(_array, sample)
    except ValueError as ragged:
        raise DataError(f"{which}: sample {i} of the dataset: {ragged}.") from None
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
    # An image of Pillow.
    if part.mode == "P":
        raise ValueError("an image with a palette; give image.convert('RGB')")
    pixels = np.asarray(part)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _same(a: Any, b: Any) -> bool:
    """Whether two arrays or tensors are equal; what is neither is refused elsewhere."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return not isinstance(a, np.ndarray) or np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def kept_type(dtype: np.dtype) -> np.dtype:
    """Returns the type in which `Data` keeps an array of that type."""
    if dtype == np.uint8:
        return dtype
    return np.dtype(np.int64 if dtype.kind in "iu" else np.float32)


def _check_room(shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises ConfigError if an array does not fit into memory."""
    capacity.check_memory(math.prod(shape) * dtype.itemsize, f"a dataset of the shape {shape}")


# -- splits of Hugging Face ------------------------------------------------------------------------
class Columns:
    """The pairs (x, y) of a split of Hugging Face's `datasets`, as a dataset.

    x: the column of inputs (default: the only one beside y and `group`); y: the column of labels.
    Raises ConfigError.
    """

    def __init__(
        self,
        split: datasets.Dataset,
        x: str | None = None,
        y: str = "label",
        group: str | None = None,
    ) -> None:
        # A user's transform stays, with the columns that it makes. The package's own formats are
        # replaced by Python objects.
        own = split.format["type"] == "custom"
        columns = list(split[0] if own else split.features)
        rest = [column for column in columns if column not in (y, group)]
        for key, column in (("x", x), ("y", y), ("group", group)):
            if column is not None and column not in columns:
                raise ConfigError(f"data.{key}: {unknown('column', column, columns)}")
        if x is None and len(rest) != 1:
            raise ConfigError(f"data.x: name the column of inputs, one of {', '.join(rest)}.")
        self.x = x or rest[0]
        self.y = y
        self.names: tuple[str, ...] | None = getattr(split.features.get(y), "names", None)
        self.rows = split if own else split.with_format(None).select_columns([self.x, self.y])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[object, object]:
        row = self.rows[i]
        return row[self.x], row[self.y]

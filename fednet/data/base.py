"""`Data`: any samples, held as one tensor a split (or one a named input)."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from fednet.data import pairs
from fednet.data.convert import Split, convert_fields
from fednet.data.raw import IGNORED
from fednet.tensors import Inputs, by_name, map_inputs, to_device


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset: training and test samples as they are stored and sent. `inputs` makes model inputs
    of them.

    x is a tensor, or a dict of tensors, of equal length along dimension 0: uint8 (scaled to 0..1,
    then normalised by mean and std), float32 as is, int64 (such as token numbers) as is.

    y is int64 classes in 0..classes-1, of shape (n,), (n, t) for sequences or (n, h, w) for images;
    or float32 values, with classes=None; or text, one class for each, numbered in sorted order or
    as in names. Sequences and images may have targets without a label, see ignore_index.

    NumPy arrays and lists are accepted and converted; other widths of float and integer become
    float32 and int64.
    """

    train: Split
    """(x, y), or a dataset of such pairs, such as a torch.utils.data.Dataset, which is read once.
    """
    test: Split = None  # type: ignore[assignment]  # never None after construction
    """The same; None: no test samples."""
    classes: int | None = None
    """C, or None where y holds values."""
    groups: torch.Tensor | None = None
    """(n,) the natural owner of each training sample, any whole numbers or text (for `scheme:
    natural`).
    """
    test_groups: torch.Tensor | None = None
    """(n,) the owner of each test sample, one of those of `groups` or another. `scheme: natural`
    then gives each client the test samples of its owners.
    """
    mean: tuple[float, ...] | None = None
    """By channel (dimension 1) of uint8 inputs, in units of 0..1."""
    std: tuple[float, ...] | None = None
    """The same."""
    names: tuple[str, ...] | None = None
    """The names of the classes."""
    notes: tuple[str, ...] = ()
    """Remarks on how the samples were read, one sentence each, printed when a run starts."""
    ignore_index: int = IGNORED
    """The target that stands for no label, such as 255; it is kept as -100. Those targets are left
    out of the loss and of the counts.
    """
    collate: pairs.Collate | None = None
    """For datasets whose samples differ in shape or are dicts: a function from a list of samples to
    (x, y), or to a dict with the targets as `labels`, as the collate_fn of a
    torch.utils.data.DataLoader. It gets all samples of train and test at once, and so pads all to
    one length.
    """

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in convert_fields(**given).items():
            object.__setattr__(self, name, value)

    # -- sizes -------------------------------------------------------------------------------------
    @property
    def n_train(self) -> int:
        return int(self.train[1].shape[0])

    @property
    def n_test(self) -> int:
        return int(self.test[1].shape[0])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one model input; of the first one where x is a dict."""
        return tuple(next(iter(by_name(self.train[0]).values())).shape[1:])

    @property
    def outputs(self) -> int:
        """Numbers that a model gives for each sample, or for each position of a sequence: C, or the
        width of the targets where y holds values, 1 for y (n,) and k for y (n, k).
        """
        if self.classes is not None:
            return self.classes
        y = self.train[1]
        return 1 if y.ndim == 1 else int(y.shape[-1])

    @property
    def form(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """Name, type and shape of one sample, for each input and for the targets."""
        parts = {**by_name(self.train[0]), "targets": self.train[1]}
        return tuple((name, part.dtype, tuple(part.shape[1:])) for name, part in parts.items())

    @property
    def targets_each(self) -> int:
        """Labels or values of one sample: more than one for sequences and for rows of values."""
        return math.prod(self.train[1].shape[1:])

    @property
    def sample_nbytes(self) -> int:
        """Bytes of one raw sample when it is sent, without its label."""
        parts = by_name(self.train[0]).values()
        return sum(math.prod(part.shape[1:]) * part.element_size() for part in parts)

    def labels(self, which: str = "train") -> np.ndarray:
        """Returns (n,) int64, the class of each sample; zeros if y holds values or sequences."""
        y = getattr(self, which)[1]
        if self.classes is None or y.ndim != 1:
            return np.zeros(len(y), dtype=np.int64)
        return np.asarray(y.numpy(), dtype=np.int64)

    @property
    def table_classes(self) -> int:
        """Columns of a table of samples by class: C, or 1 if y holds values or sequences."""
        return self.classes if self.classes is not None and self.train[1].ndim == 1 else 1

    @property
    def names_sha256(self) -> str:
        """SHA-256 of the names of the classes in order; "" if there are none."""
        return "" if self.names is None else digest_of(self.names)

    @functools.cached_property
    def inputs_form(self) -> tuple[object, ...]:
        """Name, type and shape of one sample as the model gets it, then type and shape of its
        target.
        """
        x, y = self.train
        made = [
            (name, torch.float32 if part.dtype == torch.uint8 else part.dtype, part.shape[1:])
            for name, part in by_name(x).items()
        ]
        return tuple(made), y.dtype, y.shape[1:]

    @functools.cached_property
    def input_nbytes(self) -> int:
        """Bytes of one sample as the model gets it, without its target."""
        parts = by_name(self.train[0]).values()
        return sum(math.prod(p.shape[1:]) * max(4, p.element_size()) for p in parts)

    @functools.cached_property
    def _held(self) -> dict[torch.device, Split]:
        return {}

    def raw_samples(self, device: torch.device) -> Split:
        """Returns the raw training samples on `device`, where they are copied once."""
        found = self._held.get(device)
        if found is None:
            x, y = self.train
            whole = map_inputs(x, lambda part: to_device(part, device)), to_device(y, device)
            found = self._held[device] = whole
        return found

    # -- samples -----------------------------------------------------------------------------------
    def take(self, indices: np.ndarray, which: str = "train") -> Split:
        """Returns a copy of the raw samples at these indices of one split."""
        x, y = getattr(self, which)
        at = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
        return map_inputs(x, lambda part: part.index_select(0, at)), y.index_select(0, at)

    def inputs(self, x: Inputs, device: torch.device | str = "cpu") -> Inputs:
        """Returns raw samples as model inputs on `device`: uint8 as float32, (x/255 - mean)/std;
        other types unchanged.
        """

        def made(part: torch.Tensor) -> torch.Tensor:
            if part.dtype != torch.uint8:
                return to_device(part, device)
            # As bytes to the device: a quarter of the size.
            out = to_device(part, device).to(torch.float32).div_(255.0)
            if self.mean is None or self.std is None:
                return out
            shape = (1, -1, *([1] * (out.ndim - 2)))
            mean, std = (_by_channel(v, out.device).view(shape) for v in (self.mean, self.std))
            return out.sub_(mean).div_(std)

        return map_inputs(x, made)

    def replace(self, **changes: Any) -> Data:  # by field: dataclasses.replace does not check more
        return replace(self, **changes)

    def sha256(self) -> str:
        """Returns the SHA-256 of all samples, for a run's provenance."""
        whole = hashlib.sha256()
        for which in ("train", "test"):
            x, y = getattr(self, which)
            for name, part in [*by_name(x).items(), ("y", y)]:
                whole.update(f"{which}/{name}/{part.dtype}/{tuple(part.shape)}".encode())
                whole.update(memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()))
        return whole.hexdigest()


# A copy to a GPU waits for the GPU: the numbers are copied once, not for each client.
@functools.lru_cache(maxsize=16)
def _by_channel(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def digest_of(names: Iterable[str]) -> str:
    """SHA-256 of names of classes in order."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()

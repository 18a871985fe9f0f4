"""Converts whatever a `Data` is given to the tensors that it keeps: arrays, lists, datasets of
pairs, labels that are text. What cannot be meant is refused, with what to give instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fednet.data import pairs
from fednet.data.raw import IGNORED
from fednet.errors import DataError, unknown
from fednet.tensors import Inputs, by_name, map_inputs

# (x, y): any arrays, tensors or mappings of them before a Data is made; tensors afterwards.
Split = tuple[Any, Any]

# The types in which samples are kept; others are converted to one of them, or refused.
KEPT = (torch.uint8, torch.float32, torch.int64)
WIDER = {
    torch.float64: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.float32,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
}


def convert_fields(
    *,
    train: Any,
    test: Any,
    classes: int | None,
    groups: Any,
    test_groups: Any,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    names: Sequence[object] | None,
    notes: Sequence[str],
    ignore_index: int,
    collate: pairs.Collate | None,
) -> dict[str, Any]:
    """Returns the fields of a `Data`, checked and converted. The arguments are its fields as they
    were given. Raises DataError.
    """
    remarks = list(notes)
    splits = {"train": train}
    if test is not None:
        splits["test"] = test
    if collate is not None:
        splits = pairs.read_collated(splits, collate, remarks)
    splits = {which: _read(split, which, remarks) for which, split in splits.items()}
    known = None if names is None else tuple(str(name) for name in names)
    known, classes = _number_text(splits, known, classes, remarks)
    kept_train = _to_tensors(splits["train"], "train", classes, ignore_index)
    kept_test = map_inputs(kept_train[0], lambda part: part[:0]), kept_train[1][:0]
    if "test" in splits:
        kept_test = _to_tensors(splits["test"], "test", classes, ignore_index)
    _same_form(kept_train, kept_test)
    owners, test_owners = _owners(groups, test_groups, len(kept_train[1]), len(kept_test[1]))
    means, deviations = _statistics(mean, std, kept_train[0])
    remarks += _of_bytes(kept_train[0])
    if known is not None and len(known) != classes:
        raise DataError(f"names: {len(known)} class names for {classes} classes.")
    return {
        "train": kept_train,
        "test": kept_test,
        "classes": classes,
        "groups": owners,
        "test_groups": test_owners,
        "mean": means,
        "std": deviations,
        "names": known,
        "notes": tuple(dict.fromkeys(remarks)),  # `replace` would repeat them
        "ignore_index": IGNORED,
        "collate": None,
    }


def _read(given: Any, which: str, notes: list[str]) -> Split:
    """Returns (x, y) of one split, with lists as arrays. given: a pair, or a dataset of pairs,
    which is read. Adds to the notes.
    """
    a_pair = isinstance(given, (tuple, list))
    if not a_pair and pairs.is_dataset(given) and not hasattr(given, "to_numpy"):
        given = pairs.read(given, which, notes)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            f"{which}: expected a pair of arrays (x, y), or a torch.utils.data.Dataset or a "
            f"split of Hugging Face's, got {type(given).__name__}."
        )
    x, y = given
    if isinstance(x, Mapping):
        x = {name: _plain(part, f"{which} x[{name!r}]") for name, part in x.items()}
    else:
        x = _plain(x, f"{which} x")
    return x, _plain(y, f"{which} y", text=True)


def _number_text(
    splits: dict[str, Split],
    names: tuple[str, ...] | None,
    classes: int | None,
    notes: list[str],
) -> tuple[tuple[str, ...] | None, int | None]:
    """Numbers labels that are text, in place: in the order of names, else sorted. Returns the names
    and the number of classes; adds to the notes.
    """
    texts = {w: y for w, (_, y) in splits.items() if isinstance(y, np.ndarray) and _is_text(y)}
    if not texts:
        return names, classes
    if len(texts) < len(splits):
        raise DataError("y: labels are text in one of train and test, and not in the other.")
    found = np.unique(np.concatenate([y.ravel() for y in texts.values()])).tolist()
    if names is None:
        names = tuple(found)
        order = ", ".join(f"{c} {name!r}" for c, name in enumerate(found[:20]))
        more = ", ..." if len(found) > 20 else ""
        notes.append(f"y: labels are text, numbered in sorted order: {order}{more}.")
    for name in found:
        if name not in names:
            raise DataError(f"y: {unknown('label', name, names)}")
    number = {name: c for c, name in enumerate(names)}
    for which, y in texts.items():
        numbers = np.array([number[label] for label in y.ravel().tolist()], np.int64)
        splits[which] = splits[which][0], numbers.reshape(y.shape)
    return names, len(names) if classes is None else classes


def _is_text(y: np.ndarray) -> bool:
    return y.dtype.kind == "U"


def _owners(
    train: Any, test: Any, n_train: int, n_test: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the owners of the training and of the test samples as (n,) int64. Text is numbered in
    sorted order, that of both together.
    """
    if train is None and test is not None:
        raise DataError("test_groups: given without groups, the owners of the training samples.")
    if train is None:
        return None, None
    train = _plain(train, "groups", text=True)
    owners = [train] if test is None else [train, _plain(test, "test_groups", text=True)]
    texts = [isinstance(own, np.ndarray) and _is_text(own) for own in owners]
    if any(texts) and not all(texts):
        raise DataError("groups and test_groups: one of them is text, and the other is not.")
    if all(texts):
        known = np.unique(np.concatenate([own.ravel() for own in owners]))
        owners = [np.searchsorted(known, own) for own in owners]
    made = [_groups(owners[0], "groups", n_train, "training")]
    if test is None:
        return made[0], None
    made.append(_groups(owners[1], "test_groups", n_test, "test"))
    if n_test and not torch.isin(made[1], made[0]).any():
        raise DataError("test_groups: none of these owners is in groups.")
    return made[0], made[1]


def _groups(given: Any, where: str, samples: int, what: str) -> torch.Tensor:
    groups = _tensor(given, where)
    if groups.is_floating_point() or groups.shape != (samples,):
        raise DataError(
            f"{where}: expected one whole number for each of the {samples} {what} samples, got "
            f"{groups.dtype} of shape {tuple(groups.shape)}."
        )
    return groups.to(torch.int64)


def _statistics(
    mean: Sequence[float] | None, std: Sequence[float] | None, x: Inputs
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Returns the mean and deviation as tuples, checked against the channels of x."""
    if (mean is None) != (std is None):
        raise DataError("mean and std: give both or neither.")
    if mean is None or std is None:
        return None, None
    mean = tuple(map(float, mean))
    std = tuple(map(float, std))
    if len(mean) != len(std) or min(std) <= 0:
        raise DataError(f"mean {mean} and std {std}: expected as many of both, and std > 0.")
    for name, part in by_name(x).items():
        if part.dtype == torch.uint8 and (part.ndim < 2 or part.shape[1] != len(mean)):
            raise DataError(
                f"{name or 'x'}: mean and std are for {len(mean)} channels; dimension 1 of "
                f"{tuple(part.shape)} has another number."
            )
    return mean, std


def _of_bytes(x: Inputs) -> Iterator[str]:
    """Yields a remark for inputs of bytes that may not be meant as pixels."""
    for name, part in by_name(x).items():
        if part.dtype != torch.uint8 or not part.numel():
            continue
        # In most inputs the first samples have larger values, so that not all are read.
        two_valued = int(part[:100].max()) <= 1 and int(part.max()) <= 1
        if two_valued or part.ndim == 2:
            what = "no more than 0 and 1" if two_valued else "no images"
            yield (
                f"x{f'[{name!r}]' if name else ''}: its bytes (uint8) are {what}, and are divided "
                f"by 255 as pixels are; if they are other numbers, give them as float32."
            )


def _plain(value: Any, where: str, text: bool = False) -> Any:
    """Returns a list as a NumPy array; anything else as it is. text: whether the array may hold
    text. Raises DataError for an array without numbers.
    """
    if hasattr(value, "to_numpy"):
        raise DataError(f"{where}: a {type(value).__name__}; give its values, .to_numpy().")
    if isinstance(value, list):
        try:
            value = np.array(value)
        except ValueError as ragged:
            raise DataError(f"{where}: a list of entries of unlike shapes ({ragged}).") from None
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == object and value.size and all(isinstance(v, str) for v in value.flat):
        value = value.astype(str)
    if value.dtype.kind in "biuf" or (text and _is_text(value)):
        return value
    raise DataError(
        f"{where}: an array of {value.dtype} holds no numbers; give integers or floats, without "
        f"missing values."
    )


def _tensor(value: object, where: str) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = pairs.to_kept_tensor(value) if value.ndim else torch.from_numpy(value)
    if not isinstance(value, torch.Tensor):
        raise DataError(f"{where}: expected a tensor or a NumPy array, got {type(value).__name__}.")
    if value.ndim == 0:
        raise DataError(f"{where}: a single number; expected one entry a sample along dimension 0.")
    value = value.detach().to("cpu").contiguous()
    value = value.to(WIDER.get(value.dtype, value.dtype))
    if value.dtype not in KEPT:
        raise DataError(f"{where}: {value.dtype} is not supported; use uint8, float32 or int64.")
    return torch.as_tensor(value)


def _to_tensors(pair: tuple[Any, Any], which: str, classes: int | None, ignore_index: int) -> Split:
    """Returns (x, y) as checked tensors."""
    x: Inputs
    if isinstance(pair[0], Mapping):
        if not pair[0]:
            raise DataError(f"{which}: x is an empty dict.")
        x = {str(name): _tensor(part, f"{which} x[{name!r}]") for name, part in pair[0].items()}
    else:
        x = _tensor(pair[0], f"{which} x")
    given: Any = pair[1]
    if classes is not None and str(getattr(given, "dtype", "")) in ("bool", "torch.bool"):
        given = given + 0  # as whole numbers: False is class 0
    y = _targets(_tensor(given, f"{which} y"), which, classes, ignore_index)
    for name, part in by_name(x).items():
        if len(part) != len(y):
            raise DataError(
                f"{which}: {len(part)} samples in x{f'[{name!r}]' if name else ''} but {len(y)} "
                f"in y."
            )
    if which == "train" and not len(y):
        raise DataError("train: no samples.")
    return x, y


def _targets(y: torch.Tensor, which: str, classes: int | None, ignore_index: int) -> torch.Tensor:
    if classes is None:
        if not y.is_floating_point():
            raise DataError(
                f"{which}: y holds whole numbers; say classes=C if they are classes, or give "
                f"y.float() if they are values."
            )
        return y
    if not isinstance(classes, int) or classes < 1:
        raise DataError(
            f"classes: expected a whole number >= 1, or None for values, got {classes!r}."
        )
    if y.is_floating_point():
        raise DataError(
            f"{which}: y holds floats but classes={classes}; give the number of each sample's "
            f"class, or classes=None."
        )
    y = y.to(torch.int64)
    if ignore_index != IGNORED:
        y = y.masked_fill(y == ignore_index, IGNORED)
    labels = y
    if y.numel() and int(y.min()) < 0:
        labels = y[y != IGNORED]
        if y.ndim == 1 and len(labels) < len(y):
            raise DataError(
                f"{which}: sample {int((y == IGNORED).nonzero()[0])} has the label "
                f"{ignore_index}, which means no label; leave such samples out."
            )
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        remedy = "; if one of them means no label, say ignore_index" if y.ndim > 1 else ""
        raise DataError(
            f"{which}: labels are in {int(labels.min())}..{int(labels.max())}, expected "
            f"0..{classes - 1} for classes={classes}{remedy}."
        )
    return y


def _same_form(train: Split, test: Split) -> None:
    one = by_name(train[0])
    two = by_name(test[0])
    if one.keys() != two.keys():
        ours, theirs = (
            ", ".join(repr(k) if k else "one tensor" for k in keys) for keys in (one, two)
        )
        raise DataError(f"train has the inputs {ours}, test has {theirs}.")
    for name in one:
        a = one[name]
        b = two[name]
        if a.dtype != b.dtype or a.shape[1:] != b.shape[1:]:
            raise DataError(
                f"x{f'[{name!r}]' if name else ''}: a training sample is {a.dtype} "
                f"{tuple(a.shape[1:])}, a test sample is {b.dtype} {tuple(b.shape[1:])}."
            )
    if train[1].shape[1:] != test[1].shape[1:]:
        raise DataError(
            f"y: a training target has shape {tuple(train[1].shape[1:])}, "
            f"a test target {tuple(test[1].shape[1:])}."
        )

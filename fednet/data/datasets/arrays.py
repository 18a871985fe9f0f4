"""Samples in one NumPy file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import numpy as np

from fednet.data.raw import IGNORED, Raw, absent, channel_statistics
from fednet.errors import DataError
from fednet.places import expand_home
from fednet.registry import dataset

CHANNELS = (1, 3, 4)


@dataset("arrays")
def arrays(
    root: Path,
    *,
    path: Annotated[str, "The .npz file, as it is or below `data.root`."],
    classes: Annotated[
        int | list[str] | None,
        "Number of classes, or their names in order; null: the largest label plus one, or none if "
        "y holds floats.",
    ] = None,
    mean: Annotated[list[float] | None, "Mean of each channel, in 0..1; null: computed."] = None,
    std: Annotated[
        list[float] | None, "Standard deviation of each channel, in 0..1; null: computed."
    ] = None,
    ignore_index: Annotated[
        int, "The value of y that means no label, such as 255 in masks of images."
    ] = IGNORED,
) -> Raw:
    """Arrays of one .npz file: x_train, y_train, x_test, y_test; groups and test_groups, if samples
    have owners.

    uint8 images have the shape (n, h, w), (n, h, w, c) or (n, c, h, w). x_test and y_test may be
    missing (a site without test samples of its own).
    """
    file = expand_home(path, "data.path")
    if not file.exists():
        file = root / file
    if not file.is_file():
        raise absent("file", path, file)
    held = _read(file)
    for name in ("x_train", "y_train"):
        if name not in held:
            raise DataError(
                f"{file}: no array {name!r}; found {', '.join(sorted(held)) or 'none'}."
            )
    if ("x_test" in held) != ("y_test" in held):
        raise DataError(f"{file}: x_test and y_test come together or not at all.")
    train = images(held["x_train"]), _targets(held["y_train"])
    test = (images(held["x_test"]), _targets(held["y_test"])) if "x_test" in held else None
    names = tuple(classes) if isinstance(classes, list) else None
    count = len(names) if names is not None else classes
    if count is None and train[1].dtype.kind in "biu":
        given = (train[1], *(() if test is None else (test[1],)))
        count = int(max(y.max(initial=0, where=y != ignore_index) for y in given)) + 1
    if mean is None and train[0].dtype == np.uint8 and train[0].ndim == 4:
        mean, std = (list(v) for v in channel_statistics(train[0]))
    picture = train[0].dtype == np.uint8 and mean is not None and std is not None
    return Raw(
        train=train,
        test=test,
        classes=count,
        groups=held.get("groups"),
        test_groups=held.get("test_groups"),
        names=names,
        mean=tuple(mean) if picture and mean else None,
        std=tuple(std) if picture and std else None,
        ignore_index=ignore_index,
    )


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as broken:
        # Python objects are refused: unpickling them would run code of the file.
        raise DataError(f"{file}: not a readable .npz of plain arrays ({broken}).") from broken


def _targets(y: np.ndarray) -> np.ndarray:
    """Returns a column (n, 1) as (n,)."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def images(x: np.ndarray) -> np.ndarray:
    """Returns uint8 images as (n, c, h, w); anything else unchanged."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x

"""Samples in one NumPy file."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fednet.data.base import Data, absent, channel_statistics
from fednet.errors import DataError
from fednet.registry import dataset

CHANNELS = (1, 3, 4)


@dataset("arrays")
def arrays(
    root: Path,
    *,
    path: str,
    classes: int | list[str] | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
) -> Data:
    """Arrays of one .npz file: x_train, y_train, x_test, y_test and, where samples have owners,
    groups.

    path: as it stands, else under data.root. classes: a number, or names in order; else the largest
    label plus one; where y holds floats it is values. uint8 images may lie as (n, h, w), (n, h, w,
    c) or (n, c, h, w); their mean and std are computed unless given. x_test and y_test may be
    missing (a site without its own test samples).
    """
    file = Path(path) if Path(path).exists() else root / path
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
    train = _images(held["x_train"]), _targets(held["y_train"])
    test = (_images(held["x_test"]), _targets(held["y_test"])) if "x_test" in held else None
    names = tuple(classes) if isinstance(classes, list) else None
    count = len(names) if names is not None else classes
    if count is None and train[1].dtype.kind in "biu":
        count = (
            int(max(y.max(initial=0) for y in (train[1], *(() if test is None else (test[1],)))))
            + 1
        )
    if mean is None and train[0].dtype == np.uint8 and train[0].ndim == 4:
        mean, std = (list(v) for v in channel_statistics(torch.from_numpy(train[0])))
    picture = train[0].dtype == np.uint8 and mean is not None and std is not None
    return Data(
        train=train,
        test=test,  # type: ignore[arg-type]
        classes=count,  # type: ignore[arg-type]
        groups=held.get("groups"),  # type: ignore[arg-type]
        names=names,  # type: ignore[arg-type]
        mean=tuple(mean) if picture and mean else None,
        std=tuple(std) if picture and std else None,
    )


def _read(file: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile) as broken:
        # objects in it would have to be unpickled, which runs what the file says: refused
        raise DataError(f"{file}: not a readable .npz of plain arrays ({broken}).") from broken


def _targets(y: np.ndarray) -> np.ndarray:
    """A column (n, 1) as (n,)."""
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def _images(x: np.ndarray) -> np.ndarray:
    """uint8 images as (n, c, h, w); anything else as it is."""
    if x.dtype != np.uint8:
        return x
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return x

"""A dataset of the package `datasets` (Hugging Face), on disk or in its cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from fednet.data import pairs
from fednet.data.base import RANDOM, Data, channel_statistics
from fednet.errors import ConfigError, DataError, lacking, unknown
from fednet.registry import dataset

if TYPE_CHECKING:
    import datasets


@dataset("hf")
def hf(
    root: Path,
    download: bool,
    *,
    path: Annotated[
        str,
        "A folder that `save_to_disk` wrote, as it is or below `data.root`; else a name that "
        "`load_dataset` knows, which needs data.download: true.",
    ],
    name: Annotated[str | None, "The dataset's configuration, as `load_dataset` takes it."] = None,
    splits: Annotated[
        list[str] | None,
        "Splits for training and testing, or for training only; null: train, test.",
    ] = None,
    x: Annotated[
        str | None,
        "Column of images, or of lists of numbers; null: the only one of images, else the only one "
        "that is neither label nor group.",
    ] = None,
    y: Annotated[
        str | None, "Column of labels; null: the only column of the type ClassLabel, else `label`."
    ] = None,
    group: Annotated[str | None, "Column of the samples' owners, for `scheme: natural`."] = None,
) -> Data:
    """A dataset of Hugging Face `datasets` (`pip install datasets`)."""
    held, wanted = _opened(root, path, name, download), splits or ["train", "test"]
    if len(wanted) > 2:
        raise ConfigError(f"data.splits: {wanted}; expected one for training and one for testing.")
    for split in wanted:
        if split not in held:
            raise DataError(
                f"data.splits: {path}: {unknown('split', split, list(held))} It names those for "
                f"training and testing, or one for training alone, such as [{next(iter(held))}]."
            )
    others = () if group is None else (group,)
    first, *rest = (pairs.Columns(held[split], x, y, others) for split in wanted)
    if rest and rest[0].names != first.names:  # a number would be another class in each
        raise DataError(
            f"data.y: the classes of {wanted[0]} are {_some(first.names)}, those of {wanted[1]} "
            f"{_some(rest[0].names)}; give both the same, in one order."
        )
    read = [pairs.read(columns, split) for columns, split in zip((first, *rest), wanted)]
    samples, labels, _ = read[0]
    top = None
    if labels.dtype.kind in "biu":
        top = max(int(found.max()) for _, found, _ in read) + 1
    picture = samples.dtype == np.uint8 and samples.ndim == 4
    mean, std = channel_statistics(torch.from_numpy(samples)) if picture else (None, None)
    owners = None if group is None else np.unique(held[wanted[0]][group], return_inverse=True)[1]
    return Data(
        train=(samples, labels),
        test=read[1][:2] if rest else None,  # type: ignore[arg-type]
        classes=len(first.names) if first.names else top,
        groups=owners,  # type: ignore[arg-type]
        mean=mean,
        std=std,
        names=first.names and tuple(first.names),
        notes=tuple(RANDOM.format(split) for (_, _, random), split in zip(read, wanted) if random),
    )


def _some(names: tuple[str, ...] | None) -> str:
    if names is None:
        return "without names"
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _opened(root: Path, path: str, name: str | None, download: bool) -> datasets.DatasetDict:
    """Returns the splits by name."""
    try:
        import datasets
    except ImportError as absent:
        raise DataError(lacking("data.dataset: hf", "datasets")) from absent
    for folder in (Path(path), root / path):
        if folder.is_dir():
            try:
                found = datasets.load_from_disk(str(folder))
            except Exception as broken:  # as below
                raise DataError(
                    f"{folder}: not what save_to_disk writes ({type(broken).__name__}: {broken})."
                ) from broken
            return found if isinstance(found, datasets.DatasetDict) else {"train": found}
    mode = datasets.DownloadConfig(local_files_only=not download)
    try:
        with contextlib.nullcontext() if download else _offline():
            return datasets.load_dataset(path, name, download_config=mode)
    except Exception as broken:  # the package raises what its readers and its network raise
        first = (str(broken).splitlines() or [type(broken).__name__])[0]
        hint = "" if download else " Set data.download: true to fetch it."
        raise DataError(f"data.path: {path} could not be read: {first}{hint}") from broken


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Sets the package offline: otherwise it asks its hub, and waits, even for local files."""
    from datasets import config
    from huggingface_hub import constants

    # mypy knows no such attribute of modules.
    modules: tuple[Any, ...] = config, constants
    before = [(module, module.HF_HUB_OFFLINE) for module in modules]
    try:
        for module, _ in before:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, online in before:
            module.HF_HUB_OFFLINE = online

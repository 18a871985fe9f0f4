"""A dataset of the package `datasets` (Hugging Face), on disk or in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from fednet.data import pairs
from fednet.data.base import Data
from fednet.data.raw import channel_statistics
from fednet.errors import ConfigError, DataError, lacking, unknown
from fednet.places import expand_home
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
        "`load_dataset` knows, with data.download: true.",
    ],
    name: Annotated[str | None, "The dataset's configuration, as `load_dataset` takes it."] = None,
    splits: Annotated[
        list[str] | None,
        "Splits for training and testing, or for training only; null: train, test.",
    ] = None,
    x: Annotated[
        str | None,
        "Column of images, or of lists of numbers; null: the only one that is neither label nor "
        "group.",
    ] = None,
    y: Annotated[str, "Column of labels."] = "label",
    group: Annotated[str | None, "Column of the samples' owners, for `scheme: natural`."] = None,
) -> Data:
    """A dataset of Hugging Face `datasets` (`pip install datasets`)."""
    found = _open_splits(root, path, name, download)
    wanted = splits or ["train", "test"]
    if len(wanted) > 2:
        raise ConfigError(f"data.splits: {wanted}; expected one for training and one for testing.")
    for split in wanted:
        if split not in found:
            raise DataError(f"data.splits: {path}: {unknown('split', split, list(found))}")
    columns = [pairs.Columns(found[split], x, y, group) for split in wanted]
    names = columns[0].names
    if columns[-1].names != names:  # a number would be another class in each
        raise DataError(
            f"data.y: {wanted[0]} and {wanted[1]} have other classes, or another order."
        )
    notes = list[str]()
    read = [pairs.read(part, split, notes) for part, split in zip(columns, wanted)]
    samples, labels = read[0]
    classes = None if names is None else len(names)
    if names is None and labels.dtype.kind in "biu":
        classes = max(int(numbers.max()) for _, numbers in read) + 1
    owners = [] if group is None else [np.array(found[split][group]) for split in wanted]
    picture = samples.dtype == np.uint8 and samples.ndim == 4
    mean, std = channel_statistics(samples) if picture else (None, None)
    return Data(
        train=(samples, labels),
        test=read[1] if len(read) == 2 else None,  # type: ignore[arg-type]
        classes=classes,
        groups=owners[0] if owners else None,  # type: ignore[arg-type]
        test_groups=owners[1] if len(owners) == 2 else None,  # type: ignore[arg-type]
        mean=mean,
        std=std,
        names=names and tuple(names),
        notes=tuple(notes),
    )


def _open_splits(root: Path, path: str, name: str | None, download: bool) -> datasets.DatasetDict:
    """Returns the splits by name."""
    try:
        import datasets
    except ImportError as absent:
        raise DataError(lacking("data.dataset: hf", "datasets")) from absent
    given = expand_home(path, "data.path")
    folder = next((f for f in (given, root / given) if f.is_dir()), None)
    if folder is None and not download:
        raise DataError(
            f"data.path: there is no folder {path} that save_to_disk wrote; data.download: true "
            f"lets load_dataset look for it in its cache and its hub."
        )
    try:
        if folder is None:
            return datasets.load_dataset(path, name)
        found = datasets.load_from_disk(str(folder))
        return found if isinstance(found, datasets.DatasetDict) else {"train": found}
    except Exception as broken:  # the package raises what its readers and its network raise
        first = (str(broken).splitlines() or [type(broken).__name__])[0]
        raise DataError(f"data.path: {path} could not be read: {first}") from broken

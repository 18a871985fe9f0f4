"""Loads the configured dataset as `Data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fednet import loading, seeds
from fednet.data import ahead
from fednet.data.augment import check
from fednet.data.base import Data
from fednet.data.federation import noisy
from fednet.data.raw import Raw
from fednet.errors import ConfigError, DataError
from fednet.plain import JsonDict
from fednet.registry import dataset

if TYPE_CHECKING:
    from fednet.config.schema import DataSection


def load(
    section: DataSection,
    root: Path | str | None = None,
    seed: int = 0,
    *,
    with_test: bool = True,
) -> Data:
    """Loads the dataset of `section` (the configuration's `data:`).

    root: the folder of datasets; None: section.root, else $FEDNET_DATA, else the user's cache.
    with_test: False where nothing is evaluated on the test samples; the data then have none.
    Raises ConfigError for an unknown dataset or option, DataError for missing or wrong files.
    """
    root = root or section.root
    data = make_data(section.dataset, section.options, root, section.download, seed, with_test)
    if not with_test and data.n_test:  # not every dataset can leave them out
        data = data.replace(test=None, test_groups=None)
    if with_test and not data.n_test and section.client_test != "merge_split":
        raise DataError(
            f"data.dataset: {section.dataset} has no test samples. Give it some, or cut them "
            "from each client's own with data.client_test: merge_split."
        )
    if section.client_test != "merge_split":
        data = data.replace(notes=(*data.notes, *_untrained_classes(data)))
    check(section.augment, data)
    if section.feature_noise and not noisy(data):
        raise ConfigError(
            "data.feature_noise: it is added to images and to floats, and the samples here are "
            "whole numbers (int64), such as tokens; use 0."
        )
    if not section.normalise:
        data = data.replace(mean=None, std=None)
    return data


def _untrained_classes(data: Data) -> list[str]:
    """Returns a remark on the classes of the test set that no training sample has."""
    if data.classes is None or data.train[1].ndim > 1:
        return []
    table = np.bincount(data.labels("test"), minlength=data.classes)
    table[data.labels()] = 0
    found = np.flatnonzero(table)
    if not len(found):
        return []
    shown = [repr(data.names[c]) if data.names else str(c) for c in found[:6]]
    more = ", ..." if len(found) > 6 else ""
    return [
        f"y: {table.sum()} test samples are of classes without a training sample: "
        f"{', '.join(shown)}{more}."
    ]


def make_data(
    name: str,
    given: JsonDict,
    root: Path | str | None,
    download: bool,
    seed: int,
    with_test: bool = True,
) -> Data:
    """Makes the registered dataset `name`, or takes what was made beside the import of torch. The
    arguments are those of `reading.read`.
    """
    folder = str(Path(root)) if root else None
    wanted = ahead.Wanted(name, given, folder, download, seed, with_test)
    data: object = ahead.take(wanted)
    if data is None:
        # Random draws of a dataset are the same in every process, and for every seed of a run.
        with seeds.scope(0, "dataset"):
            data = wanted.read()
    if isinstance(data, Raw):
        return Data(**data.fields)
    if not isinstance(data, Data):
        part = dataset.get(name)
        raise DataError(
            f"dataset {name!r}: {part.__qualname__} ({loading.place(part)}) returned "
            f"{type(data).__name__}, expected fednet.Data."
        )
    return data

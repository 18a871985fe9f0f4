"""Divisions from a file, or by the natural owners of the samples."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import numpy as np

from fednet.data.base import Data
from fednet.errors import ConfigError, DataError
from fednet.places import expand_home
from fednet.plain import JsonDict
from fednet.registry import partitioner


@partitioner("file")
def file(
    clients: int,
    pool: np.ndarray,
    *,
    path: Annotated[str, "The file, from the working directory."],
) -> list[np.ndarray]:
    """Index lists from a JSON file, as `fednet partition --export` writes them.

    Either [[...], ...] or {"train": [[...], ...], "test": [[...], ...]}: for each client its
    indices into the whole training set, and (optional) into the test set. Samples that no list
    names are used by nobody; one that is public or kept for validation is an error.
    """
    lists = _lists(path, "train", clients)
    assert lists is not None
    places = []
    for i, mine in enumerate(lists):
        at = np.searchsorted(pool, mine)
        wrong = mine[(at >= len(pool)) | (pool[np.minimum(at, len(pool) - 1)] != mine)]
        if len(wrong):
            raise DataError(
                f"{path}: client {i} names sample {wrong[0]}, which is not in the training pool "
                f"(it may be "
                "public, kept for validation, or not exist)."
            )
        places.append(at)
    return places


def for_test(y: np.ndarray, clients: int, *, path: str) -> list[np.ndarray] | None:
    """Returns the file's test lists; None if it has none."""
    lists = _lists(path, "test", clients)
    for i, mine in enumerate(lists or ()):
        if len(mine) and (mine.min() < 0 or mine.max() >= len(y)):
            raise DataError(f"{path}: client {i} names a test sample outside 0..{len(y) - 1}.")
    return lists


def _lists(path: str, which: str, clients: int) -> list[np.ndarray] | None:
    file = expand_home(path, "data.partition.path")
    if not file.is_file():
        raise DataError(f"data.partition.path: there is no file {path}.")
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as broken:
        raise DataError(
            f"data.partition.path: {path} is not a readable JSON file ({broken})."
        ) from broken
    if isinstance(held, list):
        held = {"train": held}
    if which == "test" and isinstance(held, dict) and held.get("test") is None:
        return None
    try:
        lists = msgspec.convert(msgspec.convert(held, JsonDict)[which], list[list[int]])
    except (msgspec.ValidationError, KeyError) as wrong:
        raise DataError(
            f'{path}: expected [[0, 5], ...] or {{"train": [[0, 5], ...]}} ({wrong}).'
        ) from None
    if len(lists) != clients:
        raise DataError(f"{path}: {len(lists)} lists under {which!r} for {clients} clients.")
    return [np.array(mine, dtype=np.int64) for mine in lists]


file.test = for_test  # type: ignore[attr-defined]


@partitioner("natural")
def natural(groups: np.ndarray | None, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The dataset's own groups, such as writers or sensors: one a client, or whole groups dealt
    evenly where more.

    With as many groups as clients, client i is the i-th group in ascending order. A client tests on
    the test samples of its groups, if these are known (`Data.test_groups`).
    """
    if groups is None:
        raise ConfigError(
            "data.partition: scheme natural needs the owner of each sample, Data(groups=...); with "
            "client_test: merge_split also of each test sample, Data(test_groups=...)."
        )
    owners = np.unique(groups)
    if len(owners) < clients:
        raise ConfigError(
            f"data.partition: {clients} clients want as many natural groups; there are "
            f"{len(owners)}."
        )
    dealt = np.array_split(owners if len(owners) == clients else rng.permutation(owners), clients)
    return [np.flatnonzero(np.isin(groups, mine)) for mine in dealt]


def of_owners(data: Data, parts: list[np.ndarray]) -> list[np.ndarray] | None:
    """Returns the test samples of the owners of each client's training samples; None where the test
    samples have no owners.
    """
    if data.groups is None or data.test_groups is None:
        return None
    groups = data.groups.numpy()
    tested = data.test_groups.numpy()
    return [np.flatnonzero(np.isin(tested, groups[mine])) for mine in parts]


natural.test = of_owners  # type: ignore[attr-defined]

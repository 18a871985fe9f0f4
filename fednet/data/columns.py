"""A split as Hugging Face's `datasets` has them: rows by the names of their columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fednet.errors import ConfigError, DataError, unknown

if TYPE_CHECKING:
    import datasets


class Columns:
    """The pairs (x, y) of a split, one row at a time: images as (c, h, w) uint8, numbers as they
    are. `Data` reads it as it reads any dataset of pairs.

    x: the column of inputs (default: the only one of images, else the only one that is neither
    label nor of `others`); y: that of labels (default: the only ClassLabel, else `label`). Raises
    ConfigError.
    """

    def __init__(
        self,
        split: datasets.Dataset,
        x: str | None = None,
        y: str | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        # A user's own transform stays, with the columns that it makes; of the package's formats
        # Python's own objects are asked.
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
        x = row[self.x]
        if isinstance(x, list):  # of numbers, nested to one shape
            try:
                x = np.array(x)
            except ValueError as ragged:
                raise DataError(f"column {self.x!r} of row {i}: {ragged}.") from ragged
        for column, value in ((self.x, x), (self.y, row[self.y])):
            if isinstance(value, str):
                raise DataError(
                    f"column {column!r} of row {i} holds {value[:40]!r}; expected numbers, such as "
                    f"of labels by class_encode_column({column!r})."
                )
            if value is None or (isinstance(value, np.ndarray) and value.dtype.kind == "O"):
                raise DataError(
                    f"column {column!r} of row {i} lacks a value; fill it in, or leave the row out."
                )
        return x, row[self.y]


def is_split(found: object) -> bool:
    """Whether it is one, told by what it has: the package need not be installed."""
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

"""Plain values, as in JSON: numbers, text, lists, mappings, true, false, null; and a table of texts
as lines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unicodedata import category

import msgspec

# The values are of any type; msgspec, or a record's type, checks those that are read.
JsonDict = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, to be read only


_meeting = threading.RLock()
_met: set[type] = set()


fields = functools.cache(msgspec.structs.fields)
"""The fields of a Struct type. msgspec reads the annotations at each call."""


# Raised for annotations that cannot be read.
_UNREADABLE = (TypeError, NameError, AttributeError, SyntaxError)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """Admits one thread at a time, and calls `meet` at its end. Functions that a user's threads may
    call do their imports in here.
    """
    with _meeting:
        yield
        meet()


def meet() -> None:
    """Makes msgspec prepare every Struct type. It prepares a type at its first use; if two threads
    use it first at the same time, the process crashes.
    """
    with _meeting:
        below: list[type] = [msgspec.Struct]
        while below:
            kind = below.pop()
            below += kind.__subclasses__()
            if kind not in _met:
                with contextlib.suppress(*_UNREADABLE):  # raised where one is read
                    msgspec.json.Decoder(kind)
                _met.add(kind)


def visible(text: str) -> str:
    """The text with what nobody sees, moves a cursor, or turns the direction of the text beside it
    as an escape, such as \\u202e. Spaces, tabs and the ends of lines stay.
    """
    return _SPECIAL.sub(_escape, text)


_SPECIAL = re.compile(r"[^ -~\t\n]")  # all but the common ones


def _escape(found: re.Match[str]) -> str:
    c = found[0]
    return c if c.isprintable() or category(c) == "Zs" else ascii(c)[1:-1]


def part_of(share: float, n: int) -> int:
    """Returns floor(share * n) for the share as it is written: 0.29 of 100 is 29, although the
    product of the floats is a little less.
    """
    return math.floor(share * n + 1e-9)


def align(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Returns rows of cells as lines, with columns as wide as their widest cell. right: the columns
    whose cells end at the same place.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths))
        placed = (cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in cells)
        lines.append("  ".join(placed).rstrip())
    return lines


def as_json(value: object, indent: int | None = None) -> str:
    """Returns strict JSON, in one line unless it is indented. A float that is not finite, for which
    JSON has no text, is null.
    """
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(
            value, indent=indent, separators=separators, default=plain, allow_nan=False
        )
    except ValueError:
        return json.dumps(_finite(value), indent=indent, separators=separators)


def _finite(value: object) -> object:
    """Returns the plain value with None for floats that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return _finite(plain(value))


def plain(value: object) -> object:
    """Returns an array or a set, as a list for JSON."""
    if hasattr(value, "tolist"):
        found: object = value.tolist()
        return found
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

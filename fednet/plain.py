"""Values as JSON, YAML and msgpack have them: numbers, text, lists, mappings, true, false, null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a mapping holds is known only to who wrote it: msgspec, or a record's type, checks the values
# that are read.
JsonDict = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, to be read only


def plain(value: object) -> object:
    """What JSON has in place of an array or a set."""
    if hasattr(value, "tolist"):
        found: object = value.tolist()
        return found
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

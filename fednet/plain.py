"""Values as JSON, YAML and msgpack have them: numbers, text, lists, mappings, true, false, null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a mapping holds is known only to who wrote it: msgspec, or a record's type, checks the values
# that are read.
JsonDict = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, to be read only

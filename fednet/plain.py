"""Values as JSON, YAML and msgpack have them: numbers, text, lists, mappings, true, false, null."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# What a mapping holds is known only to who wrote it: msgspec, or a record's type, checks the values
# that are read.
JsonDict = dict[str, Any]
JsonMapping = Mapping[str, Any]  # the same, to be read only


_meeting = threading.RLock()
_met: set[type] = set()


# What an annotation that cannot be read raises.
_UNREADABLE = (TypeError, NameError, AttributeError, SyntaxError)


@contextlib.contextmanager
def meeting() -> Iterator[None]:
    """One thread at a time is inside, and when it leaves msgspec has met every Struct there is.
    What threads of a user's own may call begins in here, with whatever it imports.
    """
    with _meeting:
        yield
        meet()


def meet() -> None:
    """Has msgspec meet every Struct there is. What it knows of one it puts together at the first
    use; of two threads that are there at once the second finds it half done, and the process dies.
    """
    with _meeting:
        below: list[type] = [msgspec.Struct]
        while below:
            kind = below.pop()
            below += kind.__subclasses__()
            if kind not in _met:
                with contextlib.suppress(*_UNREADABLE):  # said to whoever reads one
                    msgspec.json.Decoder(kind)
                _met.add(kind)


def part_of(share: float, n: int) -> int:
    """floor(share * n) for the share as it is written: 0.29 of 100 is 29, where the product of the
    two floats is a little less.
    """
    return math.floor(share * n + 1e-9)


def plain(value: object) -> object:
    """What JSON has in place of an array or a set."""
    if hasattr(value, "tolist"):
        found: object = value.tolist()
        return found
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

"""Client ids as users write them: `3`, `0-24,40`, or `3/4`, the third of four shares of all ids.

What a share stands for depends on the number of clients: `Ids.resolve` gives the ids.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fednet.errors import ConfigError

V = TypeVar("V")

LARGEST = 10_000_000  # a range beyond this is a typing error
NUMBER = "[0-9]{1,18}"


@dataclass(frozen=True, slots=True)
class Ids:
    """Holds ids as a user wrote them. what: the flag or key, for errors. listed: ascending; share:
    (k, of), from 1.
    """

    text: str
    what: str = "--id"
    listed: tuple[int, ...] = ()
    share: tuple[int, int] | None = None

    def resolve(self, clients: int) -> tuple[int, ...]:
        """Returns the ids, ascending. clients: how many there are. Shares are contiguous, and
        differ in size by at most one. Raises ConfigError.
        """
        if self.share is not None:
            k, of = self.share
            mine = tuple(range((k - 1) * clients // of, k * clients // of))
            if not mine:
                raise ConfigError(
                    f"{self.what} {self.text}: this share of {clients} clients is empty; use at "
                    f"most {clients} shares."
                )
            return mine
        if self.listed[-1] >= clients:
            raise ConfigError(
                f"{self.what} {self.text}: there is no client {self.listed[-1]}; ids go from 0 to "
                f"{clients - 1}."
            )
        return self.listed


def ranges(ids: Sequence[int]) -> list[int | tuple[int, int]]:
    """Returns ascending ids, with each run of consecutive ones as (first, last)."""
    if len(ids) > 1 and ids[-1] - ids[0] == len(ids) - 1 == len(set(ids)) - 1:
        return [(ids[0], ids[-1])]  # without a look at each
    found: list[int | tuple[int, int]] = []
    at = 0
    while at < len(ids):
        end = at
        while end + 1 < len(ids) and ids[end + 1] == ids[end] + 1:
            end += 1
        found.append(ids[at] if end == at else (ids[at], ids[end]))
        at = end + 1
    return found


def as_text(ids: Iterable[int]) -> str:
    """Returns the ids as `0-3, 7`."""
    return ranges_as_text(ranges(sorted(ids)))


def ranges_as_text(found: Iterable[int | tuple[int, int]]) -> str:
    """Returns the same, of what `ranges` returned."""
    return ", ".join(str(i) if isinstance(i, int) else f"{i[0]}-{i[1]}" for i in found)


def expand_ranges(found: Sequence[object], most: int) -> list[int]:
    """Returns the ids of such ranges, as a peer sent them. Raises ValueError for anything else, and
    for more than `most` ids, before they take memory.
    """
    ends: list[tuple[int, int]] = []
    for item in found:
        pair = tuple(item) if isinstance(item, (list, tuple)) else (item, item)
        if len(pair) != 2 or any(type(n) is not int for n in pair) or not 0 <= pair[0] <= pair[1]:
            raise ValueError("ids: expected whole numbers and [first, last]")
        ends.append(pair)
    if sum(last - first + 1 for first, last in ends) > most:
        raise ValueError(f"ids: more than {most}")
    return [k for first, last in ends for k in range(first, last + 1)]


def parse(text: str, what: str = "--id") -> Ids:
    """Reads `3`, `0-24,40` or `3/4`. what: the flag or key in errors. Raises ConfigError."""
    share = re.fullmatch(rf"\s*({NUMBER})\s*/\s*({NUMBER})\s*", text)
    if share:
        k = int(share[1])
        of = int(share[2])
        if not 1 <= k <= of:
            raise ConfigError(
                f"{what} {text}: expected a share from 1/{of or 1} to {of or 1}/{of or 1}."
            )
        return Ids(text, what, share=(k, of))
    found: set[int] = set()
    for piece in text.split(","):
        span = re.fullmatch(rf"\s*({NUMBER})\s*(?:-\s*({NUMBER}))?\s*", piece)
        if span is None:
            raise ConfigError(
                f"{what} {text}: expected ids such as 3, 0-24,40 or 3/4, got {piece.strip()!r}."
            )
        first = int(span[1])
        last = int(span[2] or span[1])
        if last < first or last > LARGEST:
            raise ConfigError(
                f"{what} {text}: the range {piece.strip()} goes from {first} to {last}; expected "
                f"an upward range of ids below {LARGEST}."
            )
        found.update(range(first, last + 1))
    return Ids(text, what, tuple(sorted(found)))


def own(given: Mapping[str, V], client: int, clients: int) -> V | None:
    """Returns the first value in `given`, by ids or a share of all, that is this client's."""
    for text, value in given.items():
        if client in _members(text, clients):
            return value
    return None


@functools.lru_cache(maxsize=1024)
def _members(text: str, clients: int) -> frozenset[int]:
    return frozenset(parse(text).resolve(clients))

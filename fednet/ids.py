"""Client ids as users write them: `7`, `0-24,40`, or `3/4` (the third of four shares of all ids)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fednet.errors import ConfigError


def share(k: int, n: int, clients: int) -> list[int]:
    """The k-th (from 1) of n contiguous shares of the ids 0..clients-1, their sizes differing by at most one."""
    if not 1 <= k <= n:
        raise ValueError(f"share {k}/{n}: the first number is from 1 to the second")
    return list(range((k - 1) * clients // n, k * clients // n))


@dataclass(frozen=True, slots=True)
class Ids:
    """Either listed ids, or a share (k, n) that is resolved once the number of clients is known."""

    listed: tuple[int, ...] = ()
    share: tuple[int, int] | None = None

    def resolve(self, clients: int) -> list[int]:
        return share(*self.share, clients) if self.share else list(self.listed)


def parse_ids(text: str) -> Ids:
    """Raises ConfigError where `text` is neither ids, ranges nor a share."""
    if match := re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text):
        k, n = int(match[1]), int(match[2])
        if not 1 <= k <= n:
            raise ConfigError(f"--id {text!r}: of {n} shares, the {k}th is none; allowed are 1/{n} to {n}/{n}.")
        return Ids(share=(k, n))
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", piece)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"--id {text!r}: {piece!r} is no id; write 7, 0-24,40 or 3/4 (the third of four shares).")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return Ids(tuple(sorted(set(found))))

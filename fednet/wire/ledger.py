"""The book of every byte.

Each side keeps one: a row a message, the parts of a payload summed. A row's bytes are its payload by kind and its
envelope (headers, ZMTP framing, and the parts' headers). An account stays open until it is known whether what crossed
was useful; `settle` writes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["up", "down"]
Row = dict[str, Any]


@dataclass(slots=True)
class Account:
    """A row that is still being written."""

    direction: Direction
    type: str
    client: int
    round: int
    phase: int
    attempt: int
    purpose: str
    kinds: dict[str, int] = field(default_factory=dict)
    envelope: int = 0
    raw: int = 0
    count: int = 0
    lost: bool = False

    def add(self, kinds: Mapping[str, int], envelope: int, raw: int) -> None:
        for kind, n in kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + n
        self.envelope += envelope
        self.raw += raw
        self.count += 1


class Ledger:
    """Open accounts by any hashable name, and the settled rows, handed to `write` as they are settled."""

    def __init__(self, write: Callable[[Row], None], incarnation: int = 0) -> None:
        self._write = write
        self._open: dict[Any, Account] = {}
        self.incarnation = incarnation
        self.totals: dict[str, int] = {"up": 0, "down": 0}
        self.useful: dict[str, dict[str, int]] = {"up": {}, "down": {}}

    def account(self, name: Any, direction: Direction, type: str, *, client: int = -1, round: int = 0, phase: int = 0,
                attempt: int = 0, purpose: str = "connection") -> Account:
        """The open account of that name, opened if need be."""
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = Account(direction, type, client, round, phase, attempt, purpose)
        return found

    def settle(self, name: Any, useful: bool, **more: Any) -> None:
        """Closes an account and writes its row; no account of that name: nothing crossed, nothing is written."""
        a = self._open.pop(name, None)
        if a is None:
            return
        payload = sum(a.kinds.values())
        total = payload + a.envelope
        self.totals[a.direction] += total
        if useful:
            book = self.useful[a.direction]
            for kind, n in a.kinds.items():
                book[kind] = book.get(kind, 0) + n
        row: Row = {"round": a.round, "client": a.client, "direction": a.direction, "type": a.type, "kinds": a.kinds,
                    "envelope": a.envelope, "bytes": total, "raw_bytes": a.raw, "useful": useful, "purpose": a.purpose,
                    "incarnation": self.incarnation, "phase": a.phase, "attempt": a.attempt}
        if a.count > 1:
            row["count"] = a.count
        self._write({**row, **more})

    def settle_all(self, useful: bool = False, where: Callable[[Any], bool] = lambda name: True) -> None:
        for name in [n for n in self._open if where(n)]:
            self.settle(name, useful)

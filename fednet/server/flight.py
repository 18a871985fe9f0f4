"""What is under way, on the disk before it leaves: a row of the book for each payload whose use is
not known yet, so that the books miss nothing when a server is killed.

A row of `wire.jsonl` is written once it is known what a payload was good for; until then its bytes,
as they add up, stand in `checkpoint/flight.jsonl`, the last line of a number counting. The next
server books what no row of `wire.jsonl` has the number of.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path

from fednet.descriptors import synced
from fednet.files import opened, plain_line, read_lines, repair, write_all, write_aside
from fednet.wire.ledger import Ledger, Row
from fednet.wire.messages import Key

LONG = 4 << 20
"""Bytes of the file from which on it is written anew, with what is still under way: as soon as that
is a fourth of it at most, as it is between rounds.
"""
ROW_BYTES = 300  # of a row, some


class Flight:
    """The file of one run. fsync: lines are there after a power cut too."""

    def __init__(self, path: Path, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync
        repair(path)
        self._file = self._open()
        self._size, self._kept = path.stat().st_size, 0  # bytes; of these, of the last `keep`
        # What earlier servers had under way, the last line of a number counting.
        self._earlier = {(row["incarnation"], row["number"]): row for row in read_lines(path)}

    def _open(self) -> int:
        return opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def booked(self, row: Row) -> None:
        """A row of the book: it is not under way any more."""
        self._earlier.pop((row["incarnation"], row.get("number")), None)

    def take_over(self, ledger: Ledger, sealed: Container[Key]) -> list[Row]:
        """Books what earlier servers left under way, but for what may be of use yet: whose reply is
        `sealed`, and tasks that a client may still have. The rows of these are returned. A task
        that was sent and is not answered may not have arrived: it is `lost`, and its bytes are an
        upper bound.
        """
        for name, row in list(self._earlier.items()):
            if key_of(row) in sealed:
                continue
            if row["direction"] == "down" and row["type"] in ("task", "evaluate"):
                row["lost"] = True
            else:
                del self._earlier[name]
                ledger.enter({**row, "reason": "the server ended"})
        return list(self._earlier.values())

    def note(self, ledger: Ledger) -> None:
        """Writes down what has changed of what is under way: before its bytes leave."""
        rows = ledger.changed()
        if not rows:
            return
        text = b"".join(map(plain_line, rows))
        write_all(self._file, text)
        if self._fsync:
            synced(self._file, self.path)
        self._size += len(text)
        if self._size > max(LONG, 4 * ROW_BYTES * ledger.many, 2 * self._kept):
            self.keep(ledger.under_way())

    def settled(self, ledger: Ledger, rows: Iterable[Row]) -> None:
        """Writes down these rows of the book, which are about to lose the numbers they had under
        way.
        """
        for row in rows:
            self.booked(row)
        self.keep(ledger.under_way())

    def keep(self, rows: Iterable[Row] = ()) -> None:
        """Forgets all but these, and what earlier servers left undecided."""
        text = b"".join(map(plain_line, (*self._earlier.values(), *rows)))
        write_aside(self.path, text, fsync=self._fsync)
        os.close(self._file)
        self._file, self._size, self._kept = self._open(), len(text), len(text)

    def close(self) -> None:
        os.close(self._file)


def key_of(row: Row) -> Key:
    """The task that a payload's row belongs to."""
    return Key(row["round"], row["phase"], row["attempt"], row["client"], row["purpose"])

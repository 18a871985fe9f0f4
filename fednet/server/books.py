"""The write-ahead log of the books: bytes are on disk before they leave.

A row of `wire.jsonl` is written once it is known whether a payload was useful. Until then its
account is a line of `checkpoint/flight.jsonl`, written again whenever bytes are added; the last
line of a number counts. The next server books the accounts that have no row in `wire.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path

from fednet.descriptors import synced
from fednet.files import opened, plain_line, read_lines, repair, write_all, write_aside
from fednet.records.manifest import RunProgress
from fednet.wire.ledger import Bill, Ledger, Row
from fednet.wire.messages import Key

LONG = 4 << 20
"""The size of the file in bytes from which on it is rewritten with the open accounts alone, each
time that it has doubled.
"""


class WriteAheadLog:
    """The file of one run. fsync: lines are there after a power cut too."""

    def __init__(self, path: Path, fsync: bool) -> None:
        self.path = path
        self._fsync = fsync
        repair(path)
        self._file = self._open()
        self._size, self._kept = path.stat().st_size, 0  # bytes; of these, of the last `keep`

    def _open(self) -> int:
        return opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def rows(self) -> dict[tuple[int, int], Row]:
        """Returns the accounts that earlier servers left open, by incarnation and number; the last
        line of each counts.
        """
        return {(row["incarnation"], row["number"]): row for row in read_lines(self.path)}

    def note(self, ledger: Ledger) -> None:
        """Writes the accounts that have changed, before their bytes leave."""
        rows = ledger.changed()
        if not rows:
            return
        text = b"".join(map(plain_line, rows))
        write_all(self._file, text)
        if self._fsync:
            synced(self._file, self.path)
        self._size += len(text)
        if self._size > max(LONG, 2 * self._kept):
            self.keep(ledger)

    def keep(self, ledger: Ledger) -> None:
        """Rewrites the file with the open accounts alone."""
        text = b"".join(map(plain_line, ledger.under_way()))
        write_aside(self.path, text, fsync=self._fsync)
        os.close(self._file)
        self._file, self._size, self._kept = self._open(), len(text), len(text)

    def close(self) -> None:
        os.close(self._file)


def recover(
    flight: WriteAheadLog,
    ledger: Ledger,
    rows: Iterable[Row],
    on_record: Container[Key],
    progress: RunProgress | None,
) -> dict[Key, Bill]:
    """Reads the books of earlier servers: what crossed for tasks that may still count, by task.

    rows: of the book; on_record: replies that are on disk; progress: the checkpoint that is gone on
    from. What nobody can use any more is booked as spent. A task that was sent and is not answered
    may not have arrived: its bytes are an upper bound.
    """
    bills: dict[Key, Bill] = {}
    open_rows = flight.rows()
    under_way = set(progress.tasks()) if progress is not None else set()
    for row in rows:
        ledger.recall(row)
        open_rows.pop((row["incarnation"], row.get("number", 0)), None)
        if progress is None or not row["useful"] or row["purpose"] != "train":
            continue
        # The round is done again, and the same bytes are useful again.
        if row["round"] > progress.round or (row["round"], row["client"]) in under_way:
            bills.setdefault(key_of(row), Bill()).add(ledger.adopt(row, written=True))
    if progress is not None:
        ledger.taken(progress.totals)
    for row in open_rows.values():
        task = row["direction"] == "down" and row["type"] in ("task", "evaluate")
        if key_of(row) not in on_record and not task:
            ledger.enter({**row, "reason": "the server ended"})
            continue
        account = ledger.adopt(row)
        account.cut = account.cut or key_of(row) not in on_record
        bills.setdefault(key_of(row), Bill()).add(account)
    return bills


def key_of(row: Row) -> Key:
    """The task that a payload's row belongs to."""
    return Key(row["round"], row["phase"], row["attempt"], row["client"], row["purpose"])

"""The write-ahead log of the ledger: the bytes of a message are on disk before it leaves.

A row of `wire.jsonl` is written once it is known whether a payload was useful. Until then its
account is a line of `checkpoint/flight.jsonl`, written again whenever bytes are added; the last
line of a number counts. The next server process takes up the accounts that have no row in
`wire.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import cast

import msgspec

from fednet.descriptors import synced
from fednet.files import Lines, checked, opened, read_rows, repair, write_all, write_aside
from fednet.records.manifest import RunProgress
from fednet.wire.ledger import Account, Bill, Ledger, Row
from fednet.wire.messages import Key, Purpose

LONG = 4 << 20
"""The size of the file in bytes from which on it is rewritten with the open accounts alone."""

_decode = msgspec.json.Decoder(Account).decode
_encode = msgspec.json.Encoder().encode


class WriteAheadLog:
    """The file of one run. fsync: lines are there after a power cut too. book: `wire.jsonl`."""

    HOW = os.O_WRONLY | os.O_CREAT | os.O_APPEND

    def __init__(self, path: Path, fsync: bool, book: Lines) -> None:
        self.path, self._book = path, book
        self._fsync = fsync
        repair(path)
        self._file = opened(path, self.HOW)
        self._size, self._kept = path.stat().st_size, 0  # bytes; of these, of the last `keep`

    def note(self, ledger: Ledger) -> None:
        """Writes new rows of the book, and the accounts that have changed, before bytes leave."""
        self._book.flush()
        accounts = ledger.changed()
        if not accounts:
            return
        text = b"".join([checked(_encode(a)) for a in accounts])
        write_all(self._file, text)
        if self._fsync:
            synced(self._file, self.path)
        self._size += len(text)
        # What is open is written again: seldom enough for this not to count, however much it is.
        if self._size > max(LONG, 8 * self._kept):
            self.keep(ledger)

    def keep(self, ledger: Ledger) -> None:
        """Rewrites the file with the open accounts alone."""
        text = b"".join([checked(_encode(a)) for a in ledger.under_way()])
        write_aside(self.path, text, fsync=self._fsync)
        os.close(self._file)
        self._file = opened(self.path, self.HOW)
        self._size = self._kept = len(text)

    def close(self) -> None:
        os.close(self._file)


def recover(
    log: WriteAheadLog,
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
    # The last line of each counts.
    open_accounts = {(a.incarnation, a.number): a for a in read_rows(log.path, _decode)}
    under_way = set(progress.tasks()) if progress is not None else set()
    for row in rows:
        ledger.recall(row)
        open_accounts.pop((row["incarnation"], row.get("number", 0)), None)
        if progress is None or not row["useful"] or row["purpose"] != "train":
            continue
        # The round is done again, and the same bytes are useful again.
        if row["round"] > progress.round or (row["round"], row["client"]) in under_way:
            account = msgspec.convert(row, Account)
            account.written = True
            ledger.adopt(account, bills.setdefault(_key_of(account), []))
    if progress is not None:
        ledger.taken(progress.totals)
    for account in open_accounts.values():
        if not (account.envelope or any(account.kinds.values())):
            continue  # all of it was taken back: it did not leave
        key = _key_of(account)
        task = account.direction == "down" and account.type in ("task", "evaluate")
        account.cut = task and key not in on_record
        if task or key in on_record:
            ledger.adopt(account, bills.setdefault(key, []))
        else:
            ledger.write(account, False, reason="the server ended")
    return bills


def _key_of(a: Account) -> Key:
    """The task that a payload's account belongs to."""
    return Key(a.round, a.phase, a.attempt, a.client, cast(Purpose, a.purpose))

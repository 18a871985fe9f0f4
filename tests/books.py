"""What tests ask of a journal's book and its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fednet.journal.book import Book, add_kinds
from fednet.journal.events import Account, Name, Started
from fednet.journal.file import JournalFile
from fednet.journal.journal import Journal
from fednet.journal.rows import Closed, Row, rows_of
from fednet.records import Messages
from fednet.wire.messages import Key


def useful(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Payload bytes that were of use, by direction and kind."""
    found: dict[str, dict[str, int]] = {"up": {}, "down": {}}
    for row in rows:
        if row["useful"]:
            add_kinds(found[row["direction"]], row["kinds"])
    return found


def each(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a book, one for each message."""
    return [message.line() for row in rows for message in Messages.of(row).each()]


def together(rows: Iterable[dict[str, Any]]) -> list[Row]:
    """The rows of a book for messages that are given by a row each."""
    return rows_of([closed_account(row) for row in rows])


def closed_account(row: dict[str, Any]) -> Closed:
    """What a message came to whose row is this one."""
    key = None
    if row["client"] >= 0:
        key = Key(row["round"], row["phase"], row["attempt"], row["client"], row["purpose"])
    account = Account(
        row["direction"],
        row["type"],
        row["kinds"],
        counted="count" in row,
        envelope=row["envelope"],
        raw_bytes=row["raw_bytes"],
        count=row.get("count", 1),
        incarnation=row["incarnation"],
        final=row.get("final", False),
        cut=row.get("lost", False),
    )
    staleness = [row["staleness"]] if "staleness" in row else []
    reason = row.get("reason", "")
    return Closed(account, [key], row["useful"], reason, staleness, row["round"], row.get("worker"))


def open_accounts(journal: Journal) -> dict[Name, Account]:
    """The accounts that are open, of all connections."""
    return {name: a for mine in journal.book.open_accounts.values() for name, a in mine.items()}


def left(book: Book) -> Counter[str]:
    """Bytes by direction whose rows are not written."""
    accounts = [a for mine in book.open_accounts.values() for a in mine.values()]
    accounts += [a for bill in book.waiting.values() for a in bill if not a.written]
    found = Counter[str]()
    for a in accounts:
        found[a.direction] += a.nbytes
    return found


def booked(rows: Iterable[Row]) -> Counter[str]:
    """Bytes of these rows by direction."""
    found = Counter[str]()
    for row in rows:
        found[row["direction"]] += row["bytes"]
    return found


def journal_in(folder: Path, rows: list[dict[str, Any]] | None = None, server: int = 1) -> Journal:
    """The journal of the nth server that goes on in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write = list[object]().append if rows is None else rows.append
    journal = Journal(write, JournalFile(folder / "journal"))
    journal.recall()
    journal.note(Started(server, 0))
    return journal


def read_book(folder: Path) -> Book:
    """The book of a run whose server may be at work, or was killed: of a copy of its journal, as
    far as that is whole.
    """
    path = folder / "checkpoint" / "journal"
    copy = folder.parent / "journal-copy"
    copy.write_bytes(path.read_bytes() if path.exists() else b"")
    file = JournalFile(copy)
    book = Book()
    for event in file.read():
        book.apply(event)
    file.close()
    copy.unlink()
    return book

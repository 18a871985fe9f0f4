"""The book's file, in the form that `record.wire` asks for.

    messages    wire.jsonl has a line a message
    sums        a line for all messages of a round that are alike: of a type, a direction, a use

In sums, messages stand in `checkpoint/book-N.jsonl` until a checkpoint holds their round: what
counts of an interrupted round is told message by message. N is the length of wire.jsonl that this
book goes on from: of two books the earlier is the one that counts, whenever the server died.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from fednet.descriptors import synced
from fednet.files import Lines, plain_line, read_lines, repair, write_aside
from fednet.plain import JsonDict
from fednet.records import Wire
from fednet.wire.ledger import Row, add_kinds

Task = tuple[int, int]  # (round, client)
SAME = ("round", "direction", "type", "purpose", "useful", "incarnation", "lost", "final")
ADDED = ("envelope", "bytes", "raw_bytes")


class Book:
    """A run's book, opened for writing by its server. form: `record.wire`; fsync: what is summed is
    on the disk before its messages go.
    """

    def __init__(self, directory: Path, form: str = "messages", fsync: bool = False) -> None:
        self.path, self._folder = directory / "wire.jsonl", directory / "checkpoint"
        self._form, self._fsync = form, fsync
        self._due: tuple[int, frozenset[Task]] | None = None
        self._lock = threading.Lock()  # one thread appends, another flushes too
        if form == "messages":
            self._lines = Lines(self.path, plain_line)
            return
        self.path.touch()
        books = _books(self._folder)
        self._from = books[0][0] if books else self.path.stat().st_size
        for _, later in books[1:]:  # the server died before wire.jsonl had what is not in there
            later.unlink()
        os.truncate(self.path, self._from)
        repair(self._open)
        self._lines = Lines(self._open, plain_line)

    @property
    def _open(self) -> Path:
        return self._folder / f"book-{self._from}.jsonl"

    def append(self, row: Row) -> None:
        """Adds a row; `flush` says when it is written."""
        self._lines.append(row)

    def flush(self, fsync: bool = False) -> int:
        """What was appended is with the operating system, and with `fsync` on the disk; returns the
        length of wire.jsonl.
        """
        with self._lock:
            length = self._lines.flush(fsync)
            return length if self._form == "messages" else self._from

    def close(self) -> None:
        self._lines.close()

    # -- in sums -----------------------------------------------------------------------------------
    def held(self, round: int, under_way: Collection[Task] = ()) -> None:
        """A checkpoint holds all up to this round, but for tasks that are under way: `sum_up` may
        follow. Safe to call from another thread than the one that appends.
        """
        self._due = (round, frozenset(under_way)) if self._form != "messages" else None

    @property
    def due(self) -> bool:
        """Whether `held` was called since the last `sum_up`: there are sums to be made."""
        return self._due is not None

    def sum_up(self, before: Callable[[list[Row]], object] = len) -> None:
        """Adds the sums of what a checkpoint holds to wire.jsonl, and takes it out of the book.
        before: told of the messages whose rows go.
        """
        if self._due is None:
            return
        (round, under_way), self._due = self._due, None
        self.flush(self._fsync)
        over, rest = list[Row](), list[Row]()
        for row in read_lines(self._open):
            stays = row["round"] > round or (row["round"], row["client"]) in under_way
            (rest if stays else over).append(row)
        if not over:
            return
        before(over)
        with self._lock:
            self._exchange(b"".join(map(plain_line, summed(over))), rest)

    def _exchange(self, sums: bytes, rest: Iterable[Row]) -> None:
        """Makes the next book, with the rest, then adds the sums to wire.jsonl, then ends the book
        before.
        """
        book, self._from = self._open, self._from + len(sums)
        self._lines.close()
        write_aside(self._open, b"".join(map(plain_line, rest)), fsync=self._fsync)
        with self.path.open("ab") as file:
            file.write(sums)
            file.flush()
            if self._fsync:
                synced(file.fileno(), self.path)
        book.unlink()
        self._lines = Lines(self._open, plain_line)

    def finish(self) -> None:
        """The run is over: all that is left is summed, and no book stays."""
        if self._form != "messages":
            self.held(1 << 62)
            self.sum_up()
            self._lines.close()
            self._open.unlink()


def _books(folder: Path) -> list[tuple[int, Path]]:
    """A folder's books by the length of wire.jsonl that each goes on from, the shortest first."""
    return sorted((int(p.stem.partition("-")[2]), p) for p in folder.glob("book-*.jsonl"))


def parts(directory: Path) -> list[tuple[Path, int | None]]:
    """The files of a run's book, and how many of their bytes are of it, None: all. Of one that is
    being written the last may be gone when it is opened: its rows are summed by then.
    """
    wire, books = directory / "wire.jsonl", _books(directory / "checkpoint")
    return [(wire, books[0][0]), (books[0][1], None)] if books else [(wire, None)]


def rows(directory: Path) -> Iterator[Row]:
    """All rows of a run's book. For whoever holds the run."""
    for path, end in parts(directory):
        yield from read_lines(path, end=end)


def newest(rows: Iterable[Row | Wire]) -> dict[tuple[object, ...], int]:
    """Which server each payload crossed to last, of rows that were of use, in the order of time:
    where a server died between two checkpoints, the next one did rounds again, and those rows
    count that are of this server (`counts`). One that found a payload where it was has a row
    without it, which is the last only where nothing ever crossed.
    """
    last: dict[tuple[object, ...], int] = {}
    crossed: set[tuple[object, ...]] = set()
    for row in rows:
        what = _what(row)
        if any(row["kinds"].values()):
            crossed.add(what)
        elif what in crossed:
            continue
        last[what] = row["incarnation"]
    return last


def counts(row: Row | Wire, newest: Mapping[tuple[object, ...], int]) -> bool:
    """Whether no other server has the payload of a row that was of use."""
    return newest[_what(row)] in (0, row["incarnation"])


def done_again(rows: Iterable[Row]) -> set[int]:
    """The `id` of those rows, of all that were of use, that do not count."""
    useful = [row for row in rows if row["useful"]]
    last = newest(useful)
    return {id(row) for row in useful if not counts(row, last)}


def _what(row: Row | Wire) -> tuple[object, ...]:
    same = ("direction", "type", "round", "phase", "client", "purpose")
    return *(row[n] for n in same), row.get("final")


def summed(rows: Iterable[Row]) -> list[Row]:
    """A row for all that are alike."""
    rows = list(rows)
    again = done_again(rows)
    sums: dict[tuple[object, ...], Wire] = {}
    for row in rows:
        why = (row.get("reason") or "").partition(":")[0]
        twice = row["useful"] and id(row) in again
        same: JsonDict = {name: row.get(name) for name in SAME}
        alike = (why, twice, *same.values())
        if (sum := sums.get(alike)) is None:
            sum = sums[alike] = Wire(
                reason=why or None,
                twice=twice or None,
                messages=0,
                **same,
            )
        sum.messages = (sum.messages or 0) + row.get("messages", 1)
        add_kinds(sum.kinds, row["kinds"])
        for name in ADDED:
            if name in row:
                setattr(sum, name, (getattr(sum, name) or 0) + row[name])
    return [sum.line() for sum in sums.values()]

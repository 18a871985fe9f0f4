"""The books of a run: what is under way, on the disk before it leaves, and what its bytes come to,
round by round.

A row of `wire.jsonl` is written once it is known whether a payload was useful; until then its
bytes, as they add up, are lines of `checkpoint/flight.jsonl`, the last line of a number counting.
The next server books what no row of `wire.jsonl` has the number of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path

from fednet.descriptors import synced
from fednet.files import opened, plain_line, read_lines, repair, write_all, write_aside
from fednet.records.manifest import RunProgress
from fednet.wire.book import done_again
from fednet.wire.ledger import OTHER, Direction, Kinds, Ledger, Row, Tally, add_kinds
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


def nothing() -> Kinds:
    return {"up": {}, "down": {}}


class Accounts:
    """take(round): what this server's book has settled up to a round, and not handed out before.
    enter(row): writes a row into the book.
    """

    def __init__(self, take: Callable[[int], Tally], enter: Callable[[Row], None]) -> None:
        self._take, self._enter = take, enter
        # What earlier servers received, and did not come to say whether it was of use.
        self._undecided: dict[Key, list[Row]] = {}
        self._replayed: dict[
            Key, list[Row]
        ] = {}  # earlier servers' useful rows of rounds that no checkpoint holds
        self._replayed_useful = nothing()  # of these, what is in no record yet

    def read(
        self, rows: Iterable[Row], round: int, under_way: Container[tuple[int, int]] = ()
    ) -> None:
        """What an earlier server received and this one folds is as useful now as it was then.
        round: the last that a checkpoint holds, but for the tasks (round, client) `under_way`.
        """
        for row in rows:
            here = row["round"] > round or (row["round"], row["client"]) in under_way
            if here and row["useful"] and row["purpose"] == "train":
                self._replayed.setdefault(
                    Key(row["round"], row["phase"], row["attempt"], row["client"]), []
                ).append(row)

    def undecided(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._undecided.setdefault(key_of(row), []).append(row)

    def replay(self, key: Key, reason: str = "") -> bool:
        """What crossed to or from an earlier server is used, or is not, for that reason. Where it
        is, its bytes were of use then, and are so now; of what crossed to several servers, what
        crossed to the last. Returns whether anything had crossed.
        """
        return self._replay(key, {"down": reason, "up": reason})

    def had(self, key: Key) -> bool:
        """As `replay`, of a task that an earlier server sent and whose reply came to this one."""
        return self._replay(key, {"down": "", "up": "sent again"})

    def _replay(self, key: Key, reasons: Mapping[str, str]) -> bool:
        """reasons: by the way of the payload."""
        rows, undecided = self._replayed.pop(key, []), self._undecided.pop(key, [])
        again = done_again(rows)
        for row in rows:
            if not reasons[_way(row)] and id(row) not in again:
                add_kinds(self._replayed_useful[row["direction"]], row["kinds"])
        used = {(row["direction"], row["type"]) for row in rows}
        for row in reversed(undecided):
            what = row["direction"], row["type"]
            why = reasons[_way(row)] or ("sent again" if what in used else "")
            used.add(what)
            if why:
                self._enter({**row, "reason": why})
            else:
                self._enter({k: v for k, v in row.items() if k != "lost"} | {"useful": True})
        return any(_way(row) == "down" for row in (*rows, *undecided))

    def spent(
        self, round: int, progress: RunProgress, under_way: Container[tuple[int, int]] = ()
    ) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's
        sums. under_way: tasks (round, client) that may still be answered.
        """
        over = [k for k in self._undecided if k.round <= round]
        for key in [k for k in over if (k.round, k.client) not in under_way]:
            self.replay(key, "the server ended")
        tally = self._take(round)
        tally.merge(Tally(useful=self._replayed_useful))
        self._replayed_useful = nothing()
        for direction, n in tally.spent.items():
            progress.totals[direction] = progress.totals.get(direction, 0) + n
            add_kinds(progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally


def _way(row: Row) -> str:
    """Of the payload that a row belongs to: what asks for one goes the other way."""
    way: Direction = row["direction"]
    return OTHER[way] if row["type"] == "pull" else way

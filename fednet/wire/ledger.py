"""The book of every byte.

Each side keeps one: a row a message, the parts of a payload summed. A row's bytes are its payload
by kind and its envelope (headers, ZMTP framing, and the parts' headers). An account stays open
until it is known whether what crossed was useful; `settle` writes its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fednet.plain import JsonDict, JsonMapping
from fednet.wire.messages import Key

Direction = Literal["up", "down"]
OTHER: dict[Direction, Direction] = {"down": "up", "up": "down"}
Row = JsonDict


@dataclass(slots=True)
class Account:
    """A row that is still being written. counted: its messages are alike, and the row has their
    number. number: of the account, where those under way are written down. incarnation: of the
    process that opened it, 0: this one. cut: its connection
    ended before it was known whether its bytes were useful: if they were not, they may not have
    arrived. written: an earlier process has written its row, as useful.
    """

    direction: Direction
    type: str
    client: int = -1
    round: int = 0
    phase: int = 0
    attempt: int = 0
    purpose: str = "connection"
    counted: bool = False
    kinds: dict[str, int] = field(default_factory=dict)
    envelope: int = 0
    raw: int = 0
    count: int = 0
    number: int = 0
    incarnation: int = 0
    cut: bool = False
    final: bool = False
    written: bool = False

    def add(self, kinds: Mapping[str, int], envelope: int, raw: int) -> None:
        """Adds one message. raw: its payload uncompressed."""
        for kind, n in kinds.items():
            self.kinds[kind] = self.kinds.get(kind, 0) + n
        self.envelope += envelope
        self.raw += raw
        self.count += 1


@dataclass(slots=True)
class Bill:
    """What crossed for one attempt at a task, to and from this process and earlier ones. down: the
    task, and the pulls that fetched it. up: the reply, and the pulls that fetched it.
    """

    down: list[Account] = field(default_factory=list)
    up: list[Account] = field(default_factory=list)

    def add(self, account: Account) -> None:
        way = account.direction
        if account.type == "pull":
            way = OTHER[way]
        accounts = self.down if way == "down" else self.up
        accounts.append(account)


Kinds = dict[str, dict[str, int]]


@dataclass(slots=True)
class Tally:
    """Sums over settled rows. spent: all bytes by direction; useful: payload bytes of the
    method's own messages, by direction and kind (evaluations are no part of a method's cost).
    """

    spent: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    useful: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})

    def add(self, row: JsonMapping) -> None:
        """Adds a settled row of the book."""
        self.spent[row["direction"]] += row["bytes"]
        if row["useful"] and row["purpose"] == "train":
            add_kinds(self.useful[row["direction"]], row["kinds"])

    def columns(self) -> dict[str, int]:
        """What was spent, as a round's record has it."""
        return {"bytes_up": self.spent["up"], "bytes_down": self.spent["down"]}

    def merge(self, other: Tally) -> None:
        """Adds another's sums, in place."""
        for direction in ("up", "down"):
            self.spent[direction] += other.spent[direction]
            add_kinds(self.useful[direction], other.useful[direction])


def add_kinds(into: dict[str, int], kinds: Mapping[str, int]) -> None:
    """Adds bytes by kind, in place."""
    for kind, n in kinds.items():
        into[kind] = into.get(kind, 0) + n


# Of an account: its connection, direction and what it is for; and of which task.
Name = tuple[bytes, Direction, str] | tuple[bytes, Direction, str, object]


class Ledger:
    """Open accounts by name, whose first item is the connection, and the settled rows, handed to
    `write` as they are settled.

    totals: all bytes settled so far, by earlier processes too. useful: payload
    bytes that were of use, by direction and kind. by_round: keeps what was settled for each round
    until it is taken. final: (round, phase) of the evaluation after the last round, whose rows say
    so. numbered: accounts that are open have numbers, and are told as rows by
    `changed` and `under_way`.
    """

    def __init__(
        self,
        write: Callable[[Row], None],
        incarnation: int = 0,
        by_round: bool = True,
        numbered: bool = False,
    ) -> None:
        self._write = write
        self._open: dict[bytes, dict[Name, Account]] = {}  # by connection and name
        self._untaken: dict[int, Tally] = {}  # by round: settled, and not in a round's record yet
        self._by_round = by_round
        self._numbered, self._number = numbered, 0
        self._changed: dict[int, Account] = {}
        self._billed: dict[int, Account] = {}  # by identity: of bills that are not settled
        self.incarnation = incarnation
        self.final: tuple[int, int] | None = None
        self.totals: dict[str, int] = {"up": 0, "down": 0}
        self._own: dict[str, int] = {"up": 0, "down": 0}  # settled, that crossed by this process
        self.useful: dict[str, dict[str, int]] = {"up": {}, "down": {}}

    def account(
        self,
        name: Name,
        direction: Direction,
        type: str,
        key: Key | None = None,
        counted: bool = False,
    ) -> Account:
        """The open account of that name, to be added to; opened if need be. key: of the task that
        it belongs to.
        """
        mine = self._open.get(name[0])
        if mine is None:
            mine = self._open[name[0]] = {}
        found = mine.get(name)
        if found is None:
            found = mine[name] = Account(direction, type, counted=counted)
            if key is not None:
                found.round, found.phase, found.attempt = key.round, key.phase, key.attempt
                found.client, found.purpose = key.client, key.purpose
                found.final = key.purpose == "evaluate" and (key.round, key.phase) == self.final
            if self._numbered:
                self._number += 1
                found.number = self._number
        if self._numbered:
            self._changed[found.number] = found
        return found

    def changed(self) -> list[Row]:
        """The open accounts that were added to since this was asked last."""
        accounts, self._changed = self._changed, {}
        return [self._row(a, False) for a in accounts.values() if a.count]

    def under_way(self) -> list[Row]:
        """All accounts that are open, as rows."""
        return [self._row(a, False) for a in self._all()]

    def _all(self) -> Iterator[Account]:
        for mine in self._open.values():
            yield from mine.values()
        yield from self._billed.values()

    def move(self, names: Iterable[Name], bill: Bill) -> None:
        """Takes these accounts from their connections into a bill, for `settle_bill`."""
        for name in names:
            mine = self._open.get(name[0], {})
            account = mine.pop(name, None)
            if account is not None:
                account.cut = False  # its task was answered, so that all of it arrived
                self._billed[id(account)] = account
                bill.add(account)
                if not mine:
                    del self._open[name[0]]

    def adopt(self, row: Row, written: bool = False) -> Account:
        """An account of an earlier process, by its row. written: the row is in the book."""
        account = Account(
            row["direction"],
            row["type"],
            row["client"],
            row["round"],
            row["phase"],
            row["attempt"],
            row["purpose"],
            kinds=row["kinds"],
            envelope=row["envelope"],
            raw=row["raw_bytes"],
            count=1,
            number=row.get("number", 0),
            incarnation=row["incarnation"],
            cut=row.get("lost", False),
            final=row.get("final", False),
            written=written,
        )
        if not written:
            self._billed[id(account)] = account
        return account

    def settle_bill(
        self, bill: Bill, useful: bool, reason: str = "", staleness: int | None = None
    ) -> None:
        """Writes the rows of a bill. Of a payload that crossed to several servers the last one
        is useful. reason: why nothing is. staleness: of the reply.
        """
        for way, more in ((bill.down, {}), (bill.up, {"staleness": staleness})):
            own = self.incarnation
            last = max([a.incarnation or own for a in way if any(a.kinds.values())], default=0)
            for a in way:
                counts = useful and (a.incarnation or own) >= last
                if a.written:
                    if counts:  # in no round's record yet
                        tally = self._untaken.setdefault(a.round, Tally())
                        add_kinds(tally.useful[a.direction], a.kinds)
                    continue
                del self._billed[id(a)]
                if not a.incarnation:
                    self._changed.pop(a.number, None)
                why = "sent again" if useful else reason
                lost = True if a.cut and not counts else None
                self.write(a, counts, **more, reason=None if counts else why, lost=lost)
            way.clear()

    def open(self, whose: bytes | None = None) -> list[Name]:
        """Names of the accounts that are open: of one connection, or of all."""
        if whose is not None:
            return list(self._open.get(whose, ()))
        return [name for mine in self._open.values() for name in mine]

    def cut(self, name: Name, sent: bool) -> None:
        """The connection of that account has ended. sent: over it, by this side."""
        self._open[name[0]][name].cut = sent

    def take_back(self, name: Name, kinds: Mapping[str, int], envelope: int, raw: int) -> None:
        """What was added did not leave."""
        account = self._open.get(name[0], {}).get(name)
        if account is None:
            return
        account.add({kind: -n for kind, n in kinds.items()}, -envelope, -raw)
        account.count -= 2  # the message, and what took it back
        if not account.count:
            self._close(name)

    def _close(self, name: Name) -> Account | None:
        """The account of that name, which is open no more; None where there was none."""
        mine = self._open.get(name[0])
        account = None if mine is None else mine.pop(name, None)
        if mine is None or account is None:
            return None
        if not mine:
            del self._open[name[0]]
        self._changed.pop(account.number, None)
        return account

    def crossed(self) -> dict[str, int]:
        """All bytes that crossed the network to or from this process, settled or not."""
        crossed = dict(self._own)
        for a in self._all():
            if not a.incarnation:
                crossed[a.direction] += sum(a.kinds.values()) + a.envelope
        return crossed

    def settle(self, name: Name, useful: bool, **more: object) -> None:
        """Closes an account and writes its row; no account of that name: nothing crossed, nothing
        is written.
        """
        account = self._close(name)
        if account is None:
            return
        if account.cut and not useful:  # it may not have arrived: its bytes are an upper bound
            more = {"lost": True, **more}
        self.write(account, useful, **more)

    def write(self, a: Account, useful: bool, **more: object) -> None:
        """Writes a row; `more` is added to its fields or replaces them."""
        self.enter(self._row(a, useful, **more))

    def _row(self, a: Account, useful: bool, **more: object) -> Row:
        """Makes a row with the fields of `records.Wire`."""
        row: Row = {
            "round": a.round,
            "client": a.client,
            "direction": a.direction,
            "type": a.type,
            "kinds": a.kinds,
            "envelope": a.envelope,
            "bytes": sum(a.kinds.values()) + a.envelope,
            "raw_bytes": a.raw,
            "useful": useful,
            "purpose": a.purpose,
            "incarnation": a.incarnation or self.incarnation,
            "phase": a.phase,
            "attempt": a.attempt,
        }
        if a.final:
            row["final"] = True
        if a.counted:
            row["count"] = a.count
        if a.number:
            row["number"] = a.number
        for name, value in more.items():
            if value is not None:
                row[name] = value
        return row

    def enter(self, row: Row) -> None:
        """A row of this server's, or one that an earlier one left under way."""
        self.recall(row)
        self._write(row)

    def recall(self, row: Row) -> None:
        """Counts a row: one just written, or by an earlier process of this side. What was spent is
        spent.
        """
        self.totals[row["direction"]] += row["bytes"]
        if row["incarnation"] == self.incarnation:
            self._own[row["direction"]] += row["bytes"]
        if row["useful"]:
            add_kinds(self.useful[row["direction"]], row["kinds"])
        if self._by_round:
            tally = self._untaken.get(row["round"])
            if tally is None:
                tally = self._untaken[row["round"]] = Tally()
            tally.add(row)

    def taken(self, before: Mapping[str, int]) -> None:
        """So many bytes were taken by an earlier process; what else it spent is taken with the next
        round's.
        """
        spent = {d: self.totals[d] - before.get(d, 0) for d in ("up", "down")}
        self._untaken = {0: Tally(spent=spent)}

    def take(self, round: int) -> Tally:
        """What was settled for rounds up to this one and not taken before."""
        taken = Tally()
        for r in [r for r in self._untaken if r <= round]:
            taken.merge(self._untaken.pop(r))
        return taken

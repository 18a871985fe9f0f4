"""The ledger of every byte: the accounts that are open, and what becomes of them.

Each side keeps one, and writes its rows to its book (`wire.jsonl`): a row a message, the parts of a
payload summed. A row's bytes are its payload by kind and its envelope (headers, ZMTP framing, and
the parts' headers).

    add           a message crosses: its bytes go to an account, which is opened if need be
    add_to_bill   a reply was accepted: its accounts, and those of its task, become its bill
    settle_bill   the round knows whether the reply was useful: the bill's rows are written
    settle        what belongs to no accepted reply: the account's row is written
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from fednet.plain import JsonDict
from fednet.wire.messages import Field, Key

Direction = Literal["up", "down"]
OTHER: dict[Direction, Direction] = {"down": "up", "up": "down"}
Row = JsonDict
Kinds = dict[str, dict[str, int]]  # bytes, by direction and kind


class Account(msgspec.Struct, omit_defaults=True):
    """The bytes of a row that is not written yet: more may be added, or it is not known whether
    they were useful. Until then it is a line of the write-ahead log.

    counted: its messages are alike, and the row has their number. number: of the account, where
    those under way are written down. incarnation: of the process that opened it. cut: its
    connection ended before it was known whether its bytes were useful: if they were not, they may
    not have arrived. written: an earlier process has written its row, as useful.
    """

    direction: Direction
    type: str
    kinds: dict[str, int] = {}
    client: int = -1
    round: int = 0
    phase: int = 0
    attempt: int = 0
    purpose: str = "connection"
    counted: bool = False
    envelope: int = 0
    raw_bytes: int = 0
    count: int = 0
    number: int = 0
    incarnation: int = 0
    final: bool = False
    cut: bool = False
    written: bool = False


Bill = list[Account]
"""What crossed for one attempt at a task, to and from this process and earlier ones: the task, the
reply, and the pulls that fetched each."""


@dataclass(slots=True)
class Tally:
    """Sums over settled rows. spent: all bytes by direction; useful: payload bytes of the
    method's own messages, by direction and kind (evaluations are no part of a method's cost).
    """

    spent: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    useful: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})


def add_kinds(into: dict[str, int], kinds: Mapping[str, int]) -> None:
    """Adds bytes by kind, in place."""
    for kind, n in kinds.items():
        into[kind] = into.get(kind, 0) + n


# Of an account: its connection, direction and type. Then, where it is of one task, the task's key;
# and an object of its own where it is one message that no other is added to.
AccountName = tuple[bytes, Direction, str] | tuple[bytes, Direction, str, object]


class Ledger:
    """Open accounts by name, whose first item is the connection, and the settled rows, handed to
    `write` as they are settled.

    totals: all bytes settled so far, by earlier processes too. useful: payload
    bytes that were of use, by direction and kind. by_round: keeps what was settled for each round
    until it is taken. final: (round, phase) of the evaluation after the last round, whose rows say
    so. numbered: open accounts have numbers, and `changed` returns those that were added to.
    forms: of payloads whose parts follow, by the name of their account.
    """

    def __init__(
        self,
        write: Callable[[Row], None],
        incarnation: int = 0,
        by_round: bool = True,
        numbered: bool = False,
    ) -> None:
        self._write = write
        self._open: dict[bytes, dict[AccountName, Account]] = {}  # by connection and name
        self.forms: dict[AccountName, Sequence[Field]] = {}
        self._untaken: dict[int, Tally] = {}  # by round: settled, and not in a round's record yet
        self._by_round = by_round
        self._numbered, self._number = numbered, 0
        self._changed: dict[int, Account] = {}
        self._billed: dict[int, Account] = {}  # by identity: of bills that are not settled
        self.incarnation = incarnation
        self.final: tuple[int, int] | None = None
        self.totals: dict[str, int] = {"up": 0, "down": 0}
        self._own: dict[str, int] = {"up": 0, "down": 0}  # settled, that crossed by this process
        self.useful: Kinds = {"up": {}, "down": {}}

    # -- open accounts -----------------------------------------------------------------------------
    def add(
        self,
        name: AccountName,
        type: str,
        envelope: int,
        key: Key | None = None,
        kinds: Mapping[str, int] = {},
        raw: int = 0,
        counted: bool = False,
    ) -> None:
        """Adds a message to the account of that name, which is opened if need be. key: of the task
        that it belongs to. kinds, raw: bytes of its payload, by kind and before compression.
        """
        mine = self._open.setdefault(name[0], {})
        found = mine.get(name)
        if found is None:
            found = Account(name[1], type, counted=counted, incarnation=self.incarnation)
            mine[name] = found
            if key is not None:
                found.round, found.phase, found.attempt = key.round, key.phase, key.attempt
                found.client, found.purpose = key.client, key.purpose
                found.final = key.purpose == "evaluate" and (key.round, key.phase) == self.final
            if self._numbered:
                self._number += 1
                found.number = self._number
        if self._numbered:
            self._changed[found.number] = found
        add_kinds(found.kinds, kinds)
        found.envelope += envelope
        found.raw_bytes += raw
        found.count += 1

    def open(self, whose: bytes | None = None) -> dict[AccountName, Account]:
        """The accounts that are open, by name: of one connection, or of all."""
        if whose is not None:
            return dict(self._open.get(whose, ()))
        return {name: a for mine in self._open.values() for name, a in mine.items()}

    def changed(self) -> list[Account]:
        """The accounts that were added to, or taken back from, since this was asked last. One of
        which nothing is left has count 0.
        """
        changed = list(self._changed.values())
        self._changed.clear()
        return changed

    def under_way(self) -> list[Account]:
        """All accounts whose rows are not written yet."""
        return [*self.open().values(), *self._billed.values()]

    def take_back(
        self, name: AccountName, envelope: int, kinds: Mapping[str, int], raw: int
    ) -> None:
        """A message that was added did not leave."""
        account = self._open.get(name[0], {}).get(name)
        if account is None:
            return
        add_kinds(account.kinds, {kind: -n for kind, n in kinds.items()})
        account.envelope -= envelope
        account.raw_bytes -= raw
        account.count -= 1
        if self._numbered:
            self._changed[account.number] = account
        if not account.count:
            self._close(name)

    def _close(self, name: AccountName) -> Account | None:
        """Returns the account of that name, which is open no more; None where there was none."""
        self.forms.pop(name, None)
        mine = self._open.get(name[0], {})
        account = mine.pop(name, None)
        if account is not None and not mine:
            del self._open[name[0]]
        return account

    def crossed(self) -> dict[str, int]:
        """All bytes that crossed the network to or from this process, settled or not."""
        crossed = dict(self._own)
        for a in self.under_way():
            if a.incarnation == self.incarnation:
                crossed[a.direction] += sum(a.kinds.values()) + a.envelope
        return crossed

    # -- bills -------------------------------------------------------------------------------------
    def add_to_bill(self, bill: Bill, key: Key, down: bytes | None, up: bytes) -> None:
        """Takes what crossed for a reply that was accepted from its connections into its bill.
        down, up: those over which the task went and the reply came; down None: the reply is an
        evaluation within a task.
        """
        names: list[AccountName] = [(up, "up", "reply", key), (up, "down", "pull", key)]
        if down is not None:
            names += [(down, "down", "task", key), (down, "up", "pull", key)]
        for name in names:
            account = self._close(name)
            if account is not None:
                account.cut = False  # its task was answered, so that all of it arrived
                bill.append(account)
                self._billed[id(account)] = account

    def adopt(self, account: Account, bill: Bill) -> None:
        """Adds an account of an earlier process to a bill that is not settled."""
        bill.append(account)
        if not account.written:
            self._billed[id(account)] = account

    def settle_bill(
        self, bill: Bill, useful: bool, reason: str = "", staleness: int | None = None
    ) -> None:
        """Writes the rows of a bill. If a payload crossed once to each of several server
        processes, only its last crossing is useful. reason: why nothing is useful. staleness: of
        the reply.
        """
        for way in ("down", "up"):
            last, accounts = 0, list[Account]()
            for a in bill:
                if (a.direction == way) != (a.type == "pull"):  # those cross the other way
                    accounts.append(a)
                    if any(a.kinds.values()):
                        last = max(last, a.incarnation)
            for a in accounts:
                counts = useful and a.incarnation >= last
                if a.written:
                    if counts:  # in no round's record yet
                        tally = self._untaken.setdefault(a.round, Tally())
                        add_kinds(tally.useful[a.direction], a.kinds)
                    continue
                del self._billed[id(a)]
                why = None if counts else reason
                if useful and not counts:
                    why = "sent again"
                self.write(a, counts, staleness=staleness if way == "up" else None, reason=why)
        bill.clear()

    # -- rows --------------------------------------------------------------------------------------
    def settle(self, name: AccountName, useful: bool, **more: object) -> None:
        """Closes an account and writes its row; no account of that name: nothing crossed, nothing
        is written.
        """
        account = self._close(name)
        if account is not None:
            self.write(account, useful, **more)

    def write(self, a: Account, useful: bool, **more: object) -> None:
        """Writes the row of an account, with the fields of `records.Wire`; those in `more` that are
        not None are added, or replace others.
        """
        if a.incarnation == self.incarnation:
            self._changed.pop(a.number, None)
        row: Row = {
            "round": a.round,
            "client": a.client,
            "direction": a.direction,
            "type": a.type,
            "kinds": a.kinds,
            "envelope": a.envelope,
            "bytes": sum(a.kinds.values()) + a.envelope,
            "raw_bytes": a.raw_bytes,
            "useful": useful,
            "purpose": a.purpose,
            "incarnation": a.incarnation,
            "phase": a.phase,
            "attempt": a.attempt,
        }
        if a.final:
            row["final"] = True
        if a.counted:
            row["count"] = a.count
        if a.number:
            row["number"] = a.number
        if a.cut and not useful:  # it may not have arrived: its bytes are an upper bound
            row["lost"] = True
        for name, value in more.items():
            if value is not None:
                row[name] = value
        self.recall(row)
        self._write(row)

    def recall(self, row: Row) -> None:
        """Counts a row: one just written, or by an earlier process of this side. What was spent is
        spent.
        """
        direction, nbytes = row["direction"], row["bytes"]
        self.totals[direction] += nbytes
        if row["incarnation"] == self.incarnation:
            self._own[direction] += nbytes
        if row["useful"]:
            add_kinds(self.useful[direction], row["kinds"])
        if self._by_round:
            tally = self._untaken.get(row["round"])
            if tally is None:
                tally = self._untaken[row["round"]] = Tally()
            tally.spent[direction] += nbytes
            if row["useful"] and row["purpose"] == "train":
                add_kinds(tally.useful[direction], row["kinds"])

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
            tally = self._untaken.pop(r)
            for direction in ("up", "down"):
                taken.spent[direction] += tally.spent[direction]
                add_kinds(taken.useful[direction], tally.useful[direction])
        return taken

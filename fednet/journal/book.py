"""The book: what follows from the events of a journal.

`Book.apply` takes one event after another, does no I/O and reads no clock. So a server that reads
the events of the one before it has that server's book, and the same rows. A row's bytes are its
payload by kind and its envelope (headers, ZMTP framing, and the parts' headers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fednet.journal.events import (
    Accepted,
    Account,
    AccountsClosed,
    CountsClosed,
    Crossed,
    Cut,
    Event,
    Forgotten,
    Name,
    Over,
    Revoked,
    Snapshot,
    Started,
    Tally,
    Undone,
    Verdict,
    Welcomed,
)
from fednet.journal.rows import Closed, Row, rows_of
from fednet.wire.messages import Field, Key

Kinds = dict[str, dict[str, int]]  # bytes, by direction and kind
AnyAttempt = tuple[int, int, int, str]  # round, phase, client and purpose of a task

# -- why bytes were wasted
ENDED = "the server ended"
LEFT_OUT = "left out"  # of a reply that was not aggregated


def add_kinds(into: dict[str, int], kinds: Mapping[str, int], times: int = 1) -> None:
    """Adds bytes by kind, so many times, in place."""
    for kind, n in kinds.items():
        into[kind] = into.get(kind, 0) + n * times


def without_attempt(key: Key) -> AnyAttempt:
    """Names the reply to a task: that to a later attempt takes the place of an earlier one."""
    return key.round, key.phase, key.client, key.purpose


class Book:
    """What follows from the events: open accounts, accepted replies, and rows."""

    def __init__(self, by_round: bool = True) -> None:
        self.incarnation = 0
        self.open_accounts: dict[bytes, dict[Name, Account]] = {}  # accounts by connection and name
        # By task, the accounts of a reply that was accepted, and of what earlier servers sent.
        self.waiting: dict[Key, tuple[Account, ...]] = {}
        # Tasks of `waiting` that an earlier server sent and that have no reply here yet.
        self.inherited: set[Key] = set()
        # Replies on disk that a later server may use.
        self.accepted: dict[AnyAttempt, Accepted] = {}
        # By task, accounts whose rows are written as useful: if a later server goes on from a
        # checkpoint before, their round is done again, and the same bytes are useful again.
        self.useful: dict[Key, tuple[Account, ...]] = {}
        self.totals: dict[str, int] = {"up": 0, "down": 0}  # bytes of all rows by direction
        # Bytes that crossed to or from this process.
        self.crossed: dict[str, int] = {"up": 0, "down": 0}
        # By round, what is in no round's record yet.
        self.unrecorded = defaultdict[int, Tally](Tally)
        self.recorded = Tally()  # by the last `Over`
        # Of payloads whose parts follow, by the name of their account; a later process needs none.
        self.forms: dict[Name, Sequence[Field]] = {}
        self._opened: dict[tuple[str, str], Account] = {}  # the last, by direction and type
        self._by_round = by_round  # whether there are records of rounds

    def apply(self, event: Event) -> Sequence[Row]:
        """Returns the rows that are known now."""
        closed = _APPLY[type(event)](self, event)
        return rows_of(closed) if closed else ()

    # -- bytes -------------------------------------------------------------------------------------
    def _crossed(self, e: Crossed) -> Sequence[Closed]:
        direction = e.names[0][1]
        opened = Account(
            direction,
            e.type,
            e.kinds,
            e.key,
            e.counted,
            e.envelope,
            e.raw,
            1,
            self.incarnation,
            e.final,
        )
        last = self._opened.get((direction, e.type))
        if last == opened:
            opened = last  # they can be closed together
        else:
            self._opened[direction, e.type] = opened
        for name in e.names:
            accounts = self.open_accounts.get(name[0])
            if accounts is None:
                accounts = self.open_accounts[name[0]] = {}
            account = accounts.get(name)
            accounts[name] = opened if account is None else _added(account, e, 1)
        nbytes = e.envelope + sum(e.kinds.values())
        self.crossed[direction] += nbytes * len(e.names)
        return ()

    def _undone(self, e: Undone) -> Sequence[Closed]:
        accounts = self.open_accounts.get(e.name[0], {})
        account = accounts.get(e.name)
        if account is not None:
            account = accounts[e.name] = _added(account, e, -1)
            self.crossed[account.direction] -= e.envelope + sum(e.kinds.values())
            if not account.count:
                self._close([e.name])
        return ()

    def _cut(self, e: Cut) -> Sequence[Closed]:
        accounts = self.open_accounts.get(e.conn, {})
        for name, account in accounts.items():
            if isinstance(name[3], Key):
                accounts[name] = msgspec.structs.replace(account, cut=name[1] == e.out)
        return ()

    def _accounts_closed(self, e: AccountsClosed) -> Sequence[Closed]:
        closed: list[Closed] = []
        for name, account in self._close(e.names):
            key = _key_of(name, account)
            round = _round_of(key) if e.round is None else e.round
            one = Closed(account, [key], e.useful, e.reason, round=round, worker=e.worker)
            closed.append(one)
        return self._add_to_sums(closed)

    def _counts_closed(self, e: CountsClosed) -> Sequence[Closed]:
        together: dict[tuple[str, str], Account] = {}
        for _, account in self._close(e.names):
            which = account.direction, account.type
            first = together.get(which)
            if first is None:
                together[which] = account
                continue
            together[which] = msgspec.structs.replace(
                first,
                envelope=first.envelope + account.envelope,
                count=first.count + account.count,
            )
        closed = [Closed(account, [None], False, round=e.round) for account in together.values()]
        return self._add_to_sums(closed)

    def _close(self, names: Iterable[Name]) -> list[tuple[Name, Account]]:
        """Returns the accounts of these names, which are open no more, but for those to which
        nothing has crossed.
        """
        closed: list[tuple[Name, Account]] = []
        for name in names:
            accounts = self.open_accounts.get(name[0])
            if accounts is None or name not in accounts:
                continue
            closed.append((name, accounts.pop(name)))
            if not accounts:
                del self.open_accounts[name[0]]
            if self.forms:
                self.forms.pop(name, None)
        return closed

    # -- replies -----------------------------------------------------------------------------------
    def _accepted(self, e: Accepted) -> Sequence[Closed]:
        key = e.message.key
        names: list[Name] = [(e.up, "up", "reply", key), (e.up, "down", "pull", key)]
        if e.down is not None:
            names = [(e.down, "down", "task", key), (e.down, "up", "pull", key), *names]
        accounts: list[Account] = []
        for _, account in self._close(names):
            if account.cut:  # its task was answered, so that all of it arrived
                account = msgspec.structs.replace(account, cut=False)
            accounts.append(account)
        self.waiting[key] = (*self.waiting.get(key, ()), *accounts)
        self.inherited.discard(key)
        if e.stored:
            self.accepted[without_attempt(key)] = e
        return ()

    def _revoked(self, e: Revoked) -> Sequence[Closed]:
        self.accepted.pop(without_attempt(e.key), None)
        return ()

    def _verdict(self, e: Verdict) -> Sequence[Closed]:
        return self._add_to_sums(self._close_waiting(e.replies))

    def _close_waiting(self, replies: Iterable[tuple[Key, str, int | None]]) -> list[Closed]:
        """Closes the accounts of tasks and of their replies, whose use is known; `_add_to_sums`
        comes next. replies: as a `Verdict` has them. Those that have the same accounts, and came to
        the same, are closed together.
        """
        groups: dict[tuple[object, ...], _Settled] = {}
        for key, reason, staleness in replies:
            accounts = self.waiting.pop(key, ())
            self.inherited.discard(key)
            alike = (
                reason,
                staleness is None,
                key.round,
                key.phase,
                key.attempt,
                key.purpose,
                *map(id, accounts),  # the group keeps them
            )
            group = groups.get(alike)
            if group is None:
                group = groups[alike] = _Settled(accounts, reason, [], [])
            group.keys.append(key)
            if staleness is not None:
                group.staleness.append(staleness)
        closed: list[Closed] = []
        for group in groups.values():
            closed += self._settle(group)
        return closed

    def _settle(self, group: _Settled) -> list[Closed]:
        """If a payload crossed once to each of several server processes, only its last crossing is
        useful.
        """
        closed: list[Closed] = []
        accounts = group.accounts
        keys = group.keys
        first = keys[0]
        last = dict[str, int]()  # by way, the last server process between which payload crossed
        if {a.incarnation for a in accounts} - {self.incarnation}:
            accounts = tuple(sorted(accounts, key=lambda a: a.way))
            for a in accounts:
                if any(a.kinds.values()):
                    last[a.way] = max(a.incarnation, last.get(a.way, 0))
        written: list[Account] = []
        for a in accounts:
            useful = not group.reason and a.incarnation >= last.get(a.way, 0)
            if a.written and useful:  # in no round's record yet
                sums = self.unrecorded[first.round].useful[a.direction]
                add_kinds(sums, a.kinds, len(keys))
            elif not a.written:
                why = "" if useful else group.reason or "sent again"
                staleness = group.staleness if a.way == "up" else ()
                closed.append(Closed(a, keys, useful, why, staleness, first.round))
            if useful and first.purpose == "train":
                written.append(a if a.written else msgspec.structs.replace(a, written=True))
        if written:
            for key in keys:
                self.useful[key] = (*self.useful.get(key, ()), *written)
        return closed

    def _over(self, e: Over) -> Sequence[Closed]:
        left = sorted(_keys_over(self.inherited, e))
        closed = self._add_to_sums(self._close_waiting([(key, ENDED, None) for key in left]))
        self.recorded = Tally()
        for round in [r for r in self.unrecorded if r <= e.round]:
            tally = self.unrecorded.pop(round)
            for direction, nbytes in tally.spent.items():
                self.recorded.spent[direction] += nbytes
                add_kinds(self.recorded.useful[direction], tally.useful[direction])
        return closed

    def _forgotten(self, e: Forgotten) -> Sequence[Closed]:
        for key in _keys_over([accepted.message.key for accepted in self.accepted.values()], e):
            del self.accepted[without_attempt(key)]
        for key in _keys_over(self.useful, e):
            del self.useful[key]
        return ()

    # -- processes ---------------------------------------------------------------------------------
    def _started(self, e: Started) -> Sequence[Closed]:
        """Tasks that the last process sent may still be answered, and replies on disk count; all
        else that it left is wasted.
        """
        self.incarnation = e.incarnation
        self.crossed = {"up": 0, "down": 0}
        left: list[tuple[Key | None, Account]] = []
        if e.round is not None:
            for key in _keys_over(self.useful, e):
                del self.useful[key]
            left += [(key, a) for key, accounts in self.useful.items() for a in accounts]
        left += [(key, a) for key, accounts in self.waiting.items() for a in accounts]
        for accounts in self.open_accounts.values():
            left += [(_key_of(name, a), a) for name, a in accounts.items()]
        self.open_accounts = {}
        self.waiting = {}
        self.useful = {}
        self.forms = {}
        on_disk = {accepted.message.key for accepted in self.accepted.values()}
        closed: list[Closed] = []
        for whose, a in left:
            if not (a.envelope or any(a.kinds.values())):
                continue  # all of it was taken back: it did not leave
            task = a.direction == "down" and a.type in ("task", "evaluate")
            a = msgspec.structs.replace(a, cut=task and whose not in on_disk)
            if whose is not None and (task or whose in on_disk or a.written):
                self.waiting[whose] = (*self.waiting.get(whose, ()), a)
            else:
                closed.append(Closed(a, [whose], False, ENDED, round=_round_of(whose)))
        self._add_to_sums(closed)
        self.inherited = set(self.waiting)
        if e.round is not None:
            # What an earlier process spent since its checkpoint is taken with the next round.
            spent = {way: self.totals[way] - e.totals.get(way, 0) for way in ("up", "down")}
            self.unrecorded.clear()
            self.unrecorded[0] = Tally(spent=spent)
        return closed

    def _welcomed(self, e: Welcomed) -> Sequence[Closed]:
        self.incarnation = e.incarnation
        return ()

    def snapshot(self, generation: int, rows: int) -> Snapshot:
        """All of it, as the event with which a new file begins; see there."""
        return Snapshot(
            generation=generation,
            rows=rows,
            incarnation=self.incarnation,
            open=[one for mine in self.open_accounts.values() for one in mine.items()],
            waiting=list(self.waiting.items()),
            inherited=sorted(self.inherited),
            useful=list(self.useful.items()),
            accepted=list(self.accepted.values()),
            totals=self.totals,
            crossed=self.crossed,
            unrecorded=list(self.unrecorded.items()),
        )

    def _snapshot(self, e: Snapshot) -> Sequence[Closed]:
        self.incarnation = e.incarnation
        self.open_accounts = {}
        for name, account in e.open:
            self.open_accounts.setdefault(name[0], {})[name] = account
        self.waiting = dict(e.waiting)
        self.useful = dict(e.useful)
        self.inherited = set(e.inherited)
        self.accepted = {without_attempt(accepted.message.key): accepted for accepted in e.accepted}
        self.totals = dict(e.totals)
        self.crossed = dict(e.crossed)
        self.unrecorded.clear()
        self.unrecorded.update(e.unrecorded)
        return ()

    # -- rows --------------------------------------------------------------------------------------
    def _add_to_sums(self, closed: list[Closed]) -> list[Closed]:
        """Adds what was closed to the sums, and returns it."""
        for one in closed:
            a = one.account
            key = one.keys[0]
            nbytes = a.nbytes * len(one.keys)
            self.totals[a.direction] += nbytes
            if self._by_round:
                tally = self.unrecorded[one.round]
                tally.spent[a.direction] += nbytes
                if one.useful and key is not None and key.purpose == "train":
                    add_kinds(tally.useful[a.direction], a.kinds, len(one.keys))
        return closed


class _Settled(msgspec.Struct, gc=False):
    """Tasks of one exchange whose replies came to the same, and that have the same accounts.
    reason: why they were wasted; staleness: of each, where that is known.
    """

    accounts: tuple[Account, ...]
    reason: str
    keys: list[Key]
    staleness: list[int]


def _key_of(name: Name, account: Account) -> Key | None:
    """The task that an account belongs to."""
    return name[3] if isinstance(name[3], Key) else account.key


def _round_of(key: Key | None) -> int:
    return 0 if key is None else key.round


def _added(account: Account, e: Crossed | Undone, sign: int) -> Account:
    """The account with a message more, or with sign -1 less."""
    kinds = account.kinds
    if e.kinds:
        kinds = dict(kinds)
        add_kinds(kinds, e.kinds, sign)
    return msgspec.structs.replace(
        account,
        kinds=kinds,
        envelope=account.envelope + sign * e.envelope,
        raw_bytes=account.raw_bytes + sign * e.raw,
        count=account.count + sign,
    )


def _keys_over(keys: Iterable[Key], e: Over | Forgotten | Started) -> list[Key]:
    """Those of rounds up to the event's that are not under way."""
    assert e.round is not None
    under_way = set(e.under_way)
    return [k for k in keys if k.round <= e.round and (k.round, k.client) not in under_way]


_APPLY: dict[type, Callable[[Book, Any], Sequence[Closed]]] = {
    Crossed: Book._crossed,
    Undone: Book._undone,
    Cut: Book._cut,
    AccountsClosed: Book._accounts_closed,
    CountsClosed: Book._counts_closed,
    Accepted: Book._accepted,
    Revoked: Book._revoked,
    Verdict: Book._verdict,
    Over: Book._over,
    Forgotten: Book._forgotten,
    Started: Book._started,
    Welcomed: Book._welcomed,
    Snapshot: Book._snapshot,
}

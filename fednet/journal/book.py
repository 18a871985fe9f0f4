"""The book: what follows from the events of a journal.

`Book.apply` takes one event after another, does no I/O and reads no clock. So a server that reads
the events of the one before it has that server's book, and the same rows. A row's bytes are its
payload by kind and its envelope (headers, ZMTP framing, and the parts' headers).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

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
from fednet.journal.rows import ClosedAccount, Row, rows_of
from fednet.wire.messages import OTHER, Field, Key, Purpose

Kinds = dict[str, dict[str, int]]  # bytes, by direction and kind
AnyAttempt = tuple[int, int, int, str]  # round, phase, client and purpose of a task

# -- why bytes were wasted
ENDED = "the server ended"
LEFT_OUT = "left out"  # of a reply that was not aggregated


def add_kinds(into: dict[str, int], kinds: Mapping[str, int]) -> None:
    """Adds bytes by kind, in place."""
    for kind, n in kinds.items():
        into[kind] = into.get(kind, 0) + n


def without_attempt(key: Key) -> AnyAttempt:
    """Names the reply to a task: that to a later attempt takes the place of an earlier one."""
    return key.round, key.phase, key.client, key.purpose


class Book:
    """What follows from the events: open accounts, accepted replies, and rows."""

    def __init__(self, by_round: bool = True) -> None:
        self.incarnation = 0
        self.open_accounts: dict[bytes, dict[Name, Account]] = {}  # accounts by connection and name
        # By task, the accounts of a reply that was accepted, and of what earlier servers sent.
        self.waiting: dict[Key, list[Account]] = {}
        # Tasks of `waiting` that an earlier server sent and that have no reply here yet.
        self.inherited: set[Key] = set()
        # Replies on disk that a later server may use.
        self.accepted: dict[AnyAttempt, Accepted] = {}
        # By task, accounts whose rows are written as useful: if a later server goes on from a
        # checkpoint before, their round is done again, and the same bytes are useful again.
        self.useful: dict[Key, list[Account]] = {}
        self.totals: dict[str, int] = {"up": 0, "down": 0}  # bytes of all rows by direction
        # Bytes that crossed to or from this process.
        self.crossed: dict[str, int] = {"up": 0, "down": 0}
        # By round, what is in no round's record yet.
        self.unrecorded = defaultdict[int, Tally](Tally)
        self.recorded = Tally()  # by the last `Over`
        # Of payloads whose parts follow, by the name of their account; a later process needs none.
        self.forms: dict[Name, Sequence[Field]] = {}
        self._by_round = by_round  # whether there are records of rounds

    def apply(self, event: Event) -> Sequence[Row]:
        """Returns the rows that are known now."""
        closed = _APPLY[type(event)](self, event)
        return rows_of(closed) if closed else ()

    # -- bytes -------------------------------------------------------------------------------------
    def _crossed(self, e: Crossed) -> Sequence[ClosedAccount]:
        for name in e.names:
            accounts = self.open_accounts.setdefault(name[0], {})
            account = accounts.get(name)
            if account is not None:
                self._add(account, e.envelope, e.kinds, e.raw, 1)
                continue
            key = name[3] if isinstance(name[3], Key) else e.key
            task = (-1, 0, 0, 0, "connection")
            if key is not None:
                task = key.client, key.round, key.phase, key.attempt, key.purpose
            accounts[name] = Account(
                name[1],
                e.type,
                e.kinds,
                *task,
                e.counted,
                e.envelope,
                e.raw,
                1,
                self.incarnation,
                e.final,
            )
        nbytes = e.envelope + sum(e.kinds.values())
        self.crossed[e.names[0][1]] += nbytes * len(e.names)
        return ()

    def _undone(self, e: Undone) -> Sequence[ClosedAccount]:
        account = self.open_accounts.get(e.name[0], {}).get(e.name)
        if account is not None:
            self._add(account, e.envelope, e.kinds, e.raw, -1)
            self.crossed[account.direction] -= e.envelope + sum(e.kinds.values())
            if not account.count:
                self._close([e.name])
        return ()

    def _add(
        self, account: Account, envelope: int, kinds: Mapping[str, int], raw: int, sign: int
    ) -> None:
        """Adds a message to an account, or with sign -1 takes it away."""
        if kinds:
            account.kinds = dict(account.kinds)
            for kind, n in kinds.items():
                account.kinds[kind] = account.kinds.get(kind, 0) + sign * n
        account.envelope += sign * envelope
        account.raw_bytes += sign * raw
        account.count += sign

    def _cut(self, e: Cut) -> Sequence[ClosedAccount]:
        for name, account in self.open_accounts.get(e.conn, {}).items():
            if isinstance(name[3], Key):
                account.cut = name[1] == e.out
        return ()

    def _accounts_closed(self, e: AccountsClosed) -> Sequence[ClosedAccount]:
        closed = [
            _closed(account, e.useful, e.reason, round=e.round, worker=e.worker)
            for account in self._close(e.names)
        ]
        return self._add_to_sums(closed)

    def _counts_closed(self, e: CountsClosed) -> Sequence[ClosedAccount]:
        together: dict[tuple[str, str], Account] = {}
        for account in self._close(e.names):
            first = together.setdefault((account.direction, account.type), account)
            if first is not account:
                first.envelope += account.envelope
                first.count += account.count
        closed = [_closed(account, False, round=e.round) for account in together.values()]
        return self._add_to_sums(closed)

    def _close(self, names: Iterable[Name]) -> list[Account]:
        """Returns the accounts of these names, which are open no more, but for those to which
        nothing has crossed.
        """
        closed: list[Account] = []
        for name in names:
            self.forms.pop(name, None)
            accounts = self.open_accounts.get(name[0], {})
            account = accounts.pop(name, None)
            if account is None:
                continue
            closed.append(account)
            if not accounts:
                del self.open_accounts[name[0]]
        return closed

    # -- replies -----------------------------------------------------------------------------------
    def _accepted(self, e: Accepted) -> Sequence[ClosedAccount]:
        key = e.message.key
        names: list[Name] = []
        if e.down is not None:
            names += [(e.down, "down", "task", key), (e.down, "up", "pull", key)]
        names += [(e.up, "up", "reply", key), (e.up, "down", "pull", key)]
        accounts = self._close(names)
        for account in accounts:
            account.cut = False  # its task was answered, so that all of it arrived
        self.waiting.setdefault(key, []).extend(accounts)
        self.inherited.discard(key)
        if e.stored:
            self.accepted[without_attempt(key)] = e
        return ()

    def _revoked(self, e: Revoked) -> Sequence[ClosedAccount]:
        self.accepted.pop(without_attempt(e.key), None)
        return ()

    def _verdict(self, e: Verdict) -> Sequence[ClosedAccount]:
        closed: list[ClosedAccount] = []
        for key, reason, staleness in e.replies:
            closed += self._close_waiting(key, reason, staleness)
        return self._add_to_sums(closed)

    def _close_waiting(
        self, key: Key, reason: str, staleness: int | None = None
    ) -> list[ClosedAccount]:
        """Closes the accounts of a task and of its reply, whose use is known; `_add_to_sums` comes
        next. If a payload crossed once to each of several server processes, only its last crossing
        is useful.
        """
        waiting = self.waiting.pop(key, [])
        self.inherited.discard(key)
        closed: list[ClosedAccount] = []
        last = dict[str, int]()  # by way, the last server process between which payload crossed
        if {a.incarnation for a in waiting} - {self.incarnation}:
            waiting.sort(key=_way)
            for a in waiting:
                if any(a.kinds.values()):
                    last[_way(a)] = max(a.incarnation, last.get(_way(a), 0))
        for a in waiting:
            way = _way(a)
            useful = not reason and a.incarnation >= last.get(way, 0)
            if a.written and useful:  # in no round's record yet
                add_kinds(self.unrecorded[a.round].useful[a.direction], a.kinds)
            elif not a.written:
                why = "" if useful else reason or "sent again"
                closed.append(_closed(a, useful, why, staleness if way == "up" else None))
            if useful and key.purpose == "train":
                a.written = True
                self.useful.setdefault(key, []).append(a)
        return closed

    def _over(self, e: Over) -> Sequence[ClosedAccount]:
        closed: list[ClosedAccount] = []
        for key in sorted(_keys_over(self.inherited, e)):
            closed += self._close_waiting(key, ENDED)
        self._add_to_sums(closed)
        self.recorded = Tally()
        for round in [r for r in self.unrecorded if r <= e.round]:
            tally = self.unrecorded.pop(round)
            for direction, nbytes in tally.spent.items():
                self.recorded.spent[direction] += nbytes
                add_kinds(self.recorded.useful[direction], tally.useful[direction])
        return closed

    def _forgotten(self, e: Forgotten) -> Sequence[ClosedAccount]:
        for key in _keys_over([accepted.message.key for accepted in self.accepted.values()], e):
            del self.accepted[without_attempt(key)]
        for key in _keys_over(self.useful, e):
            del self.useful[key]
        return ()

    # -- processes ---------------------------------------------------------------------------------
    def _started(self, e: Started) -> Sequence[ClosedAccount]:
        """Tasks that the last process sent may still be answered, and replies on disk count; all
        else that it left is wasted.
        """
        self.incarnation = e.incarnation
        self.crossed = {"up": 0, "down": 0}
        left: list[Account] = []
        if e.round is not None:
            for key in _keys_over(self.useful, e):
                del self.useful[key]
            left += [a for accounts in self.useful.values() for a in accounts]
        left += [a for accounts in self.waiting.values() for a in accounts]
        left += [a for mine in self.open_accounts.values() for a in mine.values()]
        self.open_accounts = {}
        self.waiting = {}
        self.useful = {}
        self.forms = {}
        on_disk = {accepted.message.key for accepted in self.accepted.values()}
        closed: list[ClosedAccount] = []
        for a in left:
            if not (a.envelope or any(a.kinds.values())):
                continue  # all of it was taken back: it did not leave
            key = Key(a.round, a.phase, a.attempt, a.client, cast(Purpose, a.purpose))
            task = a.direction == "down" and a.type in ("task", "evaluate")
            a.cut = task and key not in on_disk
            if task or key in on_disk or a.written:
                self.waiting.setdefault(key, []).append(a)
            else:
                closed.append(_closed(a, False, ENDED))
        self._add_to_sums(closed)
        self.inherited = set(self.waiting)
        if e.round is not None:
            # What an earlier process spent since its checkpoint is taken with the next round.
            spent = {way: self.totals[way] - e.totals.get(way, 0) for way in ("up", "down")}
            self.unrecorded.clear()
            self.unrecorded[0] = Tally(spent=spent)
        return closed

    def _welcomed(self, e: Welcomed) -> Sequence[ClosedAccount]:
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

    def _snapshot(self, e: Snapshot) -> Sequence[ClosedAccount]:
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
    def _add_to_sums(self, closed: list[ClosedAccount]) -> list[ClosedAccount]:
        """Adds what was closed to the sums, and returns it."""
        for one in closed:
            a = one.account
            self.totals[a.direction] += one.nbytes
            if self._by_round:
                tally = self.unrecorded[one.round]
                tally.spent[a.direction] += one.nbytes
                if one.useful and a.purpose == "train":
                    add_kinds(tally.useful[a.direction], a.kinds)
        return closed


def _closed(
    a: Account,
    useful: bool,
    reason: str = "",
    staleness: int | None = None,
    round: int | None = None,
    worker: str | None = None,
) -> ClosedAccount:
    """round, worker: in place of the account's own."""
    nbytes = sum(a.kinds.values()) + a.envelope
    round = a.round if round is None else round
    return ClosedAccount(
        a, useful, reason, staleness, round, worker, nbytes, lost=a.cut and not useful
    )


def _way(a: Account) -> str:
    """The way of the payload that an account belongs to: a pull goes the other way."""
    return OTHER[a.direction] if a.type == "pull" else a.direction


def _keys_over(keys: Iterable[Key], e: Over | Forgotten | Started) -> list[Key]:
    """Those of rounds up to the event's that are not under way."""
    assert e.round is not None
    under_way = set(e.under_way)
    return [k for k in keys if k.round <= e.round and (k.round, k.client) not in under_way]


_APPLY: dict[type, Callable[[Book, Any], Sequence[ClosedAccount]]] = {
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

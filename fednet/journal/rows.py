"""Rows of `wire.jsonl`. Messages that are alike are one row: those of many clients in a round take
little more room than those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

import msgspec

from fednet.ids import ranges
from fednet.journal.events import Account
from fednet.plain import JsonDict
from fednet.wire.messages import Key

Row = JsonDict  # of wire.jsonl, with the fields of `records.Messages`


class Closed(msgspec.Struct, frozen=True, gc=False):
    """Accounts that are alike, to which nothing more comes, and what became of them."""

    account: Account
    """Each of them."""
    keys: Sequence[Key | None]
    """Of their tasks, which differ in their clients alone."""
    useful: bool
    reason: str = ""
    """Why they were wasted."""
    staleness: Sequence[int] = ()
    """Of each, where that is known."""
    round: int = 0
    worker: str | None = None

    @property
    def lost(self) -> bool:
        """Whether they may not have arrived: their bytes are an upper bound."""
        return self.account.cut and not self.useful


def rows_of(closed: Iterable[Closed]) -> list[Row]:
    """Returns the rows of these accounts, in the order of the first of each row. Accounts of
    clients are in one row where they have the same kinds and differ in their clients, bytes and
    staleness alone, in the order of client ids. Those of no client are rows of their own.
    """
    groups: dict[tuple[object, ...], list[Closed]] = {}
    rows: list[list[Closed]] = []
    for one in closed:
        a = one.account
        key = one.keys[0]
        if key is None:
            rows.append([one])
            continue
        alike = (
            one.round,
            a.direction,
            a.type,
            *a.kinds,
            one.useful,
            key.purpose,
            a.incarnation,
            key.phase,
            key.attempt,
            a.final,
            a.count if a.counted else None,
            one.lost,
            one.reason,
            bool(one.staleness),
            one.worker,
        )
        of = groups.get(alike)
        if of is None:
            of = groups[alike] = []
            rows.append(of)
        of.append(one)
    return [_row(of) for of in rows]


def _row(of: list[Closed]) -> Row:
    first = of[0]
    a = first.account
    key = first.keys[0]
    # By client, which of these its account is, and its staleness.
    places: list[tuple[int, int, int]] = []
    for k, one in enumerate(of):
        clients = [-1 if mine is None else mine.client for mine in one.keys]
        places += zip(clients, [k] * len(clients), one.staleness or [0] * len(clients))
    places.sort(key=itemgetter(0))
    accounts = [one.account for one in of]

    def each(values: Sequence[int]) -> int | Sequence[int]:
        return values[0] if _are_equal(values) else [values[k] for _, k, _ in places]

    row: Row = {"round": first.round}
    if len(places) == 1:
        row["client"] = places[0][0]
    else:
        row["clients"] = ranges([client for client, _, _ in places])
    row |= {
        "direction": a.direction,
        "type": a.type,
        "kinds": {kind: each([one.kinds[kind] for one in accounts]) for kind in a.kinds},
        "envelope": each([account.envelope for account in accounts]),
        "bytes": sum([one.account.nbytes * len(one.keys) for one in of]),
        "raw_bytes": each([account.raw_bytes for account in accounts]),
        "useful": first.useful,
        "purpose": "connection" if key is None else key.purpose,
        "incarnation": a.incarnation,
        "phase": 0 if key is None else key.phase,
        "attempt": 0 if key is None else key.attempt,
    }
    if a.final:
        row["final"] = True
    if a.counted:
        row["count"] = a.count
    if first.lost:
        row["lost"] = True
    if first.reason:
        row["reason"] = first.reason
    if first.staleness:
        values = [staleness for _, _, staleness in places]
        row["staleness"] = values[0] if _are_equal(values) else values
    if first.worker is not None:
        row["worker"] = first.worker
    return row


def _are_equal(values: Sequence[int]) -> bool:
    return values.count(values[0]) == len(values)

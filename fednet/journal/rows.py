"""Rows of `wire.jsonl`. Messages that are alike are one row: those of many clients in a round take
little more room than those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fednet.ids import ranges
from fednet.journal.events import Account
from fednet.plain import JsonDict

Row = JsonDict  # of wire.jsonl, with the fields of `records.Messages`


class ClosedAccount(msgspec.Struct, frozen=True, gc=False):
    """An account to which nothing more comes, and what became of it."""

    account: Account
    useful: bool
    reason: str
    """Why it was wasted."""
    staleness: int | None
    round: int
    worker: str | None
    nbytes: int
    lost: bool
    """It may not have arrived: its bytes are an upper bound."""


def rows_of(closed: Iterable[ClosedAccount]) -> list[Row]:
    """Returns the rows of these accounts, in the order of the first of each row. Accounts of
    clients are in one row where they have the same kinds and differ in their clients, bytes and
    staleness alone, in the order of client ids. Those of no client are rows of their own.
    """
    groups: dict[tuple[object, ...], list[ClosedAccount]] = {}
    for one in closed:
        a = one.account
        alike: tuple[object, ...] = (len(groups),)
        if a.client >= 0:
            alike = (
                one.round,
                a.direction,
                a.type,
                *a.kinds,
                one.useful,
                a.purpose,
                a.incarnation,
                a.phase,
                a.attempt,
                a.final,
                a.count if a.counted else None,
                one.lost,
                one.reason,
                one.staleness is None,
                one.worker,
            )
        groups.setdefault(alike, []).append(one)
    return [_row(of) for of in groups.values()]


def _row(of: list[ClosedAccount]) -> Row:
    of.sort(key=lambda one: one.account.client)
    first = of[0]
    a = first.account
    accounts = [one.account for one in of]
    row: Row = {"round": first.round}
    if len(of) == 1:
        row["client"] = a.client
    else:
        row["clients"] = ranges([one.client for one in accounts])
    row |= {
        "direction": a.direction,
        "type": a.type,
        "kinds": {kind: _each([one.kinds[kind] for one in accounts]) for kind in a.kinds},
        "envelope": _each([one.envelope for one in accounts]),
        "bytes": sum([one.nbytes for one in of]),
        "raw_bytes": _each([one.raw_bytes for one in accounts]),
        "useful": first.useful,
        "purpose": a.purpose,
        "incarnation": a.incarnation,
        "phase": a.phase,
        "attempt": a.attempt,
    }
    if a.final:
        row["final"] = True
    if a.counted:
        row["count"] = a.count
    if first.lost:
        row["lost"] = True
    if first.reason:
        row["reason"] = first.reason
    if first.staleness is not None:
        row["staleness"] = _each([one.staleness or 0 for one in of])
    if first.worker is not None:
        row["worker"] = first.worker
    return row


def _each(values: Sequence[int]) -> int | Sequence[int]:
    """Returns one number where all are equal."""
    return values[0] if values.count(values[0]) == len(values) else values

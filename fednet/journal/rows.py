"""Messages that are alike are one row of `wire.jsonl`: those of many clients in a round take little
more room than those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednet.ids import ranges
from fednet.plain import JsonDict

Row = JsonDict  # of wire.jsonl, with the fields of `records.Messages`

OWN = ("client", "kinds", "envelope", "bytes", "raw_bytes", "staleness")
"""Fields in which messages of one row may differ. Messages that are alike have the same fields and
the same kinds, and differ in no other field."""


def together(rows: Iterable[Row]) -> list[Row]:
    """Returns rows of one message each as rows of all messages that are alike, in the order of the
    first of each. Within a row messages are in the order of client ids. Messages of no client are
    rows of their own.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike: tuple[object, ...]
        if row["client"] < 0:
            alike = (len(groups),)
        else:
            same = [value for name, value in row.items() if name not in OWN]
            alike = (tuple(row), tuple(row["kinds"]), *same)
        groups.setdefault(alike, []).append(row)
    return [of[0] if len(of) == 1 else _one(of) for of in groups.values()]


def _one(rows: list[Row]) -> Row:
    rows.sort(key=lambda row: row["client"])
    found: Row = {}
    for name, value in rows[0].items():
        if name == "client":
            found["clients"] = ranges([row["client"] for row in rows])
        elif name == "kinds":
            found["kinds"] = {kind: _each([row["kinds"][kind] for row in rows]) for kind in value}
        elif name == "bytes":
            found["bytes"] = sum([row["bytes"] for row in rows])
        elif name in OWN:
            found[name] = _each([row[name] for row in rows])
        else:
            found[name] = value
    return found


def _each(values: Sequence[int]) -> int | Sequence[int]:
    """Returns one number where all are equal."""
    return values[0] if values.count(values[0]) == len(values) else values

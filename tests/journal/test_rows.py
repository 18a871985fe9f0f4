"""Messages that are alike are one row, and are had from it one by one as they were."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednet.errors import StateError
from fednet.journal.events import Account
from fednet.journal.rows import Closed, rows_of
from fednet.records import Messages, Wire
from fednet.report import open_run
from fednet.wire.messages import Key
from tests.books import each, together
from tests.report.fake_run import jsonl, write


def row(client: int, envelope: int = 5, state: int = 100, **more: Any) -> dict[str, Any]:
    kinds = {"state": state}
    made = Wire(round=1, client=client, kinds=kinds, envelope=envelope, bytes=envelope + state)
    made.set(**more)
    return made.line()


def test_alike_messages_are_one_row_with_a_list_where_they_differ() -> None:
    rows = [row(4, 6), row(7, reason="late", useful=False), row(2), row(3), row(9)]
    first, late = together(rows)
    assert late == row(7, reason="late", useful=False)
    assert first["clients"] == [(2, 4), 9]
    assert "client" not in first
    assert (first["kinds"], first["envelope"]) == ({"state": 100}, [5, 5, 6, 5])
    assert (first["bytes"], first["raw_bytes"]) == (421, 0)


def test_accounts_that_were_closed_together_have_the_bytes_of_each_and_staleness_by_client() -> (
    None
):
    account = Account("up", "reply", {"delta": 20}, envelope=2, raw_bytes=40, count=1)
    keys = [Key(2, 0, 0, client) for client in (3, 1, 2)]
    (found,) = rows_of([Closed(account, keys, True, staleness=[5, 0, 4], round=2)])
    assert found["clients"] == [(1, 3)]
    assert (found["kinds"], found["envelope"], found["raw_bytes"]) == ({"delta": 20}, 2, 40)
    assert found["bytes"] == 3 * 22
    assert found["staleness"] == [0, 4, 5]


def test_messages_of_no_client_are_rows_of_their_own() -> None:
    connection = row(-1, purpose="connection")
    rows = [connection, connection, row(0)]
    assert together(rows) == rows


FIELDS: dict[str, st.SearchStrategy[object]] = {
    "client": st.integers(-1, 6),
    "round": st.integers(1, 2),
    "direction": st.sampled_from(["up", "down"]),
    "type": st.sampled_from(["task", "reply"]),
    "envelope": st.integers(0, 2),
    "raw_bytes": st.integers(0, 2),
    "useful": st.booleans(),
    "purpose": st.sampled_from(["train", "evaluate"]),
    "incarnation": st.integers(1, 2),
    "phase": st.integers(0, 1),
    "attempt": st.integers(0, 1),
    "count": st.none() | st.integers(1, 2),
    "worker": st.none() | st.sampled_from("ab"),
    "reason": st.none() | st.sampled_from(["late", "staleness"]),
    "lost": st.none() | st.just(True),
    "staleness": st.none() | st.integers(0, 2),
    "final": st.none() | st.just(True),
    "kinds": st.dictionaries(st.sampled_from(["state", "staleness", "reason"]), st.integers(0, 2)),
}


@st.composite
def several(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows that differ in a few fields."""
    names = draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=3))
    drawn = st.fixed_dictionaries({"client": FIELDS["client"], **{n: FIELDS[n] for n in names}})
    rows = []
    for fields in draw(st.lists(drawn, max_size=12)):
        made = Wire.of(fields)
        if made.client < 0:  # what belongs to no task
            made.set(purpose="connection", phase=0, attempt=0)
        if made.lost:
            made.useful = False
        made.bytes = made.envelope + sum(made.kinds.values())
        rows.append(made.line())
    return rows


@given(several())
def test_each_message_is_had_from_its_row_as_it_was(rows: list[dict[str, Any]]) -> None:
    lines = json.loads(json.dumps(together(copy.deepcopy(rows))))
    found = each(lines)
    assert sum(len(Messages.of(line)) for line in lines) == len(found) == len(rows)
    assert sum(line["bytes"] for line in lines) == sum(r["bytes"] for r in rows)

    def ordered(some: list[dict[str, Any]]) -> list[str]:
        return sorted(json.dumps(one, sort_keys=True) for one in some)

    assert ordered(found) == ordered(rows)
    for name in FIELDS:
        if name not in ("client", "envelope", "raw_bytes", "staleness", "kinds"):
            assert not any(isinstance(line.get(name), list) for line in lines)


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"envelope": [5, 6, 7]}, "3 numbers for 2 messages"),
        ({"kinds": {"state": [1]}}, "1 numbers for 2 messages"),
        ({"clients": [[0, 1], 5]}, "2 numbers for 3 messages"),
        ({"clients": [[0, 1, 2]]}, r"Expected `array` of length 2.*clients"),
        ({"clients": [[5, 1]]}, "clients"),
    ],
)
def test_a_row_whose_lists_are_of_other_lengths_is_refused_with_its_line(
    tmp_path: Path, spoilt: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "a", rounds=1)
    (line,) = together([row(0), row(1, 6)])
    jsonl(path / "wire.jsonl", [line])
    assert len(open_run(path).wire) == 2
    jsonl(path / "wire.jsonl", [line, {**line, **spoilt}])
    with pytest.raises(StateError, match=rf"wire\.jsonl:2: .*{says}"):
        _ = open_run(path).wire

from __future__ import annotations

import pytest

from fednet.wire.ledger import Account, Ledger
from fednet.wire.messages import Key

REPLY = (b"a", "up", "reply")


def book() -> tuple[Ledger, list[dict]]:
    rows: list[dict] = []
    return Ledger(rows.append, 2), rows


def test_row_holds_payload_by_kind_envelope_and_their_sum():
    ledger, rows = book()
    ledger.add(REPLY, "reply", 60, Key(3, 1, 2, 4), {"delta": 100, "statistics": 24}, 200)
    ledger.add(REPLY, "reply", 40, Key(3, 1, 2, 4), {"delta": 50}, 100)
    assert rows == []
    ledger.settle(REPLY, True)
    assert rows == [
        {
            "round": 3,
            "client": 4,
            "direction": "up",
            "type": "reply",
            "kinds": {"delta": 150, "statistics": 24},
            "envelope": 100,
            "bytes": 274,
            "raw_bytes": 300,
            "useful": True,
            "purpose": "train",
            "incarnation": 2,
            "phase": 1,
            "attempt": 2,
        }
    ]
    assert ledger.totals == {"up": 274, "down": 0}
    assert ledger.useful == {"up": {"delta": 150, "statistics": 24}, "down": {}}


def test_heartbeats_are_one_row_with_their_number_even_if_there_was_one():
    ledger, rows = book()
    for n in (1, 3):
        for _ in range(n):
            ledger.add((b"a", "up", "beat"), "beat", 30, counted=True)
        ledger.settle((b"a", "up", "beat"), False, round=n)
    assert [(r["count"], r["bytes"], r["round"]) for r in rows] == [(1, 30, 1), (3, 90, 3)]


def test_record_of_a_round_takes_its_bytes_and_earlier_ones_but_not_the_next_rounds():
    ledger, _ = book()
    for round, n in ((0, 7), (1, 100), (2, 1000)):
        ledger.write(Account("up", "reply", round=round, envelope=n), True)
    assert ledger.take(1).spent == {"up": 107, "down": 0}
    ledger.write(Account("down", "task", round=1, envelope=5), False)  # late
    assert ledger.take(2).spent == {"up": 1000, "down": 5}
    assert ledger.take(2).spent == {"up": 0, "down": 0}


def test_a_side_that_takes_nothing_by_round_keeps_nothing_by_round():
    rows = []
    ledger = Ledger(rows.append, by_round=False)
    for round in range(1, 4):
        ledger.write(
            Account("up", "reply", round=round, kinds={"state": 10}, envelope=2, count=1), True
        )
    assert (len(rows), ledger.totals["up"], ledger.useful["up"]) == (3, 36, {"state": 30})
    assert ledger.take(3).spent == {"up": 0, "down": 0}


def test_useless_bytes_are_spent_all_the_same_and_an_account_is_settled_once():
    ledger, rows = book()
    name = (b"a", "down", "task")
    ledger.add(name, "task", 5, kinds={"state": 10}, raw=10)
    for _ in range(2):
        ledger.settle(name, False, reason="deadline")
    assert [(row["useful"], row["reason"]) for row in rows] == [(False, "deadline")]
    assert ledger.totals == {"up": 0, "down": 15}
    assert ledger.useful["down"] == {}


@pytest.mark.parametrize("useful", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_what_was_of_no_use_and_not_answered_may_not_have_arrived_as_a_connection_ended(
    useful, answered
):
    ledger, rows = book()
    name = (b"1", "down", "task", Key(1, 0, 0, 7))
    ledger.add(name, "task", 1, name[3], {"state": 5}, 5)
    ledger.open(b"1")[name].cut = True
    if answered:
        bill = []
        ledger.add_to_bill(bill, name[3], b"1", b"1")
        ledger.settle_bill(bill, useful)
    else:
        ledger.settle(name, useful)
    assert [row.get("lost", False) for row in rows] == [not (useful or answered)]

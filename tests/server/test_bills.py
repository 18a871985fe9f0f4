"""What a task's bytes come to where several servers sent or received the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from fednet.files import Lines, plain_line, read_rows
from fednet.records.manifest import RunProgress, UnderWay
from fednet.server import write_ahead_log
from fednet.server.write_ahead_log import WriteAheadLog, recover
from fednet.wire import messages as m
from fednet.wire.ledger import Account, Ledger, Row
from fednet.wire.link import Link
from fednet.wire.messages import Key

KEY = Key(2, 0, 0, 7)


def row(direction: str, type: str, incarnation: int, nbytes: int, **more: object) -> Row:
    return {
        "round": 2,
        "client": 7,
        "phase": 0,
        "attempt": 0,
        "purpose": "train",
        "direction": direction,
        "type": type,
        "incarnation": incarnation,
        "useful": True,
        "kinds": {"state": nbytes} if nbytes else {},
        "envelope": 1,
        "bytes": nbytes + 1,
        "raw_bytes": nbytes,
        **more,
    }


def under_way(incarnation: int, number: int, direction: str, type: str, nbytes: int) -> Row:
    return row(direction, type, incarnation, nbytes, useful=False, number=number)


def flight_in(folder: Path) -> WriteAheadLog:
    return WriteAheadLog(folder / "flight.jsonl", False, Lines(folder / "wire.jsonl", plain_line))


TASK, REPLY = ("down", "task"), ("up", "reply")
# Each case: rows of the book, rows under way, what this server (4) sent and received, the rows that
# are written when the bill is settled as useful, and the useful bytes of the round.
CASES = {
    "two servers had the reply and were killed before a checkpoint had it": (
        [
            row(*TASK, 1, 100),
            row(*REPLY, 1, 30),
            row(*TASK, 2, 100),
            row(*REPLY, 2, 20),
        ],
        [under_way(3, 1, *TASK, 100)],
        [],
        [("task", True, 3)],
        {"down": 100, "up": 20},
    ),
    "the second server found the client at its task": (
        [row(*TASK, 1, 100), row(*REPLY, 1, 30), row(*TASK, 2, 0), row(*REPLY, 2, 30)],
        [under_way(3, 1, *REPLY, 30)],
        [],
        [("reply", True, 3)],
        {"down": 100, "up": 30},
    ),
    "the last server sent it, and this one received the reply": (
        [],
        # What fetched the task counts with it, although it crossed the way of the reply.
        [under_way(2, 1, *TASK, 100), under_way(2, 2, "up", "pull", 0), under_way(3, 1, *TASK, 0)],
        [(*TASK, 0), (*REPLY, 30)],
        [
            ("task", True, 2),
            ("pull", True, 2),
            ("task", True, 3),
            ("task", True, 4),
            ("reply", True, 4),
        ],
        {"down": 100, "up": 30},
    ),
    "this server sent all of it again": (
        [row(*TASK, 1, 100)],
        [under_way(2, 1, *TASK, 100)],
        [(*TASK, 100), (*REPLY, 30)],
        [("task", False, 2), ("task", True, 4), ("reply", True, 4)],
        {"down": 100, "up": 30},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_what_crossed_to_several_servers_the_last_payload_is_useful(
    tmp_path: Path, case: tuple
) -> None:
    booked, open_rows, own, written, useful = case
    rows: list[Row] = []
    flight = flight_in(tmp_path)
    for r in open_rows:
        flight.path.write_text(flight.path.read_text() + line(r))
    ledger = Ledger(rows.append, 4, numbered=True)
    bills = recover(flight, ledger, booked, {KEY}, RunProgress(run="r", round=1))
    for direction, type, nbytes in own:
        name = (b"conn", direction, type, KEY)
        ledger.add(name, type, 1, KEY, {"state": nbytes} if nbytes else {}, nbytes)
    bill = bills[KEY]
    ledger.add_to_bill(bill, KEY, b"conn", b"conn")
    ledger.settle_bill(bill, True, staleness=3)
    assert [(r["type"], r["useful"], r["incarnation"]) for r in rows] == written
    assert all(r["reason"] == "sent again" for r in rows if not r["useful"])
    assert all(r.get("staleness") == (3 if r["type"] == "reply" else None) for r in rows)
    tally = ledger.take(2).useful
    assert {way: sum(kinds.values()) for way, kinds in tally.items()} == useful
    ledger.settle_bill(bill, True)  # once
    assert len(rows) == len(written)
    assert ledger.under_way() == []


def test_the_write_ahead_log_is_rewritten_with_what_is_open_and_loses_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_aside, rewritten = write_ahead_log.write_aside, list[int]()

    def counted(path: Path, text: bytes, fsync: bool) -> bool:
        rewritten.append(text.count(b"\n"))
        return write_aside(path, text, fsync=fsync)

    monkeypatch.setattr(write_ahead_log, "write_aside", counted)
    monkeypatch.setattr(write_ahead_log, "LONG", 1000)
    flight = flight_in(tmp_path)
    ledger = Ledger([].append, 1, numbered=True)
    sizes = []
    for client in range(200):
        name = (b"conn", "down", "task", Key(1, 0, 0, client))
        ledger.add(name, "task", 1, name[3], {"state": 5}, 5)
        flight.note(ledger)
        if client % 10:  # of ten tasks nine are over at once
            ledger.settle(name, True)
        sizes.append(flight.path.stat().st_size)
    assert sum(b < a for a, b in pairwise(sizes)) >= 2
    assert sum(rewritten) < 200  # lines: what stays open for long costs little
    bills = recover(flight, Ledger([].append, 2), [], set(), None)
    assert {key.client for key in bills} >= set(range(0, 200, 10))
    assert len(bills) < 200
    assert bills[Key(1, 0, 0, 0)][0].kinds == {"state": 5}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_crash_as_the_write_ahead_log_is_rewritten_loses_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Neither one of a connection nor one in a bill. A last line that was torn is the only loss."""
    monkeypatch.setattr(write_ahead_log, "LONG", 0)
    write_aside = write_ahead_log.write_aside

    def crash(*given: object, **how: object) -> None:
        if replaced:
            write_aside(*given, **how)
        raise KeyboardInterrupt

    def sent(client: int) -> None:
        name = (b"conn", "down", "task", Key(1, 0, 0, client))
        ledger.add(name, "task", 1, name[3], {"state": 5}, 5)

    def send_on() -> None:
        for _ in range(100):
            sent(2)
            flight.note(ledger)

    rows: list[Row] = []
    ledger = Ledger(rows.append, 1, numbered=True)
    flight = flight_in(tmp_path)
    for client in range(3):
        sent(client)
    flight.note(ledger)
    ledger.settle((b"conn", "down", "task", Key(1, 0, 0, 0)), True)
    ledger.add_to_bill([], Key(1, 0, 0, 1), b"conn", b"conn")
    monkeypatch.setattr(write_ahead_log, "write_aside", crash)
    with pytest.raises(KeyboardInterrupt):
        send_on()
    monkeypatch.undo()
    with flight.path.open("a") as file:
        file.write(line(under_way(1, 9, *TASK, 100))[:-20])
    again = flight_in(tmp_path)
    later = Ledger(rows.append, 2, numbered=True)
    bills = recover(again, later, list(rows), set(), None)
    found = {key.client: [(a.kinds, a.count) for a in bill] for key, bill in bills.items()}
    assert later.crossed() == {"up": 0, "down": 0}
    last = rows.pop()
    assert (last["client"], last["useful"], rows) == (0, True, [])
    assert found.keys() == {1, 2}
    assert found[1] == [({"state": 5}, 1)]
    ((kinds, count),) = found[2]
    assert kinds == {"state": 5 * count}
    again.keep(later)
    sent(3)
    again.note(ledger)
    open_accounts = read_rows(again.path, msgspec.json.Decoder(Account).decode)
    assert {account.client for account in open_accounts} == {1, 2, 3}


def test_a_row_of_an_earlier_server_leaves_what_this_one_has_under_the_same_number(
    tmp_path: Path,
) -> None:
    flight = flight_in(tmp_path)
    flight.path.write_text(line(under_way(1, 1, *TASK, 100)))
    ledger = Ledger([].append, 2, numbered=True)
    bills = recover(flight, ledger, [], set(), None)
    other = msgspec.structs.replace(KEY, client=8)
    ledger.add((b"conn", "down", "task", other), "task", 1, other, {"state": 5}, 5)
    ledger.settle_bill(bills[KEY], False)
    flight.note(ledger)
    later = recover(flight, Ledger([].append, 3), [], set(), None)
    assert later[other][0].kinds == {"state": 5}


def line(value: Row) -> str:
    return plain_line(value).decode()


def test_what_nobody_can_use_is_spent_and_a_task_without_an_answer_may_not_have_arrived(
    tmp_path: Path,
) -> None:
    rows: list[Row] = []
    flight = flight_in(tmp_path)
    lines = [under_way(1, 1, *TASK, 100), under_way(1, 2, *REPLY, 30)]
    flight.path.write_text("".join(map(line, lines)))
    ledger = Ledger(rows.append, 2, numbered=True)
    bills = recover(flight, ledger, [], set(), None)
    assert [(r["type"], r["reason"]) for r in rows] == [("reply", "the server ended")]
    assert "lost" not in rows[0]  # it arrived here
    ledger.settle_bill(bills[KEY], False, "the server ended")
    assert (rows[1]["type"], rows[1]["lost"], rows[1]["incarnation"]) == ("task", True, 1)


def test_useful_rows_of_a_task_that_waits_for_its_reply_are_useful_again(tmp_path: Path) -> None:
    """As of an asynchronous run: the round is over, and its task may still be answered."""
    waits = UnderWay(round=2, at=0.0, start="", sent="")
    bills = []
    for under_way in ({7: waits}, {}):
        flight = flight_in(tmp_path)
        progress = RunProgress(run="r", round=2, under_way=under_way)
        ledger = Ledger([].append, 2, numbered=True)
        bills.append(recover(flight, ledger, [row(*TASK, 1, 100)], set(), progress))
        flight.close()
    assert [list(found) for found in bills] == [[KEY], []]


def test_what_could_not_leave_is_not_in_the_next_servers_book(tmp_path: Path) -> None:
    """It is in the write-ahead log before it leaves: the log has to hear that it did not."""
    flight = flight_in(tmp_path)
    ledger = Ledger([].append, 1, numbered=True)
    other, form = msgspec.structs.replace(KEY, client=8), [m.Field("x", "state", 5, 5)]
    body, stands = memoryview(b"12345"), [True, False, False, False]
    link = Link("server", lambda conn, frames: stands.pop(0), lambda n: n, ledger)
    outgoing = [
        link.compose(b"conn", m.Task(key=KEY, form=form, size=5)),
        link.compose(b"conn", m.Part(key=KEY, index=0), body),
        link.compose(b"conn", m.Task(key=other, form=form, size=5), body),
        link.compose(b"conn", m.Cancel(key=KEY)),
    ]
    flight.note(ledger)
    for out in outgoing:
        link.send_composed(out)
    flight.note(ledger)
    rows: list[Row] = []
    later = Ledger(rows.append, 2, numbered=True)
    bills = recover(flight, later, [], set(), None)
    assert [*bills] == [KEY]
    (left,) = bills[KEY]
    assert (sum(left.kinds.values()), left.raw_bytes) == (0, 0)
    assert (left.envelope, left.count) == (outgoing[0].envelope, 1)
    assert (rows, later.totals) == ([], {"up": 0, "down": 0})

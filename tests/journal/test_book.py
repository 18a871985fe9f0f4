"""What the events of a journal come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from fednet.journal.book import Book, Row
from fednet.journal.events import (
    Accepted,
    AccountsClosed,
    Crossed,
    Cut,
    Direction,
    Event,
    Forgotten,
    Name,
    Over,
    Snapshot,
    Started,
    Undone,
    Verdict,
)
from fednet.wire.messages import Key, Reply
from tests.books import booked, each, left
from tests.journal.streams import streams

KEY = Key(2, 0, 0, 7)
CONN = b"conn"


def fold(events: Sequence[Event], book: Book | None = None) -> tuple[Book, list[Row]]:
    book = book or Book()
    return book, each(row for event in events for row in book.apply(event))


def crossed(
    direction: Direction, type: str, nbytes: int = 0, key: Key = KEY, envelope: int = 1
) -> Crossed:
    kinds = {"state": nbytes} if nbytes else {}
    return Crossed([(CONN, direction, type, key)], type, envelope, kinds, nbytes)


def accepted(key: Key = KEY, down: bytes | None = CONN, stored: bool = True) -> Accepted:
    return Accepted(Reply(key=key, form=[], size=0), down, CONN, stored=stored)


def useful(*keys: Key) -> Verdict:
    return Verdict([(key, "", None) for key in keys])


TASK = ("down", "task")
REPLY = ("up", "reply")


# -- one process -----------------------------------------------------------------------------------
def test_a_row_holds_payload_by_kind_envelope_and_their_sum() -> None:
    name = (b"a", "up", "reply", Key(3, 1, 2, 4))
    book, rows = fold(
        [
            Started(2),
            Crossed([name], "reply", 60, {"delta": 100, "statistics": 24}, 200),
            Crossed([name], "reply", 40, {"delta": 50}, 100),
        ]
    )
    assert rows == []
    assert fold([AccountsClosed([name], useful=True)], book)[1] == [
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
    assert (book.totals, book.crossed) == ({"up": 274, "down": 0}, {"up": 274, "down": 0})


def test_heartbeats_are_one_row_with_their_number_even_if_there_was_one() -> None:
    name = (b"a", "up", "beat", 0)
    events = list[Event]()
    for n in (1, 3):
        events += n * [Crossed([name], "beat", 30, counted=True)] + [
            AccountsClosed([name], round=n, worker="w")
        ]
    _, rows = fold(events)
    found = [(r["count"], r["bytes"], r["round"], r["worker"]) for r in rows]
    assert found == [(1, 30, 1, "w"), (3, 90, 3, "w")]


def test_the_record_of_a_round_takes_its_bytes_and_earlier_ones_but_not_the_next_rounds() -> None:
    def spent(direction: Direction, round: int, n: int) -> list[Event]:
        made = crossed(direction, "reply", key=Key(round, 0, 0, 1), envelope=n)
        return [made, AccountsClosed(made.names, useful=True)]

    book, _ = fold([e for r, n in ((0, 7), (1, 100), (2, 1000)) for e in spent("up", r, n)])
    fold([Over(1)], book)
    assert book.recorded.spent == {"up": 107, "down": 0}
    fold([*spent("down", 1, 5), Over(2)], book)  # one of round 1 was late
    assert book.recorded.spent == {"up": 1000, "down": 5}
    fold([Over(2)], book)
    assert book.recorded.spent == {"up": 0, "down": 0}


def test_a_side_that_takes_nothing_by_round_keeps_nothing_by_round() -> None:
    made = crossed(*REPLY, 10)
    book, rows = fold([made, AccountsClosed(made.names, useful=True)], Book(by_round=False))
    assert (len(rows), book.unrecorded) == (1, {})


def test_useless_bytes_are_spent_all_the_same_and_an_account_is_settled_once() -> None:
    made = crossed(*TASK, 10)
    book, rows = fold([made, *2 * [AccountsClosed(made.names, reason="deadline")], Over(2)])
    assert [(row["useful"], row["reason"]) for row in rows] == [(False, "deadline")]
    assert book.totals == {"up": 0, "down": 11}
    assert book.recorded.useful == {"up": {}, "down": {}}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("answered", [False, True])
def test_what_was_of_no_use_and_not_answered_may_not_have_arrived_as_a_connection_ended(
    counts: bool, answered: bool
) -> None:
    made = crossed(*TASK, 5)
    ended: list[Event] = [
        AccountsClosed(made.names, useful=counts, reason="" if counts else "late")
    ]
    if answered:
        ended = [accepted(), Verdict([(KEY, "" if counts else "left out", None)])]
    _, rows = fold([made, Cut(CONN, "down"), *ended])
    assert [row.get("lost", False) for row in rows] == [not (counts or answered)]


def test_a_part_that_could_not_leave_is_taken_off_all_numbers_of_its_row() -> None:
    first = crossed(*TASK, 100, envelope=30)
    second = crossed(*TASK, 70, envelope=20)
    undone = Undone(second.names[0], 20, {"state": 70}, 70)
    _, rows = fold([first, second, undone, AccountsClosed(first.names)])
    assert [(r["kinds"], r["envelope"], r["bytes"], r["raw_bytes"]) for r in rows] == [
        ({"state": 100}, 30, 130, 100)
    ]


def test_the_staleness_of_a_reply_is_in_its_row_and_in_that_of_the_pulls_that_fetched_it() -> None:
    """Not in those of its task."""
    task = [crossed(*TASK, 100), crossed("up", "pull", envelope=2)]
    reply = [crossed(*REPLY, 30), crossed("down", "pull", envelope=3)]
    _, rows = fold([*task, *reply, accepted(), Verdict([(KEY, "", 4)])])
    found = {(r["type"], r["direction"], r["envelope"]): r.get("staleness") for r in rows}
    assert found == {
        ("task", "down", 1): None,
        ("pull", "up", 2): None,
        ("reply", "up", 1): 4,
        ("pull", "down", 3): 4,
    }


def test_replies_that_are_alike_but_for_what_became_of_them_have_that_in_their_rows() -> None:
    replies: list[tuple[Key, str, int | None]] = [
        (Key(2, 0, 0, 1), "", 0),
        (Key(2, 0, 0, 2), "left out", 0),
        (Key(2, 0, 0, 3), "", None),
        (Key(1, 0, 0, 4), "", 0),
        (Key(2, 1, 0, 5), "", 0),
        (Key(2, 0, 1, 6), "", 0),
        (Key(2, 0, 0, 7, "evaluate"), "", 0),
        (Key(2, 0, 0, 8), "", 2),
    ]
    other = Key(2, 0, 0, 9)
    keys = [key for key, _, _ in replies]
    tasks: list[Name] = [(CONN, "down", "task", key) for key in (*keys, other)]
    events: list[Event] = [
        Crossed(tasks, "task", 1, {"state": 10}, 10),
        Crossed([(CONN, "up", "reply", key) for key in keys], "reply", 2, {"delta": 20}, 20),
        crossed(*REPLY, 33, key=other),
        *[accepted(key) for key in (*keys, other)],
    ]
    book, rows = fold([*events, Verdict([*replies, (other, "", 1)])])
    found = [row for row in rows if row["direction"] == "up"]
    assert {
        (
            Key(row["round"], row["phase"], row["attempt"], row["client"], row["purpose"]),
            row.get("reason", ""),
            row.get("staleness"),
        )
        for row in found
    } == {*replies, (other, "", 1)}
    assert {row["client"]: row["bytes"] for row in found} == {
        **dict.fromkeys(range(1, 9), 22),
        9: 34,
    }
    assert {row["client"] for row in rows if not row["useful"]} == {2}
    assert book.totals == {"down": 9 * 11, "up": 8 * 22 + 34}
    spent = {round: tally.spent for round, tally in book.unrecorded.items()}
    assert spent == {1: {"down": 11, "up": 22}, 2: {"down": 8 * 11, "up": 7 * 22 + 34}}
    useful = {round: tally.useful for round, tally in book.unrecorded.items()}
    assert useful == {
        1: {"down": {"state": 10}, "up": {"delta": 20}},
        2: {"down": {"state": 6 * 10}, "up": {"delta": 5 * 20, "state": 33}},
    }


# -- several servers -------------------------------------------------------------------------------
# Each case: what the servers before the last one did, what the last one did, the rows that the
# verdict writes, and the useful bytes of the round. Server n is started by `Started(n, 1)`.
REPLIED = [crossed(*TASK, 100), crossed(*REPLY, 30), accepted()]
CASES: dict[str, tuple[list[Event], list[tuple[str, bool, int]], dict[str, int]]] = {
    "the reply was used by a server that was killed before its checkpoint, and is on disk": (
        [Started(1, 1), *REPLIED, useful(KEY), Over(2), Started(2, 1)],
        [],
        {"down": 100, "up": 30},
    ),
    "so was the second server": (
        [Started(1, 1), *REPLIED, useful(KEY), Started(2, 1), useful(KEY), Started(3, 1)],
        [],
        {"down": 100, "up": 30},
    ),
    "the reply was lost with its file, and all of it was sent again": (
        [Started(1, 1), *REPLIED, useful(KEY), Started(2, 1), *REPLIED],
        [("task", True, 2), ("reply", True, 2)],
        {"down": 100, "up": 30},
    ),
    "the client was found at its task": (
        [
            Started(1, 1),
            *REPLIED,
            useful(KEY),
            Started(2, 1),
            crossed(*TASK),
            REPLIED[1],
            REPLIED[2],
        ],
        [("task", True, 2), ("reply", True, 2)],
        {"down": 100, "up": 30},
    ),
    "the last but one sent the task, and the last received the reply": (
        [
            Started(1, 1),
            crossed(*TASK, 100),
            crossed("up", "pull"),
            Started(2, 1),
            crossed(*TASK),
            Started(3, 1),
            crossed(*TASK),
            crossed(*REPLY, 30),
            accepted(),
        ],
        [("task", True, 1), ("task", True, 2), ("task", True, 3), ("reply", True, 3)],
        {"down": 100, "up": 30},
    ),
    "the last sent all of it again": (
        [
            Started(1, 1),
            crossed(*TASK, 100),
            Started(2, 1),
            crossed(*TASK, 100),
            crossed(*REPLY, 30),
            accepted(),
        ],
        [("task", False, 1), ("task", True, 2), ("reply", True, 2)],
        {"down": 100, "up": 30},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_what_crossed_to_several_servers_the_last_payload_is_useful(case: tuple) -> None:
    events, written, nbytes = case
    book, _ = fold(events)
    _, rows = fold([Verdict([(KEY, "", 3)])], book)
    assert [(r["type"], r["useful"], r["incarnation"]) for r in rows] == written
    assert all(r["reason"] == "sent again" for r in rows if not r["useful"])
    assert all(r.get("staleness") == (3 if r["type"] == "reply" else None) for r in rows)
    assert fold([useful(KEY)], book)[1] == []  # once
    fold([Over(2)], book)
    found = book.recorded.useful
    assert {way: sum(kinds.values()) for way, kinds in found.items()} == nbytes
    assert (book.open_accounts, book.waiting) == ({}, {})


def test_what_is_of_use_again_is_in_the_record_of_its_own_round() -> None:
    """Of a round that was open before the record of the one before it was written."""
    next_round = [Key(3, 0, 0, client) for client in (7, 8, 9)]
    tasks: list[Name] = [(CONN, "down", "task", key) for key in next_round]
    replied = [Crossed(tasks, "task", 1, {"state": 100}, 100), *map(accepted, next_round)]
    events = [Started(1, 1), *replied, useful(*next_round), Started(2, 1), useful(*next_round)]
    book, _ = fold([*events, Over(2)])
    assert book.recorded.useful == {"up": {}, "down": {}}
    fold([Over(3)], book)
    assert book.recorded.useful == {"up": {}, "down": {"state": 300}}


def test_what_was_left_out_stays_wasted_though_its_round_is_done_again_and_has_it_in_time() -> None:
    """It was late in the eyes of a server that was killed before its checkpoint."""
    late: list[Event] = [Verdict([(KEY, "left out", None)])]
    book, rows = fold([Started(1, 1), *REPLIED, *late, Started(2, 1), useful(KEY), Over(2)])
    assert [(r["type"], r["useful"]) for r in rows] == [("task", False), ("reply", False)]
    assert book.recorded.useful == {"up": {}, "down": {}}


def test_what_nobody_can_use_is_spent_and_a_task_without_an_answer_may_not_have_arrived() -> None:
    beat = Crossed([(CONN, "up", "beat", 0)], "beat", 9, counted=True)
    events = [Started(1, 1), crossed(*TASK, 100), crossed(*REPLY, 30), beat, Started(2, 1)]
    book, rows = fold(events)
    found = [(r["type"], r["reason"], r.get("lost")) for r in rows]  # what came here has arrived
    assert found == [("reply", "the server ended", None), ("beat", "the server ended", None)]
    (row,) = fold([Over(2)], book)[1]
    assert (row["type"], row["reason"], row["lost"]) == ("task", "the server ended", True)
    assert (row["incarnation"], book.crossed) == (1, {"up": 0, "down": 0})


def test_a_message_of_a_task_that_a_server_left_open_has_a_row_of_that_task() -> None:
    once = Crossed([(CONN, "down", "once", 5)], "cancel", 9, key=KEY)
    _, rows = fold([Started(1), once, Started(2)])
    found = [(row["type"], row["round"], row["client"], row["purpose"]) for row in rows]
    assert found == [("cancel", 2, 7, "train")]
    assert [(row["bytes"], row["useful"]) for row in rows] == [(9, False)]


def test_a_task_that_waits_for_its_reply_is_useful_though_its_round_is_over() -> None:
    """As of an asynchronous run."""
    under_way = [(KEY.round, KEY.client)]
    for waits in (under_way, []):
        events = [Started(1, 1), crossed(*TASK, 100), Started(2, 2, waits), Over(2, waits)]
        book, rows = fold(events)
        assert [r["useful"] for r in rows] == ([] if waits else [False])
        _, rows = fold([crossed(*REPLY, 30), accepted(), useful(KEY)], book)
        assert [r["type"] for r in rows] == (["task", "reply"] if waits else ["reply"])


def test_a_reply_that_waits_for_the_rounds_is_not_settled_as_a_round_ends() -> None:
    """It came after its exchange was over: its outcome says why it is not used."""
    events = [Started(1, 1), crossed(*TASK, 100), Started(2, 1), crossed(*REPLY, 30), accepted()]
    book, _ = fold(events)
    assert fold([Over(2)], book)[1] == []
    _, rows = fold([Verdict([(KEY, "left out", None)])], book)
    assert [(r["type"], r["reason"]) for r in rows] == [("task", "left out"), ("reply", "left out")]


def test_replies_are_on_record_until_their_round_is_forgotten() -> None:
    again = Key(2, 0, 1, 7)
    other = Key(2, 0, 0, 8)
    memory = accepted(Key(2, 0, 0, 9), stored=False)
    book, _ = fold([accepted(), accepted(again), accepted(other), memory])
    assert [a.message.key for a in book.accepted.values()] == [again, other]
    fold([Forgotten(1)], book)
    assert len(book.accepted) == 2
    fold([Forgotten(2, [(2, 8)])], book)
    assert [a.message.key for a in book.accepted.values()] == [other]


# -- whatever happens ------------------------------------------------------------------------------
def crossing(events: Sequence[Event]) -> Counter[str]:
    found = Counter[str]()
    for e in events:
        if isinstance(e, Crossed | Undone):
            nbytes = e.envelope + sum(e.kinds.values())
            if isinstance(e, Crossed):
                found[e.names[0][1]] += len(e.names) * nbytes
            else:
                found[e.name[1]] -= nbytes
    return found


@settings(deadline=None)
@given(streams())
def test_each_byte_that_crossed_is_in_one_row_or_in_an_account_that_is_open(
    events: list[Event],
) -> None:
    book, rows = fold(events)
    assert booked(rows) + left(book) == +crossing(events)
    assert +Counter(book.totals) == booked(rows)
    last = max(i for i, e in enumerate(events) if isinstance(e, Started))
    assert +Counter(book.crossed) == +crossing(events[last:])


def together(events: Sequence[Event]) -> list[Event]:
    """The same, with an event in place of several messages that are alike."""
    found: list[Event] = []
    for e in events:
        last = found[-1] if found else None
        alike = isinstance(e, Crossed) and isinstance(last, Crossed)
        if alike and replace(e, names=[]) == replace(last, names=[]):
            found[-1] = replace(last, names=[*last.names, *e.names])
            continue
        found.append(e)
    return found


@settings(deadline=None)
@given(streams())
def test_messages_that_are_one_event_are_booked_as_each_by_itself(events: list[Event]) -> None:
    separate, rows = fold(events)
    book, together_rows = fold(together(events))
    assert together_rows == rows
    assert book.snapshot(1, 0) == separate.snapshot(1, 0)


@settings(deadline=None)
@given(streams())
def test_of_one_server_process_a_payload_is_useful_once_at_most(events: list[Event]) -> None:
    _, rows = fold(events)
    found = Counter(
        (r["incarnation"], r["round"], r["client"], r["direction"], r["type"])
        for r in rows
        if r["useful"] and r["kinds"]
    )
    assert set(found.values()) <= {1}


@settings(deadline=None)
@given(streams())
def test_what_the_records_of_rounds_take_is_what_the_rows_have(events: list[Event]) -> None:
    """In a run whose server is not killed."""
    events = [e for e in events if not isinstance(e, Started)]
    book = Book()
    taken = Counter[str]()
    rows = []
    for e in [*events, Over(1 << 40)]:
        rows += book.apply(e)
        if isinstance(e, Over):
            taken.update(book.recorded.spent)
    assert +taken == booked(rows)


@settings(deadline=None)
@given(streams())
def test_a_book_that_was_kept_on_the_way_goes_on_as_if_it_was_not(events: list[Event]) -> None:
    whole, rows = fold(events)
    for at in range(0, len(events) + 1, 5):
        before, first = fold(events[:at])
        text = msgspec.msgpack.encode(before.snapshot(2, 0))
        book, rest = fold([msgspec.msgpack.decode(text, type=Snapshot), *events[at:]])
        assert first + rest == rows
        assert book.snapshot(1, 0) == whole.snapshot(1, 0)

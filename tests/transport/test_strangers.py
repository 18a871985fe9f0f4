"""Who is hung up on before they have said anything: plain numbers in, names out."""

from __future__ import annotations

from fednet.transport.strangers import MAX_ALL_BYTES, MAX_FIRST_BYTES, MAX_STRANGERS, unwelcome


def gone(*sent: int) -> list[int]:
    return [n for n, _ in unwelcome(enumerate(sent))]


def test_those_in_their_handshakes_are_left_alone():
    assert gone(*[600] * MAX_STRANGERS) == []


def test_one_that_sends_more_than_a_join_goes():
    assert gone(64, MAX_FIRST_BYTES, MAX_FIRST_BYTES + 1, 600) == [2]


def test_what_all_have_sent_is_bounded_and_the_oldest_go():
    each = MAX_FIRST_BYTES
    fit = MAX_ALL_BYTES // each
    assert gone(*[each] * fit) == []
    assert gone(*[each] * (fit + 3)) == [0, 1, 2]


def test_more_than_there_may_be_at_a_time_go_the_oldest_first():
    assert gone(*[64] * (MAX_STRANGERS + 2)) == [0, 1]

"""The window that the parts of a payload are sent in, and planned cuts."""

from __future__ import annotations

import pytest

from fednet.errors import RemoteProtocolError
from fednet.protocol.transfers import WINDOW, Receiving, Sending, before_cut
from fednet.wire.codec import Body
from tests.protocol.net import PART


# -- a planned cut ---------------------------------------------------------------------------------
def test_a_cut_is_at_the_byte_and_loses_one_at_least():
    assert [before_cut(10, s) for s in (0.0, 0.55, 0.9, 1.0)] == [0, 5, 9, 9]
    assert [before_cut(n, 0.9) for n in (0, 1, 2)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("until", "sent"),
    [
        (0, []),
        (PART - 1, [PART - 1]),
        (PART, [PART]),
        (PART + 3, [PART, 3]),
        (3 * PART - 1, [PART, PART, PART - 1]),
    ],
)
def test_a_sender_sends_up_to_its_cut_and_the_receiver_asks_for_no_more(until, sent):
    body = bytes(range(256)) * (3 * PART // 256 + 1)
    sending, size = Sending(Body([body[: 3 * PART]]), PART, until=until), 3 * PART
    receiving = Receiving(size, PART, short=until)
    first, count = receiving.grant()
    parts = sending.pulled(first, count)
    assert [len(data) for _, data in parts] == sent
    assert b"".join(bytes(data) for _, data in parts) == body[:until]
    assert sending.cut
    assert not sending.whole
    for index, data in parts:
        assert receiving.take(index, data) == index * PART
        assert receiving.ended == (len(data) < PART)
    assert not receiving.whole
    if receiving.ended:
        assert receiving.ahead == 0
        assert receiving.grant() is None


def test_a_part_that_is_short_elsewhere_than_at_the_planned_cut_is_refused():
    receiving = Receiving(3 * PART, PART, short=PART + 3)
    receiving.grant()
    part = memoryview(bytes(PART))
    with pytest.raises(RemoteProtocolError, match=f"part 0 of 3 bytes, expected part 0 of {PART}"):
        receiving.take(0, part[:3])
    assert receiving.take(0, part) == 0
    with pytest.raises(RemoteProtocolError, match=f"part 1 of 4 bytes, expected part 1 of {PART}"):
        receiving.take(1, part[:4])
    assert not receiving.ended
    assert receiving.take(1, part[:3]) == PART
    assert receiving.ended


def test_a_part_that_was_not_granted_is_refused():
    window, body = Receiving(6 * PART, PART), memoryview(bytes(PART))
    assert window.grant() == (0, WINDOW)
    for index in range(WINDOW):
        assert window.take(index, body) == index * PART
    with pytest.raises(RemoteProtocolError, match=f"expected part {WINDOW} of {PART}"):
        window.take(WINDOW, body)


def test_no_more_than_a_window_is_sent_at_once():
    sending = Sending(Body([bytes(6 * PART)]), PART)
    with pytest.raises(RemoteProtocolError, match=f"pull of parts 0 to {WINDOW}"):
        sending.pulled(0, WINDOW + 1)
    assert [index for index, _ in sending.pulled(0, WINDOW)] == list(range(WINDOW))

"""The window that the parts of a payload are sent in, and where it ends early."""

from __future__ import annotations

import pytest

from fednet.errors import RemoteProtocolError
from fednet.protocol.transfers import WINDOW, Receiving, Sending
from fednet.wire.body import Body
from tests.protocol.net import PART


@pytest.mark.parametrize(
    ("until", "sent"),
    [
        (0, []),
        (PART - 1, [PART - 1]),
        (PART, [PART]),
        (PART + 3, [PART, 3]),
        (2 * PART - 1, [PART, PART - 1]),
    ],
)
def test_a_sender_sends_up_to_where_its_receiver_is_gone(until, sent):
    body = bytes(range(256)) * (2 * PART // 256 + 1)
    sending = Sending(Body([body[: 2 * PART]]), PART, until=until)
    first, count = Receiving(2 * PART, PART).grant()
    parts = sending.pulled(first, count)
    assert [len(data) for _, data in parts] == sent
    assert b"".join(data.to_bytes() for _, data in parts) == body[:until]
    assert sending.cut
    assert not sending.whole


def test_a_part_that_is_short_is_refused_and_changes_nothing():
    receiving = Receiving(3 * PART, PART)
    receiving.grant()
    part = Body([bytes(PART)])
    for index in range(2):
        with pytest.raises(RemoteProtocolError, match=f"of 3 bytes, expected part {index}"):
            receiving.take(index, part.slice(0, 3))
        assert receiving.take(index, part) == index * PART


def test_a_part_that_was_not_granted_is_refused():
    window = Receiving(6 * PART, PART)
    body = Body([bytes(PART)])
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

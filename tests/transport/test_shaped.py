"""Slow links over the in-process transport; time is a number that the test moves."""

from __future__ import annotations

import pytest

from fednet.transport.base import Closed, Event, Opened, Received
from fednet.transport.inproc import Inproc
from fednet.transport.shaped import LinkShape, ShapedClient
from fednet.world import Rates

# 1000 and 2000 bytes a second, half a second away
SLOW = LinkShape(up_mbps=0.008, down_mbps=0.016, latency_ms=500)


class Lab:
    def __init__(self, link: LinkShape = SLOW, link_of=None) -> None:
        self.time = 100.0
        network = Inproc()
        self.server = network.server()
        self.client = ShapedClient(
            network.client(), lambda: self.time, link_of or (lambda frames: (None, link))
        )
        assert self.client.poll(0) == [Opened(b"")]

    def server_gets(self, at: float) -> list[int]:
        """First bytes of what has reached the server when the clock stands at 100 + `at`."""
        self.time = 100.0 + at
        self.client.poll(0)
        return firsts(self.server.poll(0))


def firsts(events) -> list[int]:
    return [event.frames[0][0] for event in events if isinstance(event, Received)]


def message(i: int, nbytes: int) -> list[bytes]:
    """A message of `nbytes` on the wire: 9 of them are framing."""
    return [bytes([i]) * (nbytes - 9)]


def test_time_is_bytes_over_bandwidth_plus_latency():
    assert SLOW.time(1000, "up") == 1.5
    assert SLOW.time(1000, "down") == 1.0
    assert LinkShape().time(10**9, "up") == 0.0
    assert LinkShape(up_mbps=8.0, latency_ms=20).time(10**6, "up") == pytest.approx(1.02)


def test_messages_queue_for_the_bandwidth_but_share_the_latency():
    lab = Lab()
    lab.client.send(message(1, 1000))
    lab.client.send(message(2, 2000))  # leaves from 1 to 3
    assert lab.server_gets(1.49) == []
    assert lab.server_gets(1.5) == [1]
    assert lab.server_gets(3.49) == []
    assert lab.server_gets(3.5) == [2]
    lab.client.send(message(3, 1000))  # the link has been idle: from now on
    assert lab.server_gets(4.99) == []
    assert lab.server_gets(5.0) == [3]


def test_down_is_as_slow_as_down_is_whatever_goes_up():
    lab = Lab()
    lab.client.send(message(1, 100_000))  # a hundred seconds up
    conn = next(iter(lab.server.peers))
    lab.server.send(conn, message(7, 1000))
    assert lab.client.poll(0) == []
    lab.time += 0.99
    assert lab.client.poll(0) == []
    lab.time += 0.01
    assert firsts(lab.client.poll(0)) == [7]


def test_each_client_on_a_shared_connection_has_its_own_link():
    lab = Lab(link_of=lambda frames: (frames[0][0], SLOW if frames[0][0] == 1 else LinkShape()))
    lab.client.send(message(1, 1000))
    lab.client.send(message(2, 1000))
    assert lab.server_gets(0.0) == [2]
    assert lab.server_gets(1.5) == [1]


def test_what_is_under_way_is_lost_when_the_connection_ends_and_the_link_is_free_again():
    lab = Lab()
    lab.client.send(message(1, 1000))
    lab.client.reconnect()
    assert lab.client.poll(0) == [Closed(b""), Opened(b"")]
    lab.client.send(message(2, 1000))
    assert lab.server_gets(1.5) == [2]


def test_closing_lets_what_is_on_hold_leave():
    lab = Lab()
    lab.client.send(message(1, 1000))
    lab.client.close()
    assert firsts(lab.server.poll(0)) == [1]


def test_a_poll_waits_no_longer_than_until_something_is_due():
    waited: list[float | None] = []

    class Inner:
        def poll(self, timeout_s: float | None) -> list[Event]:
            waited.append(timeout_s)
            return [Opened(b"")] if len(waited) == 1 else []

        def send(self, frames) -> bool:
            return True

    client = ShapedClient(Inner(), lambda: 0.0, lambda frames: (None, SLOW))
    client.poll(None)
    client.send(message(1, 1000))
    client.poll(None)
    client.poll(0.25)
    assert waited == [None, 1.5, 0.25]


def test_a_rate_that_changes_each_second_holds_messages_back_through_its_silence():
    # 1,000 bytes in the first second, none in the second, 2,000 in the third
    rates = Rates([0.008, 0, 0.016])
    lab = Lab(LinkShape(latency_ms=500, rates=(rates, rates)))
    lab.client.send(message(1, 1000))  # leaves until second 1
    lab.client.send(message(2, 1000))  # waits for the dead second, leaves until 2.5
    assert lab.server_gets(1.49) == []
    assert lab.server_gets(1.5) == [1]
    assert lab.server_gets(2.99) == []
    assert lab.server_gets(3.0) == [2]

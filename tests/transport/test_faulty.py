"""Faults over the in-process transport; time is a number that the test moves."""

from __future__ import annotations

import numpy as np
import pytest

from fednet.errors import ConfigError
from fednet.transport.base import Closed, Opened, Received
from fednet.transport.inproc import Inproc
from tests.transport.faulty import KINDS, Chances, Fault, FaultyClient, FaultyServer, Script


class Lab:
    """A server and a client; faults at either."""

    def __init__(self, plan=None, at: str = "client") -> None:
        self.time, self.struck = 0.0, []
        network = Inproc()
        self.server, self.client = network.server(), network.client()
        options = (
            plan or Script({}),
            lambda: self.time,
            np.random.default_rng(0),
            self.struck.append,
        )
        if at == "client":
            self.client = FaultyClient(self.client, *options)
        else:
            self.server = FaultyServer(self.server, *options)
        assert self.client.poll(0) == [Opened(b"")]

    def up(self, *messages: bytes) -> list[bytes]:
        for message in messages:
            assert self.client.send([message])
        self.client.poll(0)
        return bodies(self.server.poll(0))


def bodies(events) -> list[bytes]:
    return [bytes(event.frames[0]) for event in events if isinstance(event, Received)]


@pytest.mark.parametrize("at", ["client", "server"])
def test_a_scripted_fault_strikes_its_message_once_and_no_other(at):
    lab = Lab(Script({("up", 1): Fault("drop")}), at)
    assert lab.up(b"0", b"1", b"2") == [b"0", b"2"]
    ((fault, direction, index, nbytes),) = [
        (s.fault, s.direction, s.index, s.nbytes) for s in lab.struck
    ]
    assert (fault, direction, index, nbytes) == (Fault("drop"), "up", 1, 1)


@pytest.mark.parametrize("at", ["client", "server"])
def test_a_doubled_message_comes_twice_in_a_row(at):
    lab = Lab(Script({("up", 0): Fault("duplicate")}), at)
    assert lab.up(b"0", b"1") == [b"0", b"0", b"1"]


@pytest.mark.parametrize("at", ["client", "server"])
def test_a_corrupted_message_differs_in_one_byte_and_the_senders_copy_does_not(at):
    sent = bytes(1000)
    lab = Lab(Script({("up", 0): Fault("corrupt")}), at)
    (came,) = lab.up(sent)
    assert len(came) == 1000
    assert sum(a != b for a, b in zip(came, sent)) == 1
    assert sent == bytes(1000)


def test_a_truncated_message_has_a_shorter_last_frame():
    lab = Lab(Script({("up", 0): Fault("truncate")}))
    lab.client.send([b"header", b"0123456789"])
    (message,) = (event for event in lab.server.poll(0) if isinstance(event, Received))
    assert message.frames[0] == b"header"
    assert b"0123456789".startswith(message.frames[1])
    assert len(message.frames[1]) < 10


@pytest.mark.parametrize("at", ["client", "server"])
def test_a_delayed_message_and_those_behind_it_come_later_in_order(at):
    lab = Lab(Script({("up", 1): Fault("delay", delay_s=5)}), at)
    assert lab.up(b"0", b"1", b"2") == [b"0"]
    lab.time = 4.9
    assert lab.up() == []
    lab.time = 5.0
    assert lab.up(b"3") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("at", ["client", "server"])
def test_down_is_struck_on_its_own_count(at):
    lab = Lab(Script({("down", 1): Fault("drop"), ("down", 2): Fault("delay", delay_s=1)}), at)
    assert lab.up(b"0") == [b"0"]
    conn = next(iter(lab.server.inner.peers if at == "server" else lab.server.peers))
    for i in range(4):
        assert lab.server.send(conn, [b"%d" % i])
    assert bodies(lab.client.poll(0)) == [b"0"]
    lab.time = 1.0
    lab.server.poll(0)
    assert bodies(lab.client.poll(0)) == [b"2", b"3"]


@pytest.mark.parametrize("at", ["client", "server"])
def test_a_cut_loses_the_message_and_the_client_comes_back_as_another_connection(at):
    lab = Lab(Script({("up", 1): Fault("cut")}), at)
    assert lab.client.send([b"0"])
    first = lab.server.poll(0)[0].conn
    lab.client.send([b"1"])
    events = lab.server.poll(0)
    assert lab.client.poll(0) == [Closed(b""), Opened(b"")]
    lab.client.send([b"2"])
    events += lab.server.poll(0)
    assert bodies(events) == [b"2"]
    assert Closed(first) in events


@pytest.mark.parametrize("by_itself", [False, True])
def test_what_is_on_hold_is_lost_when_the_connection_ends(by_itself):
    lab = Lab(Script({("up", 0): Fault("delay", delay_s=1)}))
    assert lab.up(b"0") == []
    (lab.client.inner if by_itself else lab.client).reconnect()
    lab.time = 2.0
    assert lab.client.poll(0) == [Closed(b""), Opened(b"")]
    assert lab.up(b"1") == [b"1"]


def test_chances_strike_about_as_often_as_said_and_the_same_for_the_same_seed():
    def drawn() -> list[str | None]:
        plan = Chances(np.random.default_rng(3), {"drop": 0.25, "corrupt": 0.5})
        faults = [plan("up", i, [b""]) for i in range(2000)]
        return [fault and fault.kind for fault in faults]

    first = drawn()
    assert first == drawn()
    assert set(first) == {"drop", "corrupt", None}
    # four standard deviations: 4 * sqrt(2000 * 0.25 * 0.75) = 77
    assert abs(first.count("drop") - 500) < 80
    assert abs(first.count("corrupt") - 1000) < 90


def test_a_random_delay_lies_within_its_limit():
    plan = Chances(np.random.default_rng(3), {"delay": 1.0}, delay_s=2.0)
    delays = [plan("up", i, [b""]).delay_s for i in range(100)]
    assert 0 <= min(delays) < 0.5
    assert 1.5 < max(delays) <= 2.0


@pytest.mark.parametrize(
    ("chances", "said"),
    [
        ({"dorp": 0.1}, "Did you mean 'drop'"),
        ({"drop": 1.5}, "from 0 to 1, got 1.5"),
        ({"drop": 0.6, "cut": 0.6}, "sum to 1.2"),
    ],
)
def test_chances_that_are_none_are_an_error(chances, said):
    with pytest.raises(ConfigError, match=said):
        Chances(np.random.default_rng(0), chances)


def test_an_unknown_fault_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match="corrupt, cut, delay, drop, duplicate, truncate"):
        Fault("explode")
    assert len(KINDS) == 6

"""Real sockets on free ports; every wait is a poll with a limit that a working transport never
reaches.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from contextlib import ExitStack

import pytest
import zmq

from fednet import proc
from fednet.errors import ConfigError
from fednet.transport.base import (
    MAX_FRAME_BYTES,
    Closed,
    Opened,
    Received,
    reached_at,
)
from fednet.transport.zeromq import server as zeromq_server
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer
from fednet.transport.zeromq.sockets import SEND_MESSAGES
from tests.transport.pairs import LIMIT_S, joined, of, opened, pump, said, spoken


def test_frames_arrive_as_sent_both_ways_small_and_large(pair):
    client, conn = joined(pair)
    body = bytes(range(256)) * 4096
    client.send([b"header", memoryview(body)])
    pair.server.send(conn, [b"answer", memoryview(body)])
    seen = pump(pair.server, client, until=lambda seen: len(of(seen, Received)) == 2)
    (up,) = of(seen, Received, pair.server)
    (down,) = of(seen, Received, client)
    assert (up.conn, down.conn) == (conn, b"")
    assert (up.user, down.user) == (None, None)
    assert [bytes(f) for f in up.frames] == [b"header", body]
    assert [bytes(f) for f in down.frames] == [b"answer", body]
    assert isinstance(up.frames[1], memoryview)


@pytest.mark.parametrize("ends", ["client", "server"])
def test_last_messages_come_before_closed(pair, ends):
    client, conn = joined(pair)
    for i in range(5):
        if ends == "client":
            client.send([b"%d" % i])
        else:
            pair.server.send(conn, [b"%d" % i])
    one, other = (client, pair.server) if ends == "client" else (pair.server, client)
    one.close(LIMIT_S)
    seen = pump(other, until=lambda seen: of(seen, Closed))
    assert [event.frames[0] for event in of(seen, Received)] == [b"0", b"1", b"2", b"3", b"4"]
    assert seen[-1][1] == Closed(conn if ends == "client" else b"")


def test_closed_is_for_the_connection_that_ended_even_when_descriptors_are_reused(pair):
    stays, kept = joined(pair)
    ended = []
    for _ in range(20):  # the kernel gives each the descriptors of the one before
        client, conn = joined(pair)
        client.close(0)
        seen = pump(pair.server, stays, until=lambda seen: of(seen, Closed))
        ended.append((of(seen, Closed), conn))
    assert all(closed == [Closed(conn)] for closed, conn in ended)
    assert len({conn for _, conn in ended} | {kept}) == 21
    assert pair.server.send(kept, [b"still here"])


def test_connections_that_ended_before_anyone_looked_are_still_reported_once_each(pair):
    clients = []
    for i in range(10):
        client = pair.client()
        pump(client, until=lambda seen: of(seen, Opened))
        client.send([b"%d" % i])
        client.close(LIMIT_S)
        clients.append(client)
    seen = pump(pair.server, until=lambda seen: len(of(seen, Closed)) == 10)
    assert sorted(event.frames[0] for event in of(seen, Received)) == [b"%d" % i for i in range(10)]
    assert sorted(event.conn for event in of(seen, Closed)) == sorted(
        event.conn for event in of(seen, Received)
    )
    for event in of(seen, Received):
        kinds = [type(e) for _, e in seen if e.conn == event.conn]
        assert kinds == [Opened, Received, Closed]


def test_a_client_does_not_queue_while_there_is_no_connection(pair):
    client = pair.client()
    assert client.send([b"too early"]) is False
    pump(pair.server, client, until=lambda seen: of(seen, Opened))
    assert said(pair, client, b"in time").frames == (b"in time",)


def test_more_than_the_high_water_mark_to_a_peer_that_does_not_read_is_queued_then_delivered(pair):
    client, conn = joined(pair)
    body = b"x" * 2**20
    count = 3 * SEND_MESSAGES
    for i in range(count):
        assert pair.server.send(conn, [b"%d" % i, body])
    assert pair.server._blocked, "this test sends too little to fill the queues"
    assert pair.server.poll(0) == []
    seen = pump(pair.server, client, until=lambda seen: len(of(seen, Received)) == count)
    assert [int(event.frames[0]) for event in of(seen, Received)] == list(range(count))
    assert not pair.server._blocked


def test_what_is_queued_for_a_peer_has_time_to_leave_as_the_server_closes(pair):
    client, conn = joined(pair)
    count = 3 * SEND_MESSAGES
    for i in range(count):
        pair.server.send(conn, [b"%d" % i, b"x" * 2**20])
    assert pair.server._blocked
    closing = threading.Thread(target=pair.server.close, args=(LIMIT_S,))
    closing.start()
    seen = pump(client, until=lambda seen: of(seen, Closed))
    closing.join()
    assert [int(event.frames[0]) for event in of(seen, Received)] == list(range(count))


def test_what_is_for_a_peer_that_is_gone_is_not_sent_although_its_end_was_not_read(pair):
    """A message that did not leave is in no book."""
    client, conn = joined(pair)
    client.close(0)
    assert pair.server._monitor.poll(LIMIT_S * 1000)
    limit = time.monotonic() + LIMIT_S
    while pair.server.send(conn, [b"lost"]):
        assert time.monotonic() < limit
    assert not pair.server._blocked


def test_connections_that_ended_make_room_for_others(pair):
    """Each of those that took part had a second descriptor, which is given back."""
    pair.server._room = 8
    for _ in range(8):
        client, _conn = joined(pair)
        client.close(0)
        pump(pair.server, until=lambda seen: of(seen, Closed))
    strangers = [pair.stranger() for _ in range(4)]  # as many as may be there
    for stranger in strangers:
        stranger.sendall(b"\xff")
    pump(pair.server, until=lambda seen: len(pair.server._by_descriptor) == len(strangers))
    assert not pair.refused


def test_what_waits_for_a_connection_is_not_for_the_next_one_on_its_descriptor(pair):
    """As when an older connection's last words come after the newer one has got its descriptor, and
    were answered.
    """
    _client, older = joined(pair)
    while not pair.server._blocked:
        pair.server.send(older, [b"for the older", b"x" * 2**20])
    newer = older[:1] + (int.from_bytes(older[1:], "big") + 1).to_bytes(4, "big")
    links = pair.server._by_descriptor
    (descriptor,) = links
    events = []
    assert pair.server._meet(newer, None, descriptor, events)
    assert events == [Opened(newer), Closed(older)]
    assert not links[descriptor].queue
    assert not pair.server._blocked


@pytest.mark.parametrize(
    ("has", "comes", "newer"),
    [(4, 5, True), (5, 4, False), (2**32 - 1, 0, True), (0, 2**32 - 1, False)],
)
def test_of_two_connections_with_one_descriptor_the_one_with_the_later_number_has_it(
    pair, has, comes, newer
):
    """libzmq's numbers begin at random and go on from 0 after 2^32 - 1."""
    _client, conn = joined(pair)
    conns = pair.server._by_routing_id
    link = conns.pop(conn)
    link.conn, other = (b"\0" + number.to_bytes(4, "big") for number in (has, comes))
    mine = link.conn
    conns[mine] = link
    events = []
    assert pair.server._meet(other, None, link.fd, events) is newer
    assert events == ([Opened(other), Closed(mine)] if newer else [Opened(other)])
    assert conns == {other if newer else mine: link}


def test_a_connection_whose_descriptor_is_anothers_has_ended_although_libzmq_said_nothing(
    pair, monkeypatch
):
    _client, conn = joined(pair)
    (descriptor,) = pair.server._by_descriptor
    events = [(zmq.EVENT_ACCEPTED, descriptor)]
    with monkeypatch.context() as patched:
        patched.setattr(zeromq_server, "monitor_events", lambda monitor: events)
        pair.server._read_monitor()
    assert of(pump(pair.server, until=lambda seen: of(seen, Closed)), Closed)[0].conn == conn
    assert not pair.server.send(conn, [b"x"])


def test_a_connection_that_ended_before_anyone_looked_is_not_the_next_one_on_its_descriptor(
    pair, monkeypatch
):
    with pair.stranger() as others:
        fd = others.fileno()
        events = [(zmq.EVENT_ACCEPTED, fd), (zmq.EVENT_DISCONNECTED, fd)]
        with monkeypatch.context() as patched:
            patched.setattr(zeromq_server, "monitor_events", lambda monitor: events)
            pair.server._read_monitor()
        assert pair.server.traffic() == {}


def test_what_was_sent_over_a_connection_that_ended_does_not_come_over_the_next(pair):
    client, conn = joined(pair)
    for _ in range(SEND_MESSAGES):
        assert client.send([b"old", bytes(2**20)])
    pair.server.hang_up(conn)
    seen = pump(pair.server, client, until=lambda seen: of(seen, Opened, client))
    client.send([b"new"])
    seen += pump(
        pair.server, client, until=lambda seen: any(e.conn != conn for e in of(seen, Received))
    )
    later = [e.frames[0] for e in of(seen, Received, pair.server) if e.conn != conn]
    assert later == [b"new"]


def test_hanging_up_closes_one_connection_and_its_client_comes_back_as_another(pair):
    client, conn = joined(pair)
    other, kept = joined(pair)
    pair.server.hang_up(conn)
    seen = pump(pair.server, client, other, until=lambda seen: len(of(seen, Opened, client)) == 1)
    assert of(seen, Closed, pair.server) == [Closed(conn)]
    assert [type(e) for w, e in seen if w is client] == [Closed, Opened]
    assert of(seen, Closed, other) == []
    assert said(pair, client, b"again").conn not in (conn, kept)


def test_a_client_says_why_it_has_no_connection_until_it_has_one(pair):
    client = opened(pair)
    assert client.trouble == ""
    with socket.socket() as free, socket.socket() as silent:
        for one in (free, silent):
            one.bind(("127.0.0.1", 0))
        silent.listen()
        for address, trouble in (
            (f"127.0.0.1:{free.getsockname()[1]}", "nothing is listening"),
            ("host.invalid:5555", "the host name is unknown"),  # RFC 2606: never a host's
            (f"127.0.0.1:{silent.getsockname()[1]}", "no answer so far"),
        ):
            client.reconnect(f"tcp://{address}")
            pump(pair.server, client, until=lambda seen: client.trouble.startswith(trouble))  # noqa: B023
    client.reconnect(pair.server.address)
    pump(pair.server, client, until=lambda seen: of(seen, Opened, client))
    assert client.trouble == ""


def test_reconnect_moves_to_another_address(pair, new_pair):
    client, conn = joined(pair)
    other = new_pair()
    client.reconnect(other.server.address)
    seen = pump(other.server, client, pair.server, until=lambda seen: len(seen) == 3)
    assert [type(e) for w, e in seen if w is client] == [Closed, Opened]
    assert of(seen, Closed, pair.server) == [Closed(conn)]
    assert said(other, client, b"hello").frames == (b"hello",)


def test_what_was_sent_to_a_connection_that_ended_does_not_reach_the_next(new_pair):
    first = new_pair()
    client, _ = joined(first)
    first.server.close(0)
    assert client._monitor.poll(LIMIT_S * 1000)  # libzmq has noticed; we have not looked yet
    assert client.send([b"lost"])
    second = new_pair(first.server.address)
    pump(second.server, client, until=lambda seen: of(seen, Opened, client))
    assert said(second, client, b"join").frames == (b"join",)


def test_wake_from_another_thread_ends_a_poll_without_limit(pair):
    client = opened(pair)
    for end in (pair.server, client):
        thread = threading.Thread(target=end.wake)
        thread.start()
        assert end.poll(None) == []
        thread.join()


@pytest.mark.parametrize("known", [True, False])
def test_a_message_of_three_frames_or_of_very_many_ends_its_connection_and_no_other(pair, known):
    told: list[tuple[str, str]] = []
    pair.server.on_refused = lambda *refused: told.append(refused)
    other, _ = joined(pair)
    client = joined(pair)[0] if known else pair.client()
    pump(pair.server, client, until=lambda seen: client._open)
    client._dealer.send_multipart([b""] * 100_000)
    seen = pump(pair.server, client, other, until=lambda seen: of(seen, Closed, client))
    assert of(seen, Closed, other) == of(seen, Received) == []
    ((reason, address),) = told
    assert reason == "a message of more than the 2 frames that are allowed"
    assert address.startswith("127.0.0.1:")
    assert said(pair, other, b"fine").frames == (b"fine",)


def test_a_frame_above_the_limit_ends_the_connection(pair):
    client, conn = joined(pair)
    client.send([b"header", bytes(MAX_FRAME_BYTES + 1)])
    seen = pump(pair.server, client, until=lambda seen: of(seen, Closed, pair.server))
    assert of(seen, Received, pair.server) == []
    assert of(seen, Closed, pair.server) == [Closed(conn)]


def test_those_who_take_part_are_kept_and_of_the_others_the_oldest_go_first(pair):
    pair.server._room = 4  # of which the first has two descriptors
    _client, conn = joined(pair)
    first, second = (pair.stranger() for _ in range(2))
    for one in (first, second):
        one.sendall(b"\xff")
    spoken(pair)
    assert pair.refusals("descriptors")
    assert pair.ends(first)
    assert not pair.ends(second)
    spoken(pair)
    assert pair.ends(second)
    assert pair.server.send(conn, [b"still"])


def test_strangers_take_one_descriptor_each_and_what_is_left_is_for_files(tmp_path, new_pair):
    before = proc.descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.socket()) for _ in range(100)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100 + 120, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        pair = new_pair()
        own = proc.descriptors()
        host, port = pair.server.address.removeprefix("tcp://").split(":")
        for one in crowd:
            one.connect((host, int(port)))
            one.sendall(b"\xff")
            pair.server.poll(0)
        for _ in range(50):
            (tmp_path / "file").open("a").close()
            pair.server.poll(0.002)
        assert pair.refused
        assert proc.descriptors() - own <= pair.server._room


def test_peers_that_say_nothing_take_no_descriptor(pair):
    client, _conn = joined(pair)
    before = proc.descriptors()
    crowd = [pair.stranger() for _ in range(50)]
    late, _ = joined(pair)
    # what these two took: a socket each here, the newest client's two ends and a second handle
    assert proc.descriptors() - before < len(crowd) + 20
    crowd[0].sendall(greeting())
    pump(pair.server, client, late, until=lambda seen: len(pair.server._by_descriptor) == 3)
    assert crowd[0].recv(64)


def test_what_is_kept_of_connections_that_ended_is_bounded(new_pair):
    pair = new_pair()
    for _ in range(12):
        with pair.stranger() as stranger:
            stranger.sendall(greeting())
            assert stranger.recv(64)
            assert stranger.recv(43)
            stranger.sendall(b"\x00\x02hi")
            pump(pair.server, until=lambda seen: of(seen, Received))
        pump(pair.server, until=lambda seen: of(seen, Closed))
    counts = pair.server.traffic()
    assert [received for _, received in counts.values()] == [12 * (len(greeting()) + 4)]


def test_closing_while_a_peer_does_not_read_takes_no_processor(pair):
    client, conn = joined(pair)
    while not pair.server._blocked:
        pair.server.send(conn, [b"x" * 2**20])
    for _ in range(4):
        client.send([b"unread"])
    assert pair.server._router.poll(LIMIT_S * 1000)
    began = time.monotonic()
    spent = time.thread_time()
    pair.server.close(0.5)
    assert time.thread_time() - spent < 0.25 < 0.4 < time.monotonic() - began


NO_PORT = ["tcp://127.0.0.1:99999", "tcp://*:65536"]
NO_NUMBER = ["tcp://127.0.0.1:port", "tcp://*:-1", "tcp://*:1.5", "tcp://*:0x5"]
NO_ADDRESS = ["", "x", "tcp://", "tcp://*", "localhost", "udp://1.2.3.4:5", "inproc://x", "udp:"]


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (NO_PORT, "there is no port .*; expected 0 to 65535"),
        (NO_NUMBER, "has no port.*: expected tcp://HOST:PORT"),
        (NO_ADDRESS, "expected tcp://HOST:PORT"),
    ],
)
@pytest.mark.parametrize("end", [ZmqServer, ZmqClient])
def test_what_is_no_address_between_processes_is_an_error(end, addresses, reason):
    for address in addresses:
        with pytest.raises(ConfigError, match=reason):
            end(address)


def greeting() -> bytes:
    """ZMTP 3.0's, and a READY, of a DEALER with no security."""
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
    security = b"NULL".ljust(20, b"\0") + bytes(32)
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + security + b"\x04" + bytes([len(ready)]) + ready


def test_bytes_of_a_message_that_is_not_whole_yet_are_seen(pair):
    with pair.stranger() as stranger:
        stranger.sendall(greeting())
        assert stranger.recv(64)  # the server's greeting
        assert stranger.recv(43)  # its READY
        stranger.sendall(b"\x00\x02hi")
        seen = pump(pair.server, until=lambda seen: of(seen, Received))
        conn = of(seen, Received)[0].conn
        before = pair.server.bytes_read(conn)
        assert before == len(greeting()) + 4
        stranger.sendall(b"\x02" + (2**20).to_bytes(8, "big") + bytes(5000))
        until = time.monotonic() + LIMIT_S
        while pair.server.bytes_read(conn) < before + 5009:
            assert time.monotonic() < until
            assert pair.server.poll(0.01) == []


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "more than 393216 bytes before it joined"),
        (b"\x00\x02hi", "more than 3145728 bytes of no finished message"),
    ],
    ids=["at once", "after it joined"],
)
def test_a_peer_whose_message_never_ends_is_hung_up_on_and_disturbs_nobody(
    first, reason, pair, monkeypatch
):
    monkeypatch.setattr(zeromq_server, "MAX_UNFINISHED_BYTES", 3 * 2**20)
    client, conn = joined(pair)
    frame = b"\x03" + (2**20).to_bytes(8, "big") + bytes(2**20)  # long, and more to follow
    with pair.stranger() as stranger:
        stranger.sendall(greeting())
        if first:
            assert stranger.recv(64)  # the server's greeting
            assert stranger.recv(43)  # its READY
            stranger.sendall(first)
            seen = pump(pair.server, until=lambda seen: of(seen, Received))
            pair.server.vouch(of(seen, Received)[0].conn)
        stranger.setblocking(False)
        sent = 0
        ended = False
        until = time.monotonic() + LIMIT_S
        while not ended:
            assert time.monotonic() < until
            with contextlib.suppress(BlockingIOError):
                try:
                    sent += stranger.send(frame[sent % len(frame) :])
                except (BrokenPipeError, ConnectionResetError):
                    ended = True
            # At full speed a fast machine sends a gigabyte between two looks.
            assert not any(isinstance(event, Received) for event in pair.server.poll(0.01))
    assert pair.refused == [reason]
    for _ in range(8):  # as much in whole messages is no offence
        client.send([b"header", bytes(2**20)])
    seen = pump(pair.server, client, until=lambda seen: len(of(seen, Received)) == 8)
    assert Closed(conn) not in of(seen, Closed)


@pytest.mark.parametrize(
    ("bytes_sent", "reason"),
    [
        # To libzmq: ZMTP 1 with an identity of 70 bytes.
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 8, "routing id"),
        # ZMTP 1, empty identity, a message of five bytes
        (bytes([1, 0, 6, 0]) + b"hello", "ZMTP"),
    ],
)
def test_noise_and_old_versions_are_refused_and_disturb_nobody(pair, bytes_sent, reason):
    client, _conn = joined(pair)
    with pair.stranger() as stranger:
        stranger.sendall(bytes_sent)
        seen = pump(pair.server, client, until=lambda seen: pair.refusals(reason))
    assert seen == []
    assert said(pair, client, b"fine").frames == (b"fine",)


def test_a_routing_id_of_the_peers_own_choice_is_refused_though_it_is_as_long_as_libzmqs(pair):
    client, _conn = joined(pair)
    with zmq.Context() as context, context.socket(zmq.DEALER) as chosen:
        chosen.linger = 0
        chosen.routing_id = b"abcde"
        chosen.connect(pair.server.address)
        chosen.send(b"hello")
        seen = pump(pair.server, client, until=lambda seen: pair.refusals("routing id"))
    assert seen == []


def test_a_port_in_use_is_an_error_that_says_so(pair):
    with pytest.raises(ConfigError, match=r"cannot bind 'tcp://127.0.0.1:\d+': the port is in use"):
        ZmqServer(pair.server.address)


def test_closing_twice_and_waking_after_closing_do_nothing(pair):
    client = pair.client()
    for end in (client, pair.server):
        end.close(0)
        end.close(0)
        end.wake()


def test_a_server_at_every_address_that_does_not_listen_yet_says_where_it_is_reached():
    server = ZmqServer("tcp://*:*", later=True)
    try:
        told = reached_at(server.address, "far.example")
        assert told.rpartition(":")[0] == "tcp://far.example"
        server.listen()
        assert reached_at(server.address, "far.example") == told
    finally:
        server.close(0.0)

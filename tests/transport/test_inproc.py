from __future__ import annotations

import pytest

from fednet.transport.base import Closed, Opened, Received
from fednet.transport.inproc import Inproc


def both():
    network = Inproc()
    server = network.server()
    client = network.client()
    assert client.poll(0) == [Opened(b"")]
    return network, server, client


def test_headers_arrive_as_bytes_of_their_own_and_payloads_as_they_are_both_ways():
    _, server, client = both()
    header = bytearray(b"up")
    body = memoryview(b"body")
    assert client.send([memoryview(header), body])
    header[:] = b"??"
    opened, up = server.poll(None)
    assert opened == Opened(up.conn)
    assert isinstance(up, Received)
    assert up.frames[0] == b"up"
    assert up.frames[1].obj is body.obj
    assert up.frames[1].readonly
    assert server.send(up.conn, [b"down", body])
    (down,) = client.poll(None)
    assert isinstance(down, Received)
    assert (down.conn, down.frames[0], bytes(down.frames[1])) == (b"", b"down", b"body")
    assert client.poll(None) == server.poll(None) == []


def arrivals(seed: int) -> list[tuple[int, int]]:
    network = Inproc(seed)
    server = network.server()
    clients = [network.client() for _ in range(4)]
    for i in range(5):
        for k, client in enumerate(clients):
            client.send([bytes([k, i])])
    return [tuple(event.frames[0]) for event in server.poll(0) if isinstance(event, Received)]


def test_one_connections_messages_keep_their_order_and_different_ones_mix_as_the_seed_says():
    seen = arrivals(1)
    assert len(seen) == 20
    assert all([i for k, i in seen if k == client] == [0, 1, 2, 3, 4] for client in range(4))
    assert seen == arrivals(1)
    assert seen != arrivals(2)


def test_closing_a_client_delivers_what_it_sent_then_closed():
    _, server, client = both()
    client.send([b"last"])
    client.close()
    client.close()
    opened, last, closed = server.poll(0)
    assert (opened, last.frames, closed) == (Opened(last.conn), (b"last",), Closed(last.conn))
    assert server.send(last.conn, [b"x"]) is False
    assert client.send([b"x"]) is False


def test_a_client_that_never_spoke_is_not_reported():
    _, server, client = both()
    client.close()
    assert server.poll(0) == []


@pytest.mark.parametrize("by", ["client", "server"])
def test_after_a_reconnect_the_client_is_another_connection(by):
    _, server, client = both()
    client.send([b"1"])
    old = server.poll(0)[0].conn
    if by == "client":
        client.reconnect()
    else:
        server.hang_up(old)
    assert client.poll(0) == [Closed(b""), Opened(b"")]
    client.send([b"2"])
    events = server.poll(0)
    assert Closed(old) in events
    (again,) = (event for event in events if isinstance(event, Received))
    assert again.conn != old


def test_clients_find_the_next_server_when_one_closes():
    network, server, client = both()
    server.close()
    assert client.poll(0) == [Closed(b"")]
    assert client.send([b"x"]) is False
    following = network.server()
    assert client.poll(0) == [Opened(b"")]
    client.send([b"hello"])
    assert [event.frames for event in following.poll(0) if isinstance(event, Received)] == [
        (b"hello",)
    ]

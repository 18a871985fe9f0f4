"""What strangers and floods may cost, in plain numbers; and a federation that comes all at once."""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from fednet import descriptors
from fednet.protocol.instructions import MOST_STRAYS
from fednet.server import io as server_io
from fednet.server.events import PEERS, Rate
from fednet.transport import keys
from fednet.transport.inproc import Inproc
from fednet.transport.zeromq.server import ZmqServer
from fednet.wire import messages as m
from fednet.wire.frames import decode_from_server, encode
from tests.server.test_io_thread import made_io

LIMIT_S = 60.0


def test_messages_are_counted_by_who_sends_them_and_come_back_with_time():
    """Two a second, five at once."""
    rate = Rate(2.0, 5.0)
    assert [rate.allows("one", 10.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert rate.allows("another", 10.0)
    assert [rate.allows("one", 11.0) for _ in range(3)] == [True, True, False]
    assert [rate.allows("one", 99.0) for _ in range(6)] == [True] * 5 + [False]


@pytest.mark.parametrize("curve", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_thousand_clients_join_at_once_and_nobody_is_hung_up_on(tmp_path, curve):
    many = 2000
    if descriptors.limit(raised=True) < 5 * many:
        pytest.skip("the system lets a process have too few descriptors for both sides")
    with ExitStack() as stack:
        keyring = None
        if curve:
            keys.make_server_keys(tmp_path)
            keys.allow(tmp_path, range(many), keys.make_client_keys(tmp_path / "site.key"))
            keyring = keys.Keyring(tmp_path)
            site = keys.load(tmp_path / "site.key")
        refused: list[tuple[str, str]] = []
        server = ZmqServer(
            "tcp://127.0.0.1:*", keyring=keyring, on_refused=lambda *what: refused.append(what)
        )
        io, *_ = made_io(tmp_path, server, many, curve=curve)
        stack.callback(io.close, linger_s=0.0)
        context = stack.enter_context(zmq.Context())
        context.max_sockets = many + 10
        context.linger = 0
        dealers = {}
        poller = zmq.Poller()
        for k in range(many):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.linger = 0
            if curve:
                dealer.curve_publickey = site.public.encode()
                dealer.curve_secretkey = site.secret.encode()
                dealer.curve_serverkey = keyring.pair.public.encode()
            dealer.connect(server.address)
            dealer.send(encode(m.Join(worker=f"w-{k}", ids=[k])))
            poller.register(dealer, zmq.POLLIN)
            dealers[dealer] = k
        limit = time.monotonic() + LIMIT_S
        while dealers:
            assert time.monotonic() < limit, (len(dealers), refused)
            for dealer, _ in poller.poll(100):
                message, _ = decode_from_server(dealer.recv_multipart())
                assert message.ids == [dealers.pop(dealer)]
                poller.unregister(dealer)
        assert refused == []
        assert len(io.protocol.roster.workers) == many


@pytest.fixture
def served(tmp_path):
    """The I/O of a server in this process, the rows of its book, and clients that join it."""
    network = Inproc()
    io, rows, _ = made_io(tmp_path, network.server(), pump=lambda: False)

    def client(*joins: int):
        """One that joins with these ids, if any."""
        one = network.client()
        if joins:
            one.send([encode(m.Join(worker=f"w-{joins[0]}", ids=list(joins)))])
            io._step(0.0)
        return one

    yield io, rows, client
    io.close(linger_s=0.0)


def test_rounds_that_a_peer_makes_up_take_no_row_and_no_memory(served):
    io, rows, client = served
    peer = client(0)
    before = len(rows)
    tables = len(io.journal.book.unrecorded)
    part = m.Part(run="run", inc=1, key=m.Key(0, 0, 0, 0), index=0)
    for n in range(1, 60):
        for key in (m.Key(n, 0, 0, 0), m.Key(0, 0, 0, 1)):
            peer.send([encode(msgspec.structs.replace(part, key=key)), b"body"])
    io._step(0.0)
    io.link.close_counted(peer.conn)
    came = [r for r in rows[before:] if r["direction"] == "up"]
    assert [(r["type"], r["count"]) for r in came] == [("refused", 2 * 59)]
    assert len(io.journal.book.unrecorded) == tables


def test_of_payloads_that_belong_to_nothing_the_first_have_rows_and_many_more_share_one(served):
    io, rows, client = served
    peer = client(0)
    before = len(rows)
    part = m.Part(run="run", inc=1, key=m.Key(io.protocol.round, 0, 0, 0), index=0)
    for _ in range(MOST_STRAYS + 7):
        peer.send([encode(part), b"body"])
    io._step(0.0)
    io.link.close_counted(peer.conn)
    came = [(r["type"], r.get("count")) for r in rows[before:] if r["direction"] == "up"]
    assert came == [("reply", None)] * MOST_STRAYS + [("refused", 7)]


BEAT = encode(m.Alive(run="run", inc=1))
READY = encode(m.Ready(run="run", inc=1, layout="L"))


def sent_until_hung_up(io, flood, honest, at_once: int, useless: bytes = BEAT) -> int:
    """Send so many useless messages to each heartbeat of an honest client, until the server ends
    the flood's connection. Return how many were sent.
    """
    conn = flood.conn
    sent = 0
    limit = time.monotonic() + LIMIT_S
    while flood.conn == conn:
        assert time.monotonic() < limit
        for _ in range(at_once):
            flood.send([useless])
        sent += at_once
        honest.send([BEAT])
        io._step(0.0)
    return sent


@pytest.mark.parametrize("useless", [BEAT, READY], ids=["heartbeats", "ready"])
def test_a_flood_of_useless_messages_is_hung_up_on_and_its_bytes_are_booked(served, useless):
    io, rows, client = served
    honest = client(0)
    flood = client(1)
    kept = honest.conn
    sent = sent_until_hung_up(io, flood, honest, 200, useless)
    assert sent > server_io.USELESS_AT_ONCE
    assert honest.conn == kept
    io._step(0.0)
    booked = sum(r.get("count", 1) for r in rows if r["type"] in ("beat", "ready", "refused"))
    assert booked >= sent  # what came after it was hung up on, too


def test_no_more_peers_are_remembered_than_there_is_room_for():
    rate = Rate(1.0, 1.0)
    for n in range(2 * PEERS):
        assert rate.allows(n, 0.0)
    assert not rate.allows(2 * PEERS - 1, 0.0)
    assert rate.allows(0, 0.0)  # forgotten


def test_a_flood_before_a_join_is_hung_up_on_and_whoever_has_joined_is_kept(served):
    io, _, client = served
    honest = client(0)
    flood = client()
    flood.send([BEAT])
    io._step(0.0)
    kept = honest.conn
    sent = 1 + sent_until_hung_up(io, flood, honest, 50)
    assert sent >= server_io.JOINS_AT_ONCE
    assert honest.conn == kept
    honest.close()
    flood.close()
    io._step(0.0)
    assert not io._hung_up | io._addresses.keys()  # nothing is kept of connections that have ended


def test_of_a_connection_that_is_hung_up_on_nothing_more_is_taken_in(served):
    io, _, client = served
    flood = client(0)
    (worker,) = io.protocol.roster.workers.values()
    for _ in range(2 * server_io.USELESS_AT_ONCE):
        flood.send([BEAT])
    flood.send([encode(m.Slots(run="run", inc=1, slots=3))])
    io._step(0.0)
    assert worker.slots == 1

"""What strangers and floods may cost, in plain numbers; and a federation that comes all at once."""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec
import pytest
import zmq

from fednet import descriptors
from fednet.protocol.server import ServerProtocol
from fednet.server.io_thread import Events, ServerIO
from fednet.server.peers import budget
from fednet.server.peers.budget import Allowance, Peers, Strangers
from fednet.server.spool import Spool
from fednet.transport import keys
from fednet.transport.base import Closed, Received
from fednet.transport.framing import connection_bytes, framing
from fednet.transport.inproc import Inproc
from fednet.transport.zeromq.router import ZmqServer
from fednet.wire import messages as m
from fednet.wire.frames import decode_from_server, encode
from fednet.wire.ledger import Ledger
from fednet.wire.link import Link

LIMIT_S = 60.0


def test_an_allowance_is_spent_and_comes_back_with_time():
    allowance = Allowance(0.1, 0.5, now=0.0)
    allowance.spend(0.7, 0.0)
    assert allowance.left(0.0) == pytest.approx(-0.2)
    assert allowance.wait(1.0) == pytest.approx(1.0)
    assert allowance.left(100.0) == 0.5


def test_strangers_are_heard_in_order_and_not_beyond_their_time():
    strangers = Strangers(time.monotonic())
    first, second = Received(b"a", (b"1",)), Received(b"b", (b"2",))
    assert strangers.put(first)
    assert strangers.put(second)
    assert strangers.put(Closed(b"a"))
    assert strangers.next(time.monotonic(), hurried=True) is first
    strangers.spent(budget.STRANGERS_AT_ONCE_S + 1.0)
    assert strangers.next(time.monotonic(), hurried=True) is None
    assert 1.0 < strangers.wait(time.monotonic()) <= 1.1 / budget.STRANGERS_SHARE
    assert strangers.next(time.monotonic(), hurried=False) is second  # nobody is kept waiting
    assert b"a" in strangers
    assert strangers.next(time.monotonic(), hurried=False) == Closed(b"a")
    assert b"a" not in strangers
    assert strangers.wait(time.monotonic()) is None


def test_what_waits_of_strangers_is_bounded_by_connection_and_in_bytes():
    strangers = Strangers(0.0)
    assert all(strangers.put(Received(b"a", (b"",))) for _ in range(budget.WAITING))
    assert not strangers.put(Received(b"a", (b"",)))
    assert strangers.put(Received(b"b", (bytes(budget.WAITING_BYTES),)))
    assert not strangers.put(Received(b"c", (b"x",)))
    assert b"c" not in strangers


def test_messages_of_no_use_cost_the_connection_that_sends_most_of_them():
    peers = Peers(2)
    assert not any(peers.useless(b"flood", "key", 0.0) for _ in range(budget.USELESS))
    assert not peers.useless(b"flood", "key", 0.0)
    assert peers.useless(b"flood", "key", budget.PEER_AT_ONCE_S)
    assert not peers.useless(b"honest", "key", 0.0)
    assert not peers.useless(b"other", "another key", budget.PEER_AT_ONCE_S / 2)


def test_joins_of_a_key_are_bounded_and_those_of_another_are_not_its_own():
    peers = Peers(3)
    heard = sum(peers.first("key") for _ in range(2 * budget.FIRST_AT_ONCE))
    assert budget.FIRST_AT_ONCE + 6 <= heard < 2 * budget.FIRST_AT_ONCE
    assert peers.first("another key")
    for n in range(budget.PEERS):
        peers.first(str(n))
    assert len(peers._first) == budget.PEERS


def io_of(stack, tmp_path, transport, clients, pump=None, curve=False) -> tuple[ServerIO, list]:
    rows: list[dict] = []
    protocol = ServerProtocol(
        "run",
        1,
        clients,
        lambda ids, session: m.Welcome(
            run="run", inc=1, session=session, name="n", config="x" * 2000, ids=ids
        ),
        time.monotonic(),
    )
    link = Link(
        "server",
        transport.send,
        lambda n: framing(n, curve=curve),
        Ledger(rows.append, 1),
        connection_bytes(curve, "server"),
    )
    events = Events(lambda event, fields: None)
    spool = Spool(tmp_path / "spool")
    io = ServerIO(protocol, transport, link, spool, lambda *_: None, events, pump)
    stack.callback(io.close, 0.0)
    return io, rows


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
        server = ZmqServer("tcp://127.0.0.1:*", keyring=keyring)
        io, _ = io_of(stack, tmp_path, server, many, curve=curve)
        context = stack.enter_context(zmq.Context())
        context.max_sockets = many + 10
        context.linger = 0
        dealers, poller = {}, zmq.Poller()
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
            assert time.monotonic() < limit, (len(dealers), server.refusals)
            for dealer, _ in poller.poll(100):
                message, _ = decode_from_server(dealer.recv_multipart())
                assert message.ids == [dealers.pop(dealer)]
                poller.unregister(dealer)
        assert server.refusals == {}
        assert len(io.protocol.workers) == many


def test_rounds_that_a_peer_makes_up_take_no_row_and_no_memory(tmp_path):
    network = Inproc()
    with ExitStack() as stack:
        io, rows = io_of(stack, tmp_path, network.server(), 2, pump=lambda: False)
        peer = network.client()
        peer.poll(0)
        peer.send([encode(m.Join(worker="w", ids=[0]))])
        io._step(0.0)
        before, tables = len(rows), len(io.link.ledger._untaken)
        part = m.Part(run="run", inc=1, key=m.Key(0, 0, 0, 0), index=0)
        for n in range(1, 60):
            key = m.Key(n, 0, 0, 0)
            peer.send([encode(msgspec.structs.replace(part, key=key)), b"body"])
            peer.send([encode(msgspec.structs.replace(part, key=m.Key(0, 0, 0, 1))), b"body"])
        io._step(0.0)
        io.link.settle_counted(next(iter(network._server.peers)))
        came = [r for r in rows[before:] if r["direction"] == "up"]
        assert [(r["type"], r["count"]) for r in came] == [("refused", 2 * 59)]
        assert len(io.link.ledger._untaken) == tables


def test_a_flood_of_heartbeats_is_hung_up_on_and_its_bytes_are_booked(tmp_path):
    network = Inproc()
    with ExitStack() as stack:
        io, rows = io_of(stack, tmp_path, network.server(), 2, pump=lambda: False)
        honest, flood = network.client(), network.client()
        for n, one in enumerate((honest, flood)):
            one.send([encode(m.Join(worker=f"w-{n}", ids=[n]))])
        io._step(0.0)
        conn, kept = flood.conn, honest.conn
        beat, sent = encode(m.Alive(run="run", inc=1)), 0
        limit = time.monotonic() + LIMIT_S
        while flood.conn == conn:
            assert time.monotonic() < limit
            for _ in range(200):
                flood.send([beat])
            sent += 200
            honest.send([beat])
            io._step(0.0)
        assert sent > budget.USELESS
        assert honest.conn == kept
        io._step(0.0)
        beats = sum(r["count"] for r in rows if r["type"] in ("beat", "refused"))
        assert beats >= sent  # what came after it was hung up on, too

"""Replies that come together, in one wake-up of the server: each is accepted as its own."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fednet.files import digest
from fednet.protocol.instructions import Resolved
from fednet.protocol.tasks import TaskSpec
from fednet.server import io as server_io
from fednet.server.inbox import ReceivedReply
from fednet.transport.framing import framing
from fednet.transport.inproc import Inproc, InprocClient
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import encode
from tests.books import each
from tests.server.test_io_thread import clients_of, made_io

RUN: dict[str, Any] = {"run": "run", "inc": 1}


def spec(client: int) -> TaskSpec:
    """A task with a payload of as many bytes as its client's number."""
    body = Body([bytes(client)])
    form = [m.Field("x", "state", client, client)]
    return TaskSpec(client, form, body, body.digest(), start=f"0-0-{client}")


def joined(network: Inproc, client: int, **more: Any) -> InprocClient:
    """A process that hosts this client alone, and is ready."""
    process = network.client()
    about = {"host": f"host-{client}", "pid": 100 + client, "device": f"cuda:{client}"}
    process.send([encode(m.Join(worker=f"w{client}", ids=[client], **about, **more))])
    process.send([encode(m.Ready(layout="L", **RUN))])
    return process


def reply(client: int, size: int) -> tuple[m.Reply, list[Any]]:
    """A client's reply of so many bytes, and its frames."""
    payload = bytes([client]) * size
    form = [m.Field("x", "delta", size, size)]
    key = m.Key(1, 0, 0, client)
    message = m.Reply(key=key, form=form, size=size, check=digest([payload]), **RUN)
    return message, [encode(message), payload]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's clock: how many seconds have passed."""
    began = time.monotonic()
    clock = SimpleNamespace(second=0)
    monotonic = staticmethod(lambda: began + clock.second)
    monkeypatch.setattr(server_io.ListeningClock, "monotonic", monotonic)
    return clock


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_each_has_its_own_task_process_connections_and_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    order: tuple[int, ...],
) -> None:
    """Client n is handed its task in second n, and all replies are here in second 10."""
    network = Inproc()
    transport = network.server()
    io, rows, _ = made_io(tmp_path, transport, 4, pump=lambda: False)
    clients = clients_of(io, tmp_path)
    clients.open((1, 0, "train"), [spec(client) for client in order])
    processes = {}
    for client in (1, 2, 3):
        clock.second = client
        processes[client] = joined(network, client)
        io._step(0.0)
    clock.second = 10
    events = []
    for client in order:
        processes[client].send(reply(client, 5)[1])
        events += transport.poll(0.0)
    monkeypatch.setattr(transport, "poll", lambda timeout_s: events)
    io._step(0.0)
    found = [clients.wait(0.0) for _ in order]
    assert [outcome.key.client for outcome in found] == list(order)
    for outcome in found:
        assert isinstance(outcome, ReceivedReply)
        client = outcome.key.client
        record = outcome.record
        place = {"host": f"host-{client}", "pid": 100 + client, "device": f"cuda:{client}"}
        assert record.worker == place
        assert record.task == (spec(client).check, f"0-0-{client}")
        assert record.down == record.up == processes[client].conn
        assert record.taken_s == pytest.approx(10 - client)
        assert bytes(outcome.body()) == bytes([client]) * 5
    clients.verdict([(outcome.key, "", None) for outcome in found])
    useful = [(r["client"], r["type"], r["kinds"]) for r in each(rows) if r["useful"]]
    assert len(useful) == 6
    for client in order:
        assert (client, "task", {"state": client}) in useful
        assert (client, "reply", {"delta": 5}) in useful
    io.close(linger_s=0)


def test_one_that_comes_over_another_connection_than_its_task_pays_for_both(
    tmp_path: Path,
) -> None:
    network = Inproc()
    io, rows, _ = made_io(tmp_path, network.server(), 4, pump=lambda: False)
    clients = clients_of(io, tmp_path)
    clients.open((1, 0, "train"), [spec(3)])
    first = joined(network, 3)
    io._step(0.0)
    received = [event.frames for event in first.poll(0.0) if hasattr(event, "frames")]
    session = io.protocol.roster.workers["w3"].session
    down = first.conn
    first.close()
    io._step(0.0)
    key = m.Key(1, 0, 0, 3)
    second = joined(network, 3, session=session, holding=[key], inc=1)
    frames = reply(3, 5)[1]
    second.send(frames)
    io._step(0.0)
    outcome = clients.wait(0.0)
    assert isinstance(outcome, ReceivedReply)
    assert (outcome.record.down, outcome.record.up) == (down, second.conn)
    clients.verdict([(key, "", None)])
    found = [
        (r["type"], r["bytes"], r["useful"], r.get("lost")) for r in each(rows) if r["client"] == 3
    ]
    sizes = [framing(*map(len, given)) for given in (received[-1], frames)]
    assert found == [("task", sizes[0], True, None), ("reply", sizes[1], True, None)]
    io.close(linger_s=0)


def test_one_counts_though_its_connection_ends_in_the_same_wake_up(tmp_path: Path) -> None:
    network = Inproc()
    io, *_ = made_io(tmp_path, network.server(), 4, pump=lambda: False)
    clients = clients_of(io, tmp_path)
    clients.open((1, 0, "train"), [spec(3)])
    process = joined(network, 3)
    io._step(0.0)
    process.send(reply(3, 5)[1])
    process.close()
    io._step(0.0)
    assert isinstance(clients.wait(0.0), ReceivedReply)
    io.close(linger_s=0)


def test_one_counts_that_was_read_as_its_deadline_passes(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    network = Inproc()
    io, *_ = made_io(tmp_path, network.server(), 4, pump=lambda: False)
    clients = clients_of(io, tmp_path)
    clients.open((1, 0, "train"), [spec(2), spec(3)], deadline_s=5.0)
    process = joined(network, 3)
    joined(network, 2)
    io._step(0.0)
    process.send(reply(3, 5)[1])
    clock.second = 6
    io._step(0.0)
    assert isinstance(clients.wait(0.0), ReceivedReply)
    assert clients.wait(0.0) == Resolved(m.Key(1, 0, 0, 2), "deadline")
    io.close(linger_s=0)

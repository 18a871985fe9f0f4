"""The server's and the client's loops over real sockets: the books against the kernel's count, and
events against floods.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from fednet.client.loop import ClientLoop, Prepared
from fednet.errors import RemoteProtocolError
from fednet.files import digest
from fednet.journal.link import Link
from fednet.loading import WrongPart
from fednet.protocol.client import ClientProtocol
from fednet.protocol.instructions import Arrived, ClosePayload, Resolved, Send
from fednet.protocol.server import ServerProtocol
from fednet.protocol.tasks import Rules, TaskSpec, TrackedTask
from fednet.server import io as server_io
from fednet.server.clients import Clients, DataSizes
from fednet.server.decoding import SentModels
from fednet.server.events import Events
from fednet.server.faulty_protocol import FaultyServerProtocol, FaultySpec
from fednet.server.inbox import Inbox, ReceivedReply
from fednet.server.io import ServerIO
from fednet.server.watch import ServerOptions, Watch
from fednet.transport import keys
from fednet.transport.base import Received
from fednet.transport.framing import connection_bytes, framing
from fednet.transport.inproc import Inproc
from fednet.transport.zeromq.client import ZmqClient
from fednet.transport.zeromq.server import ZmqServer
from fednet.wire import messages as m
from fednet.wire.body import Body
from fednet.wire.frames import encode
from tests.books import journal_in, open_accounts, useful
from tests.transport.relays import Flipping

LIMIT_S = 30.0
BIG = 2 * m.PART + 1000
BEAT_UP = ("beat", "up")


class Work:
    """Answers each task with as many bytes as it was given, and four of an evaluation behind them
    where it is asked for one.
    """

    device = SimpleNamespace(forget=lambda: None, packed=False)

    def work(self, task, body, step, check=None):
        size = len(body)
        form = [m.Field("x", "delta", size, size)]
        values = [bytes(body)]
        if task.evaluates:
            form.append(m.Field("counts", "accuracy", 4, 4))
            values.append(b"fine")
        sent = Body(values)
        reply = m.Reply(key=task.key, form=form, size=sent.size, check=sent.digest())
        return reply, sent


def made_io(
    tmp_path, transport, clients=2, pump=None, curve=False, server=1, protocol=ServerProtocol
):
    """Returns the I/O of the nth server of a run, the rows of its book and its events."""
    rows = []
    notes = []
    journal = journal_in(tmp_path / "inbox", rows, server)
    of_it = {"run": "run", "inc": server, "name": "n", "config": "x" * 2000, "beat_s": 0.2}
    machine = protocol(
        "run",
        server,
        clients,
        lambda ids, session: m.Welcome(session=session, ids=ids, **of_it),
        time.monotonic(),
        layout="L",
    )
    link = Link(
        "server",
        transport.send,
        lambda *sizes: framing(*sizes, curve=curve),
        journal,
        connection_bytes(curve, "server"),
    )
    inbox = Inbox(tmp_path / "inbox", journal, lambda replies, bodies: [None] * len(replies))
    events = Events(lambda event, fields: notes.append((event, fields)))
    return ServerIO(machine, transport, link, inbox, events, pump), rows, notes


def clients_of(io, tmp_path, **rules):
    """The clients behind it, as the rounds see them."""
    watch = Watch(tmp_path, io, ServerOptions(None), 1)
    return Clients(io, Rules(**rules), watch, DataSizes(None, io.protocol.sites), SentModels())


def ready(io, network):
    """A client that hosts client 0 and is ready."""
    client = network.client()
    client.send([encode(m.Join(worker="w", ids=[0]))])
    client.send([encode(m.Ready(run="run", inc=1, layout="L"))])
    io._step(0.0)
    return client


class Both:
    """The I/O and one client loop, stepped in turn by whoever waits for it; else the I/O has its
    thread, and the client is not stepped.
    """

    def __init__(self, tmp_path, transport, client, curve=False, inline=True, shape=None) -> None:
        self.transport = transport
        self.client_transport = client
        self.loop = ClientLoop(
            ClientProtocol(m.Join(worker="w", ids=[0, 1])),
            client,
            lambda loop, welcome: Prepared([Work()], "L", {0: 8, 1: 8}, shaper=shape),
            curve=curve,
            inline=True,
            faults=True,
        )
        pump = (lambda: self.loop.step(0.0)) if inline else None
        self.io, self.rows, self.notes = made_io(tmp_path, transport, 2, pump, curve)
        self.clients = clients_of(self.io, tmp_path)
        self.link = self.io.link
        self.links = (self.link, self.loop.link)

    def phase(self, size: int, ended: str = "") -> None:
        body = Body([bytes(size)])
        specs = [
            TaskSpec(i, [m.Field("x", "state", size, size)], body, body.digest(), evaluates=True)
            for i in range(2)
        ]
        self.clients.open((1, 0, "train"), specs)
        limit = time.monotonic() + LIMIT_S
        done = []
        while len(done) < 2:
            assert time.monotonic() < limit
            found = self.clients.wait(0.01)
            if found is not None:
                whole = isinstance(found, ReceivedReply)
                done.append("" if whole else found.reason)
                if whole:
                    self.clients.verdict([(found.key, "", None)])
        assert done == [ended, ended]


@pytest.mark.parametrize("shape", [None, lambda transport, is_open: transport])
def test_over_emulated_links_clients_of_one_process_do_not_wait_for_each_other(tmp_path, shape):
    network = Inproc()
    both = Both(tmp_path, network.server(), network.client(), shape=shape)
    both.phase(10)
    assert both.loop.protocol.own_links == (shape is not None)


@pytest.mark.parametrize("wrong", [RemoteProtocolError, WrongPart])
def test_nothing_counts_of_a_task_whose_reply_cannot_be_used(tmp_path, monkeypatch, wrong):
    """WrongPart: a compressor of the user's own made nothing of it."""

    def unusable(replies, bodies):
        raise wrong("not finite")

    network = Inproc()
    both = Both(tmp_path, network.server(), network.client())
    both.io.inbox._decode = unusable
    outcomes = []
    let_go = []
    wait = Clients.wait
    monkeypatch.setattr(Clients, "wait", lambda *a: outcomes.append(wait(*a)) or outcomes[-1])
    monkeypatch.setattr(ReceivedReply, "let_go", lambda reply: let_go.append(reply.message.key))
    both.phase(10, "refused: not finite")
    ended = [o for o in outcomes if o is not None]
    assert [type(o) for o in ended] == [Resolved] * 2
    assert {key.client for key in let_go} == {0, 1}


def test_the_rounds_are_told_of_replies_though_other_messages_never_cease(tmp_path):
    network = Inproc()
    here = network.server()
    both = Both(tmp_path, here, network.client())
    both.phase(10)
    (conn,) = both.io.protocol.roster.by_conn
    beat = encode(m.Alive(run="run", inc=1))
    poll = here.poll
    limit = time.monotonic() + LIMIT_S

    def beaten(timeout_s):
        assert time.monotonic() < limit, "the rounds were not told"
        return [*poll(timeout_s), Received(conn, (beat,))]

    here.poll = beaten
    both.phase(1000)


def until(true, *steps) -> None:
    """Does these steps until it is true."""
    limit = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < limit
        for step in steps:
            step(0.01)


@contextmanager
def over_sockets(tmp_path, curve=False, between=None):
    """(server's transport, client's, both sides, what is between them)"""
    with ExitStack() as stack:
        keyring = None
        pair = None
        if curve:
            keys.lab(tmp_path / "keys", 2)
            keyring = keys.Keyring(tmp_path / "keys")
            pair = keys.load(sorted((tmp_path / "keys" / "clients").glob("*"))[0])
        server = ZmqServer("tcp://127.0.0.1:*", keyring=keyring)
        stack.callback(server.close, 0)
        proxy = between(server.address) if between else None
        if proxy:
            stack.callback(proxy.close)
        client = ZmqClient(proxy.address if proxy else server.address, keys=pair)
        stack.callback(client.close, 0)
        yield server, client, Both(tmp_path, server, client, curve), proxy


def booked(link, direction) -> int:
    """All bytes of a link's book, settled or not."""
    return link.journal.book.crossed[direction]


@pytest.mark.parametrize("curve", [False, True])
def test_rows_of_both_books_add_up_to_what_the_kernel_counted(tmp_path, curve):
    with over_sockets(tmp_path, curve) as (server, client, both, _):
        both.phase(BIG)
        both.phase(1000)

        def agree() -> bool:
            here, there = ({d: booked(x, d) for d in ("up", "down")} for x in both.links)
            ((sent, received),) = server.traffic().values()
            ((sent_up, received_down),) = client.traffic().values()
            return (
                here == {"up": received, "down": sent}
                and there == {"up": sent_up, "down": received_down}
                and sent == received_down
            )

        until(agree, both.io._step, both.loop.step)
        types = {r["type"] for r in both.rows}
        assert {"connection", "join", "welcome", "ready", "task", "reply", "pull"} <= types
        assert useful(both.rows) == {
            "down": {"state": 2 * (BIG + 1000)},
            "up": {"delta": 2 * (BIG + 1000), "accuracy": 16},
        }


@pytest.mark.parametrize("direction", ["up", "down"])
def test_bytes_that_were_damaged_under_curve_are_in_the_book_of_whoever_got_them(
    tmp_path, direction
):
    with over_sockets(tmp_path, True, Flipping) as (server, client, both, proxy):
        both.phase(1000)
        proxy.flip = direction
        both.phase(BIG)  # the task or the reply that is damaged goes again
        assert not proxy.flip
        here = server
        link = both.link
        rows = both.rows
        if direction == "down":
            here = client
            link = both.loop.link
            rows = both.loop.message_file.rows

        def counted() -> list[int]:
            return [received for _, received in here.traffic().values()]

        until(lambda: booked(link, direction) == sum(counted()), both.io._step, both.loop.step)
        assert len(counted()) == 2  # the one that was damaged, and the one after it
        lost = [r for r in rows if r.get("reason") == "not decoded"]
        assert [(r["type"], r["direction"], r["useful"]) for r in lost] == [
            ("connection", direction, False)
        ]
        assert lost[0]["bytes"] > 0


def test_what_a_server_that_stops_has_not_read_is_in_its_book(tmp_path):
    with over_sockets(tmp_path) as (server, client, both, _):
        both.phase(1000)

        def got() -> int:
            return sum(received for _, received in server.traffic().values())

        until(lambda: booked(both.link, "up") == got(), both.io._step)
        client.send([b"a" * 5000])
        until(lambda: got() >= booked(both.link, "up") + 5000, client.poll)
        both.io.close()
        (unread,) = [r for r in both.rows if r.get("reason") == "the server stopped"]
        assert unread["bytes"] == framing(5000)
        assert both.link.journal.book.totals["up"] == got()


def test_a_pause_of_the_server_is_no_silence_of_its_workers(tmp_path, monkeypatch):
    """As of a process that was stopped, or of a machine that slept: what they sent meanwhile it has
    yet to read.
    """
    network = Inproc()
    at = time.monotonic()
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    io = both.io
    (worker,) = both.io.protocol.roster.workers.values()
    io.inline = False
    monkeypatch.setattr(server_io.ListeningClock, "monotonic", staticmethod(lambda: at))
    at += 60
    io._step(0.0)
    at += 3600
    io._step(0.0)
    assert worker.gone_at is None
    for _ in range(12):  # it listens, and hears nothing
        at += 0.9
        io._step(0.0)
    assert worker.gone_at is not None


def test_the_io_changes_hands_and_no_thread_waits_for_ever(tmp_path):
    """The caretaker has it whenever the rounds are away for a moment."""
    server = ZmqServer("tcp://127.0.0.1:*")
    client = ZmqClient(server.address)
    io = Both(tmp_path, server, client, inline=False).io
    try:
        for n in range(3000):
            with io:
                assert io._owner == threading.get_ident()
                with io:  # within a method of its own
                    pass
                assert io._owner == threading.get_ident()
            if n % 300 == 0:
                taken = threading.Event()
                io._step = lambda timeout_s, taken=taken: bool(taken.set())
                assert taken.wait(LIMIT_S)
                del io._step
    finally:
        io.close(linger_s=0)
        client.close(0)
    assert not io._caretaker.is_alive()


def test_what_breaks_the_caretaker_is_raised_where_the_rounds_use_it(tmp_path):
    network = Inproc()
    both = Both(tmp_path, network.server(), network.client(), inline=False)
    io = both.io
    clients = both.clients
    failed = threading.Event()

    def broken(timeout_s):
        failed.set()
        raise OSError("no space left")

    io.transport.poll = broken
    assert failed.wait(LIMIT_S)
    for use in (
        lambda: clients.wait(0.0),
        lambda: clients.cancel("over"),
        lambda: clients.end(1),
    ):
        with pytest.raises(OSError, match="no space left"):
            use()
    io.finish(True, "")  # nobody is told of an end by what is broken
    io.close(linger_s=0)


def test_what_a_wake_up_leads_to_is_in_the_journal_then_leaves_then_counts(tmp_path, monkeypatch):
    network = Inproc()
    calls = []
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    io = both.io
    flush = both.io.journal.flush
    send = both.link._send
    monkeypatch.setattr(io.journal, "flush", lambda: (calls.append("journal"), flush()))
    monkeypatch.setattr(both.link, "_send", lambda *a: (calls.append("left"), send(*a))[1])
    monkeypatch.setattr(
        io, "_crash_at", lambda point, round: calls.append((point, len(io.outcomes)))
    )
    both.phase(10)
    at = calls.index(("receiving", 0))  # a reply has come, and the rounds do not have it yet
    written = max(n for n in range(at) if calls[n] == "journal")
    assert set(calls[written + 1 : at]) <= {"left"}
    assert calls[calls.index("left") - 1] == "journal"


def test_of_a_flood_of_late_replies_the_first_are_written_and_then_one_a_second(monkeypatch):
    notes = []
    events = Events(lambda event, fields: notes.append(fields["worker"]))
    at = 100.0
    monkeypatch.setattr("fednet.server.events.time.monotonic", lambda: at)
    for _ in range(50):
        events.tell("late", {"worker": "flood"})
    events.tell("late", {"worker": "another"})
    for _ in range(20):
        events.tell("joined", {"worker": "w", "clients": [0]})
    assert notes == ["flood"] * 10 + ["another"] + ["w"] * 20
    at = 101.0
    for _ in range(50):
        events.tell("late", {"worker": "flood"})
    assert notes[31:] == ["flood"]


def test_heartbeats_of_a_round_are_one_row_each_way(tmp_path):
    network = Inproc()
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    until(
        lambda: any(name[2] == "beat" for name in open_accounts(both.link.journal)), both.io.do_io
    )
    both.clients.record_heartbeats(1)
    beats = [r for r in both.rows if r["type"] == "beat"]
    assert sorted(r["direction"] for r in beats) == ["down", "up"]
    assert all(
        r["round"] == 1 and "worker" not in r and r["count"] >= 1 and r["client"] == -1
        for r in beats
    )


def test_a_clients_book_names_the_server_and_the_round_and_says_what_was_cut_short(tmp_path):
    """Two rounds with a first server, two with a second; in the third round an upload is cut."""
    network = Inproc()
    both = Both(tmp_path, network.server(), network.client())
    body = Body([bytes(10)])
    clients = both.clients

    def types() -> set[tuple[str, str]]:
        return {name[1:3] for name in open_accounts(both.loop.link.journal)}

    def next_round(round: int, **cut) -> None:
        form = [m.Field("x", "state", 10, 10)]
        check = body.digest()
        specs = [FaultySpec(i, form, body, check, **(cut if i == 0 else {})) for i in range(2)]
        clients.open((round, 0, "train"), specs)
        for _ in range(2):
            until(lambda: clients.io.outcomes, clients.io.do_io)
            clients.wait(0.0)
        until(lambda: ("up", "beat") in types(), clients.io.do_io)

    next_round(1)
    next_round(2)
    both.io.close(over=False, linger_s=0)
    pump = both.io._pump_clients
    io, *_ = made_io(tmp_path, network.server(), 2, pump, server=2, protocol=FaultyServerProtocol)
    clients = clients_of(io, tmp_path, closed=0.02)
    next_round(3, faults=[m.Fault("drop_during_upload", 0.5)], lost="drop_during_upload")
    next_round(4)
    both.loop.close()
    io.close(linger_s=0)
    rows = both.loop.message_file.rows
    replies = [r for r in rows if r["type"] == "reply"]
    cut = (3, 0, 2, False, "cut short")
    assert sorted((r["round"], r["client"], r["incarnation"]) for r in replies) == [
        (round, client, 1 if round < 3 else 2) for round in range(1, 5) for client in range(2)
    ]
    assert [
        (r["round"], r["client"], r["incarnation"], r["useful"], r["reason"])
        for r in replies
        if not r["useful"]
    ] == [cut]
    # Those after a server's last task are of no round.
    beats = [(r["round"], r["incarnation"]) for r in rows if (r["type"], r["direction"]) == BEAT_UP]
    assert beats == [(1, 1), (0, 1), (3, 2), (0, 2)]


def test_what_is_for_a_workers_last_connection_leaves_before_the_next_is_its_own(
    tmp_path, monkeypatch
):
    network = Inproc()
    done = []
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    (last,) = both.io.protocol.roster.by_conn
    send = both.transport.send
    io = both.io
    monkeypatch.setattr(
        both.link, "_send", lambda conn, f: done.append(("sent", conn)) or send(conn, f)
    )
    monkeypatch.setattr(both.transport, "vouch", lambda conn: done.append(("bound", conn)))
    io._follow([Send(last, m.Cancel(key=m.Key(1, 0, 0, 0)))])
    again = network.client()
    session = both.loop.protocol.join.session
    again.send([encode(m.Join(worker="w", session=session, ids=[0, 1]))])
    io._step(0.0)
    assert done[:2] == [("sent", last), ("bound", again.conn)]


@pytest.mark.parametrize("gone", [True, False])
def test_a_task_that_is_taken_back_at_once_is_in_a_row_unless_it_could_not_leave(tmp_path, gone):
    network = Inproc()
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    (last,) = both.io.protocol.roster.by_conn
    io = both.io
    before = len(both.rows)
    key = m.Key(2, 0, 0, 0)
    if gone:
        both.client_transport.close()
    size = [m.Field("x", "state", 3, 3)]
    task = m.Task(run="run", inc=1, key=key, form=size, size=3)
    io.act([Send(last, task, Body([b"abc"])), ClosePayload(last, "down", key, "lost")])
    found = [(r["type"], r["client"], r["reason"]) for r in both.rows[before:]]
    assert found == ([] if gone else [("task", 0, "lost")])
    assert (last, "down", "task", key) not in open_accounts(both.link.journal)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize(("over", "bill"), [("down", "task"), ("up", "pull")])
def test_what_leaves_for_a_reply_is_in_its_bill_and_what_could_not_leave_is_not(
    tmp_path, monkeypatch, over, bill, gone
):
    """Its reply is whole and its bill is made in the very wake-up."""
    network = Inproc()
    key = m.Key(2, 0, 0, 0)
    both = Both(tmp_path, network.server(), network.client())
    both.phase(10)
    (last,) = both.io.protocol.roster.by_conn
    io = both.io
    form = [m.Field("x", "state", 3, 3)]
    reply = m.Reply(key=key, form=form, size=3, check=digest([b"abc"]))
    spec = TaskSpec(0, [], Body([]), b"")
    monkeypatch.setattr(io.protocol, "accept", lambda key, now, evaluation: [])
    if gone:
        both.client_transport.close()
    task = TrackedTask(spec, key, worker="w", conn=b"another", reply=reply, up_conn=b"another")
    setattr(task, {"up": "up_conn", "down": "conn"}[over], last)
    io.act(
        [
            Send(last, m.Pull(run="run", inc=1, key=key, first=0, count=1)),
            Send(last, m.Task(run="run", inc=1, key=key, form=form, size=3), Body([b"abc"])),
            Arrived(task, Body([b"abc"])),
        ]
    )
    assert [a.type for a in io.journal.book.waiting[key]] == ([] if gone else [bill])


def test_what_could_not_leave_for_a_connection_that_ended_is_in_no_row(tmp_path):
    """It joined and was gone before the server's answer left."""
    network = Inproc()
    io, rows, _ = made_io(tmp_path, network.server(), pump=lambda: False)
    client = network.client()
    client.send([encode(m.Join(worker="w", ids=[0]))])
    client.close()
    io._step(0.0)
    assert [r["type"] for r in rows if r["direction"] == "down"] == ["connection"]
    io.close(linger_s=0)


def test_pulls_of_an_upload_whose_connection_ended_may_not_have_arrived(tmp_path):
    network = Inproc()
    key = m.Key(1, 0, 0, 0)
    io, rows, _ = made_io(tmp_path, network.server(), pump=lambda: False)
    clients = clients_of(io, tmp_path)
    client = ready(io, network)
    clients.open((1, 0, "train"), [TaskSpec(0, [], Body([]), b"")])
    form = [m.Field("x", "delta", BIG, BIG)]
    client.send([encode(m.Reply(run="run", inc=1, key=key, form=form, size=BIG))])
    io._step(0.0)
    client.close()
    io._step(0.0)
    ended = [(r["type"], r["useful"], r.get("lost", False)) for r in rows if r["client"] == 0]
    assert sorted(ended) == [("pull", False, True), ("reply", False, False)]
    io.close(linger_s=0)


def test_nothing_is_kept_of_a_reply_that_is_called_off_half_way(tmp_path):
    network = Inproc()
    io, *_ = made_io(tmp_path, network.server(), pump=lambda: False)
    clients = clients_of(io, tmp_path)
    client = ready(io, network)

    def written() -> list[str]:
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        return [file for file in files if file.endswith(".bin") and str(tmp_path) in file]

    for round in range(1, 6):
        key = m.Key(round, 0, 0, 0)
        clients.open((round, 0, "train"), [TaskSpec(0, [], Body([]), b"")])
        form = [m.Field("x", "delta", BIG, BIG)]
        client.send([encode(m.Reply(run="run", inc=1, key=key, form=form, size=BIG))])
        client.send([encode(m.Part(run="run", inc=1, key=key, index=0)), bytes(m.PART)])
        io._step(0.0)
        assert len(written()) == 1
        clients.cancel("too late")
        assert written() == []
    io.close(linger_s=0)


def test_a_pause_is_over_for_what_the_server_does_before_it_listens_again_too(monkeypatch):
    at = 100.0
    monkeypatch.setattr(server_io.ListeningClock, "monotonic", staticmethod(lambda: at))
    now = server_io.ListeningClock()
    now.note_listened()
    before = now()
    at = at + 3600
    assert now() == before + server_io.PAUSE_S  # a command that waited for it
    now.note_listened()
    assert now() == before + server_io.PAUSE_S
    at += 60
    now.note_listened(nobody_missed=True)  # nobody was waited for: all of it counts
    assert now() == before + server_io.PAUSE_S + 60
    at += 3600  # somebody came, and the server is at something else
    assert now() == before + 2 * server_io.PAUSE_S + 60


def test_a_reply_that_came_after_its_exchange_was_over_is_wasted_and_takes_no_memory(tmp_path):
    """The outcome waits while the rounds go on to the next exchange."""
    network = Inproc()
    io, rows, _ = made_io(tmp_path, network.server(), pump=lambda: False)
    io.inbox._decode = lambda replies, bodies: [object()]
    clients = clients_of(io, tmp_path)
    client = ready(io, network)
    key = m.Key(1, 0, 0, 0)
    payload = b"what the client came to"
    clients.open((1, 0, "train"), [TaskSpec(0, [], Body([]), b"")])
    form = [m.Field("x", "delta", 23, 23)]
    check = digest([payload])
    reply = m.Reply(run="run", inc=1, key=key, form=form, size=23, check=check)
    client.send([encode(reply), payload])
    io._step(0.0)
    clients.open((1, 1, "train"), [])
    outcome = clients.wait(0.0)
    assert outcome.key == key
    assert outcome.held == 23
    clients.discard(outcome)
    assert outcome.payload is None
    assert not any(io.inbox._memory._held.values())
    ended = [(r["type"], r["useful"], r["reason"]) for r in rows if r["client"] == 0]
    assert sorted(ended) == [("reply", False, "left out"), ("task", False, "left out")]
    left = {name[1:3] for name in open_accounts(io.journal)}
    assert not left & {("up", "reply"), ("down", "task")}
    io.close(linger_s=0)

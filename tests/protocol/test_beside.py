"""Tasks of several rounds at a time: what is handed out goes beside what is under way."""

from __future__ import annotations

import msgspec

from fednet.protocol.client import Cancelled
from fednet.protocol.instructions import Resolved, Stray
from fednet.protocol.tasks import Rules
from fednet.wire import messages as m
from tests.protocol import test_client as client_side
from tests.protocol.net import spec
from tests.protocol.test_client import working
from tests.protocol.test_server import key, of, ready, reply, say, sent, server


def of_round(client, round):
    return msgspec.structs.replace(spec(client), round=round)


def later():
    """Round 1's tasks of clients 0 and 1 are under way; client 0 has replied, and is given one of
    round 2, as client 2 is.
    """
    s = server()
    ready(s, ids=range(4), slots=4)
    s.begin(1, 0, "train", [of_round(0, 1), of_round(1, 1)], Rules(), 0.0)
    say(s, b"1", reply(0), body=memoryview(b"abc"))
    s.accept(key(0), 0.0)
    return s, s.add(2, [of_round(0, 2), of_round(2, 2)], 1.0)


def test_more_tasks_go_out_under_their_own_round_beside_those_under_way():
    s, out = later()
    assert [t.key for t in sent(out, m.Task)] == [key(0, round=2), key(2, round=2)]
    assert sent(out, m.Cancel) == []
    assert {t.spec.client for t in s.open()} == {0, 1, 2}
    # A reply to a task after which its client has another is stray; one of an earlier round counts.
    out = say(s, b"1", reply(0), body=memoryview(b"abc"), now=2.0)
    assert isinstance(out[0], Stray)
    assert of(out, Resolved) == []
    say(s, b"1", reply(1), body=memoryview(b"abc"), now=2.0)
    assert s.accept(key(1), 2.0) == [Resolved(key(1))]


def test_a_client_process_goes_on_with_its_other_clients_tasks():
    c = working()
    c.beside = True
    other = client_side.task(key=m.Key(2, 0, 0, 1))
    out = c.received(other, memoryview(bytes(3)), 0.0)
    assert of(out, Cancelled) == []
    again = client_side.task(key=m.Key(2, 0, 0, 0))
    out = c.received(again, memoryview(bytes(3)), 0.0)
    assert of(out, Cancelled) == [Cancelled(client_side.key())]  # of the same client

"""What a wake-up leads to: written down once, and in the order that a resume relies on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from fednet.protocol.instructions import Send
from fednet.server import io
from fednet.server.io import Outbox, Outcome, Told
from fednet.wire import messages as m

KEY = m.Key(1, 0, 0, 3)
PHASE = (1, 0, "train")


class All:
    """An outbox whose neighbours write down in which order they are called."""

    def __init__(self) -> None:
        self.calls: list = []
        note = self.calls.append
        link = SimpleNamespace(
            compose=lambda conn, message, body: (conn, message.key.client),
            leave=lambda out: note(("left", *out)),
        )
        spool = SimpleNamespace(
            flush=lambda: note("seals"),
        )
        self.box = Outbox(
            link,
            spool,
            lambda: note("books"),
            lambda told: note([(outcome.phase, outcome.client) for outcome in told]),
            lambda point, round: note((point, round)),
        )

    def send(self, conn, client):
        self.box.send(Send(conn, m.Cancel(key=m.Key(1, 0, 0, client))))


def reply(client, purpose="train"):
    return SimpleNamespace(key=m.Key(1, 0, 0, client, purpose))


def test_what_many_messages_lead_to_is_written_down_once_and_in_order():
    made = All()
    for client in (3, 4):
        made.box.logged(reply(client))
        made.box.over(Outcome(PHASE, client))
        made.send(b"c", client)
        made.box.heard(100)
    assert made.calls == []  # nothing has left, nobody was told
    made.box.conclude()
    assert [c for c in made.calls if c != "books"] == [
        "seals",
        ("left", b"c", 3),
        ("left", b"c", 4),
        ("receiving", 1),
        ("receiving", 1),
        [(PHASE, 3), (PHASE, 4)],
    ]
    assert made.calls[0] == "books"
    assert made.calls.index(("left", b"c", 3)) > made.calls.index("books", 1)


def test_an_account_is_settled_only_once_its_message_has_left():
    made = All()
    made.send(b"c", 3)
    made.box.before_settling(b"c", m.Key(1, 0, 0, 4))
    made.box.before_settling(b"d", KEY)
    assert made.calls == []
    made.box.before_settling(b"c", KEY)
    assert made.calls == ["books", ("left", b"c", 3)]


@pytest.mark.parametrize(("messages", "nbytes"), [(io.TOGETHER, 10), (1, io.LARGE_BYTES)])
def test_neither_many_messages_nor_a_large_one_keep_others_waiting(messages, nbytes):
    made = All()
    made.send(b"c", 3)
    for _ in range(messages):
        assert ("left", b"c", 3) not in made.calls
        made.box.heard(nbytes)
    assert ("left", b"c", 3) in made.calls


def test_the_rounds_are_told_once_nothing_more_has_come_or_it_is_much():
    made = All()
    for client in range(io.MUCH - 1):
        made.box.over(Outcome(PHASE, client))
        made.box.conclude(more=True)
    assert made.box.unfinished
    assert not [c for c in made.calls if isinstance(c, list)]
    made.box.over(Outcome(PHASE, io.MUCH - 1))
    made.box.conclude(more=True)
    assert made.calls[-1] == [(PHASE, client) for client in range(io.MUCH)]
    made.box.over(Outcome(PHASE, io.MUCH))
    made.box.conclude()
    assert made.calls[-1] == [(PHASE, io.MUCH)]
    assert not made.box.unfinished


def test_what_a_rounds_opening_leads_to_leaves_in_turns_and_in_order():
    made, many = All(), 2 * io.TOGETHER + 1
    for client in range(many):
        made.send(b"c", client)
    made.box.conclude()
    left = [c[2] for c in made.calls if c[0] == "left"]
    assert left == list(range(io.TOGETHER))
    assert made.box.unfinished
    made.calls.clear()
    made.box.before_settling(b"c", m.Key(1, 0, 0, 0))  # has left: the others may wait
    assert made.calls == []
    made.box.conclude()
    assert made.box.unfinished
    made.box.before_settling(b"c", m.Key(1, 0, 0, many - 1))
    assert [c[2] for c in made.calls if c[0] == "left"] == list(range(io.TOGETHER, many))
    assert not made.box.unfinished


def test_a_large_reply_is_told_at_once():
    made = All()
    made.box.over(Outcome(PHASE, 3))
    made.box.heard(io.LARGE_BYTES)
    assert made.calls[-1] == [(PHASE, 3)]


def test_an_evaluation_is_no_reply_that_came_in():
    made = All()
    made.box.logged(reply(3, "evaluate"))
    made.box.conclude()
    assert ("receiving", 1) not in made.calls


def test_the_rounds_are_left_alone_with_several_replies_until_they_ask(monkeypatch):
    monkeypatch.setattr(io, "ALONE_S", 60.0)
    told, several = Told(inline=False), [Outcome(PHASE, c) for c in (3, 4)]
    turn = (lambda: told.put(several), told.leave_alone, lambda: told.put(several[:1]))
    hears = threading.Thread(target=lambda: [step() for step in turn])
    hears.start()
    assert told.get(60.0) is several
    assert told.empty()  # it waits, and tells nothing more
    assert told.get(60.0) == several[:1]
    hears.join(60.0)
    assert not hears.is_alive()


def test_nobody_waits_for_rounds_that_are_at_something_else(monkeypatch):
    several = [Outcome(PHASE, c) for c in (3, 4)]
    told = Told(inline=False)
    monkeypatch.setattr(told._asked, "wait", lambda timeout: waits.append(timeout))
    waits: list[float] = []
    for found in (several, several, several, several[:1]):
        told.put(found)
        told.leave_alone()
        told.leave_alone()  # nothing more was told
    assert waits == [io.ALONE_S]
    monkeypatch.setattr(io, "ALONE_S", 60.0)
    alone = Told(inline=True)
    alone.put(several)
    alone.leave_alone()
    assert alone.get(0.0) is several

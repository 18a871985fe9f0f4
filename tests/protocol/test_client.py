"""The client's machine alone: events in, instructions out."""

from __future__ import annotations

import weakref

import msgspec
import pytest

from fednet.errors import RemoteProtocolError
from fednet.protocol.client import (
    SILENCE,
    Cancelled,
    ClientProtocol,
    ClosePayload,
    DoTask,
    Prepare,
    Reconnect,
    Send,
    Stray,
)
from fednet.protocol.table import ClientState, ClientTaskState
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body
from fednet.wire.frames import decode_from_client, encode
from tests.protocol.net import form

WELCOME = m.Welcome(run="r", inc=1, session="s", name="n", config="c", ids=[0, 1], beat_s=1.0)


def key(client=0, attempt=0, purpose="train") -> m.Key:
    return m.Key(1, 0, attempt, client, purpose)


def task(size=3, **more) -> m.Task:
    return m.Task(**{"run": "r", "inc": 1, "key": key(), "form": form(size), "size": size, **more})


def reply(size, k=None) -> list[tuple[m.Reply | m.Failed, Body]]:
    message = m.Reply(run="r", inc=1, key=k or key(), form=form(size), size=size)
    return [(message, Body([bytes(size)]))]


def failure(reason, again) -> list[tuple[m.Reply | m.Failed, Body]]:
    return [(m.Failed(key=key(), reason=reason, again=again), NOTHING)]


JOIN = m.Join(worker="w", share=(1, 2))


def ready(slots=1, **more) -> ClientProtocol:
    c = ClientProtocol(msgspec.structs.replace(JOIN, slots=slots), **more)
    c.opened(0.0)
    c.received(WELCOME, None, 0.0)
    c.ready("L")
    return c


def working(size=3) -> ClientProtocol:
    c = ready()
    c.received(task(size), Body([bytes(size)]), 0.0)
    return c


def give(c, t=None, data=b"abc") -> list:
    """The server sends a task with its payload; without one: data is None."""
    return c.received(t or task(), None if data is None else Body([data]), 0.0)


def part(c, k=None, index=0, data=bytes(m.PART)) -> list:
    return c.received(m.Part(run="r", inc=1, key=k or key(), index=index), Body([data]), 0.0)


def pull(c, first=0, count=1, inc=1) -> list:
    return c.received(m.Pull(run="r", inc=inc, key=key(), first=first, count=count), None, 0.0)


def sent(instructions, kind=m.Message) -> list:
    return [i.message for i in instructions if isinstance(i, Send) and isinstance(i.message, kind)]


def test_rejoin_of_the_same_run_says_what_it_holds_and_is_ready_at_once():
    c = working()
    sites = [m.SiteFacts(client=0, train=7, test=2)]
    c.ready("L", sites)
    c.closed()
    (join,) = sent(c.opened(2.0))
    assert (join.session, join.ids, join.share, join.holding) == ("s", [], (1, 2), [key()])
    assert c.received(WELCOME, None, 2.0) == [
        Prepare(WELCOME, True),
        Send(m.Ready(run="r", inc=1, layout="L", sites=sites)),
    ]


def restarted() -> ClientProtocol:
    """Joined to a server of a later incarnation, with a task of the earlier one at hand."""
    c = working()
    c.closed()
    c.opened(2.0)
    c.received(m.Welcome(run="r", inc=2, session="t", name="n", config="c", ids=[0, 1]), None, 2.0)
    return c


def test_task_that_a_restarted_server_asks_for_again_is_not_done_again():
    c = restarted()
    again = task(3, inc=2, faults=[m.Fault("pace", 2.0)])  # at its device's pace, as before
    assert c.received(again, Body([bytes(3)]), 2.0) == [ClosePayload("down", key())]
    assert c.received(again, Body([bytes(3)]), 2.0) == [Stray("doubled")]
    assert [(x.inc, x.key) for x in sent(c.finish(reply(3)), m.Reply)] == [(2, key())]


@pytest.mark.parametrize("heard", [True, False], ids=["of the end", "of the next alone"])
def test_a_reply_waits_until_a_restarted_server_asks_for_its_task_and_is_sent_in_full(heard):
    c = working()
    c.finish(reply(2 * m.PART))
    pull(c, 0, 1)
    if heard:
        c.closed()
    c.opened(2.0)
    second = msgspec.structs.replace(WELCOME, inc=2)
    assert [type(x) for x in sent(c.received(second, None, 2.0))] == [m.Ready]
    out = c.received(task(3, inc=2), Body([bytes(3)]), 2.0)
    assert [type(x) for x in sent(out)] == [m.Reply]
    assert [x.index for x in sent(pull(c, 0, 2, inc=2))] == [0, 1]


@pytest.mark.parametrize("size", [3, 2 * m.PART])
@pytest.mark.parametrize("cut", [False, True])
def test_a_reply_that_is_done_before_a_restarted_server_asks_for_its_task_waits_for_that(size, cut):
    """Also over its next connection. The task is not done a second time."""
    c = restarted()
    assert sent(c.finish(reply(size))) == []
    if cut:
        c.closed()
        c.opened(3.0)
        again = msgspec.structs.replace(WELCOME, inc=2)
        assert [type(x) for x in sent(c.received(again, None, 3.0))] == [m.Ready]
    out = c.received(task(3, inc=2), Body([bytes(3)]), 3.0)
    assert [(x.inc, x.key) for x in sent(out)] == [(2, key())]
    assert not any(isinstance(i, DoTask) for i in out)


def test_a_connection_of_whose_end_nothing_was_heard_is_over_when_the_next_is_opened():
    c = working()
    c.finish(reply(2 * m.PART))
    coming = task(2 * m.PART, key=key(1))
    give(c, coming, None)
    out = c.opened(1.0)
    assert out[:2] == [ClosePayload("up", key(), False), ClosePayload("down", key(1), False)]
    assert [x.key for x in sent(c.received(WELCOME, None, 1.0), m.Reply)] == [key()]
    assert [x.key for x in sent(give(c, coming, None))] == [
        key(1)
    ]  # it is asked for from its start


def test_a_reply_without_payload_is_one_frame():
    c = working()
    answers = reply(0)
    assert c.finish(answers) == [Send(answers[0][0]), ClosePayload("up", key())]


def test_parts_of_a_reply_are_sent_only_once_it_is_announced():
    c = working()
    assert pull(c) == [Stray("late")]
    c.finish(reply(2 * m.PART))
    c.closed()
    c.opened(1.0)
    assert pull(c) == [Stray("late")]


def test_a_task_of_the_next_phase_ends_those_of_the_phase_before():
    c = working()
    out = c.received(task(key=m.Key(1, 1, 0, 1)), Body([bytes(3)]), 0.0)
    assert [type(i) for i in out] == [Cancelled, ClosePayload, DoTask]


def test_where_rounds_overlap_a_task_ends_only_the_one_of_the_same_client():
    c = working()
    c.rounds_overlap = True
    out = c.received(task(key=m.Key(2, 0, 0, 1)), Body([bytes(3)]), 0.0)
    assert Cancelled not in map(type, out)
    out = c.received(task(key=m.Key(2, 0, 0, 0)), Body([bytes(3)]), 0.0)
    assert [i for i in out if isinstance(i, Cancelled)] == [Cancelled(key())]


def test_of_a_task_that_is_given_up_nothing_more_is_sent_and_the_server_hears_nothing():
    c = working()
    assert sent(c.abandon(key())) == []
    assert c.finish(reply(3)) == []
    assert c.abandon(key()) == []
    give(c, task(key=key(attempt=1)))
    c.finish(reply(2 * m.PART, key(attempt=1)))
    assert ClosePayload("up", key(attempt=1), False) in c.abandon(key(attempt=1))
    c.closed()
    assert [join.holding for join in sent(c.opened(2.0), m.Join)] == [[]]


def test_a_payload_is_let_go_of_once_its_task_is_done():
    c = ready()
    payload = Body([bytes(3)])
    c.received(task(3), payload, 0.0)
    held = weakref.ref(payload)
    del payload
    assert held() is not None
    c.finish(reply(2 * m.PART))
    assert held() is None


@pytest.mark.parametrize(
    "other",
    [
        {"check": b"7"},
        {"form": form(3, "delta")},
        {"start": "1-0-0"},
        {"enrol": 1},
        {"evaluates": True},
    ],
    ids=lambda other: next(iter(other)),
)
def test_task_that_a_restarted_server_asks_for_with_other_contents_is_done_anew(other):
    c = restarted()
    out = c.received(task(3, inc=2, **other), Body([b"abc"]), 2.0)
    assert [type(i) for i in out] == [Cancelled, ClosePayload, DoTask]


def test_task_that_failed_here_is_done_when_a_restarted_server_asks_for_it():
    c = restarted()
    c.finish(failure("no data", False))  # before the server has begun, which drops it as late
    out = c.received(task(3, inc=2), Body([b"abc"]), 2.0)
    assert [type(i) for i in out] == [ClosePayload, DoTask]


def test_who_waits_to_join_again_does_not_once_it_is_welcomed_or_the_run_is_over():
    for ends in (WELCOME, m.Refuse(reason="no", final=True), m.End(), "leave"):
        c = ClientProtocol(JOIN)
        c.opened(0.0)
        c.received(m.Refuse(reason="full"), None, 0.0)
        if ends == "leave":
            c.leave()
        else:
            c.received(ends, None, 0.5)
        assert sent(c.tick(1.0), m.Join) == []


def test_another_run_is_prepared_anew_before_anything_is_ready():
    c = ready()
    c.closed()
    c.opened(2.0)
    other = m.Welcome(run="q", inc=1, session="t", name="n", config="c", ids=[0])
    for again in (False, True):
        assert c.received(other, None, 2.0) == [Prepare(other, again)]
        assert c.state is ClientState.WELCOMED
        c.closed()
        c.opened(2.0)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (task(3, run="q"), b"abc"),
        (task(3, inc=2), b"abc"),
        (m.Alive(run="q", inc=1), None),
    ],
)
def test_message_that_breaks_the_protocol_changes_nothing(message, body):
    c = ready()
    with pytest.raises(RemoteProtocolError):
        c.received(message, None if body is None else Body([body]), 0.0)
    assert c.task_state(key()) is ClientTaskState.GONE


@pytest.mark.parametrize(
    ("message", "body"),
    [(task(3), b"ab"), (task(3), None), (task(4, form=form(3)), b"abcd")],
)
def test_a_task_of_which_a_part_is_missing_is_failed_and_can_be_given_again(message, body):
    c = ready()
    out = c.received(message, None if body is None else Body([body]), 0.0)
    assert out[0] == Stray("refused")
    (failed,) = sent(out)
    assert (failed.key, failed.again, failed.run) == (key(), True, "r")
    assert c.task_state(key()) is ClientTaskState.GONE
    assert DoTask in map(type, give(c))
    assert give(c, message, None) == [Stray("doubled")]  # it is being done
    coming = task(2 * m.PART, key=key(1))
    give(c, coming, None)
    (failed,) = sent(c.received(msgspec.structs.replace(coming, form=form(1)), None, 0.0))
    assert (failed.key, failed.again) == (key(1), True)


def test_a_welcome_comes_once_a_join_and_other_clients_are_another_run():
    c = ready()
    with pytest.raises(RemoteProtocolError, match="has not just joined"):
        c.received(WELCOME, None, 0.0)
    c.closed()
    c.opened(2.0)
    more = m.Welcome(run="r", inc=1, session="s", name="n", config="c", ids=[0, 1, 2], beat_s=1.0)
    assert c.received(more, None, 2.0) == [Prepare(more, False)]


def test_a_task_is_taken_only_when_ready_and_only_of_a_client_that_is_hosted():
    c = ClientProtocol(JOIN)
    c.opened(0.0)
    c.received(WELCOME, None, 0.0)
    with pytest.raises(RemoteProtocolError, match="not ready here"):
        give(c)
    c.ready("L")
    other = msgspec.structs.replace(task(3), key=key(client=5))
    with pytest.raises(RemoteProtocolError, match="a task of client 5"):
        give(c, other)
    assert c.task_state(key()) is ClientTaskState.GONE


def test_memory_for_a_payload_is_asked_for_before_it_is_taken():
    c = ready(room=lambda: 3 * m.PART)
    out = give(c, task(3 * m.PART + 1), None)
    assert out[0] == ClosePayload("down", key(), False)
    (failed,) = sent(out)
    assert failed.again
    assert failed.reason == (
        f"a payload of {3 * m.PART + 1} bytes does not fit into the {3 * m.PART} that are free"
    )
    assert [type(i) for i in give(c, task(3 * m.PART), None)] == [Send]


def test_all_payloads_together_take_no_more_than_twice_the_tasks_at_work_and_three_more():
    """Of two slots, seven payloads of the largest size."""
    c = ready(slots=2)
    c.largest = lambda key: 2 * m.PART
    (failed,) = sent(give(c, task(2 * m.PART + 1), None), m.Failed)
    assert failed.reason == (
        f"a payload of {2 * m.PART + 1} bytes; this run declares {2 * m.PART} at most"
    )
    assert not failed.again
    for attempt in range(7):
        one = msgspec.structs.replace(task(2 * m.PART), key=key(attempt=attempt))
        assert not sent(give(c, one, None), m.Failed)
    last = msgspec.structs.replace(task(1), key=key(attempt=7))
    (failed,) = sent(give(c, last, b"x"), m.Failed)
    assert "beside its other tasks" in failed.reason
    assert failed.again
    c.received(m.Cancel(run="r", inc=1, key=key(attempt=0)), None, 0.0)
    for index in range(2):  # one that is done and not sent yet takes no room either
        part(c, key(attempt=1), index)
    c.finish(reply(2 * m.PART, key(attempt=1)))
    more = msgspec.structs.replace(task(2 * m.PART), key=key(attempt=8))
    assert not sent(give(c, more, None), m.Failed)
    assert not sent(give(c, last, b"x"), m.Failed)


def cancel(c, k) -> list:
    return c.received(m.Cancel(run="r", inc=1, key=k), None, 0.0)


def connect_again(c) -> None:
    c.closed()
    c.opened(0.0)
    c.received(WELCOME, None, 0.0)


@pytest.mark.parametrize(
    ("parts", "end"),
    [
        (1, lambda c, k: c.finish(reply(3, k))),
        (1, lambda c, k: c.finish(reply(3, k)) + c.abandon(k)),
        (1, lambda c, k: c.finish([(m.Failed(key=k, reason="x"), NOTHING)])),
        (1, cancel),
        (1, lambda c, k: c.abandon(k)),
        (1, lambda c, k: give(c, task(1, key=m.Key(k.attempt + 2, 0, 0, 0)), b"x")),
        (2, cancel),
        (2, lambda c, k: part(c, k, 1)),  # out of turn
        (2, lambda c, k: part(c, k, 0) + part(c, k, 1) + c.finish(reply(2 * m.PART, k))),
        (2, lambda c, k: connect_again(c)),
        (3, lambda c, k: None),  # for which there is no room
    ],
)
def test_what_a_task_took_is_free_again_whatever_becomes_of_it(parts, end):
    size = parts * m.PART
    c = ready(largest=lambda key: size, room=lambda: 2 * m.PART)
    for attempt in range(12):
        k = key(attempt=attempt)
        out = give(c, task(size, key=k), bytes(size) if parts == 1 else None)
        assert not [f for f in sent(out, m.Failed) if "beside its other tasks" in f.reason]
        end(c, k)
    for attempt in range(12):
        cancel(c, key(attempt=attempt))
        cancel(c, m.Key(attempt + 2, 0, 0, 0))
    # Room for five, as of one slot.
    taken = [give(c, task(m.PART, key=key(1, n)), bytes(m.PART)) for n in range(5 * parts + 1)]
    assert [len(sent(out, m.Failed)) for out in taken] == [0] * 5 * parts + [1]


def test_payloads_come_one_after_the_other_in_the_order_of_their_tasks():
    """Whatever becomes of the one that is coming, the next follows."""
    c = ready(slots=4, room=lambda: 2 * m.PART)
    sizes = {0: 2, 1: 2, 2: 3, 3: 2}  # parts by attempt; of the third there is no room for so many
    for attempt, parts in sizes.items():
        out = give(c, task(parts * m.PART, key=key(attempt=attempt)), None)
        pulled = [(p.key.attempt, p.first, p.count) for p in sent(out, m.Pull)]
        assert pulled == ([(0, 0, 2)] if attempt == 0 else [])
        assert c.task_state(key(attempt=attempt)) is ClientTaskState.COMING
    assert part(c, key(attempt=1)) == [Stray("late")]  # it was not asked for
    assert sent(part(c, key()), m.Pull) == []
    out = part(c, key(), 1)
    assert DoTask in map(type, out)
    assert [p.key.attempt for p in sent(out, m.Pull)] == [1]
    out = c.received(m.Cancel(run="r", inc=1, key=key(attempt=1)), None, 0.0)
    assert [f.key.attempt for f in sent(out, m.Failed)] == [2]
    assert [p.key.attempt for p in sent(out, m.Pull)] == [3]
    again = task(2 * m.PART, key=key(attempt=4))
    assert sent(give(c, again, None), m.Pull) == []
    out = part(c, key(attempt=3), index=1)  # out of turn
    assert [f.key.attempt for f in sent(out, m.Failed)] == [3]
    assert [p.key.attempt for p in sent(out, m.Pull)] == [4]
    c.closed()
    c.opened(2.0)
    c.received(WELCOME, None, 2.0)
    assert [p.key.attempt for p in sent(give(c, again, None), m.Pull)] == [4]


def test_an_equal_payload_that_comes_after_another_takes_no_memory():
    free = [3 * m.PART]
    c = ready(slots=2, room=lambda: free[0])
    for attempt in range(2):
        give(c, task(3 * m.PART, key=key(attempt=attempt), check=b"same"), None)
    for index in range(3):
        part(c, key(), index)
    free[0] = 0
    given = [i for index in range(3) for i in part(c, key(attempt=1), index)]
    assert [g.task.key.attempt for g in given if isinstance(g, DoTask)] == [1]


def test_over_links_of_their_own_the_payloads_of_several_clients_come_at_the_same_time():
    c = ready(own_links=True)
    for client in range(2):
        out = give(c, task(2 * m.PART, key=key(client)), None)
        assert [p.key.client for p in sent(out, m.Pull)] == [client]


def test_part_that_is_missing_fails_the_task_so_that_it_comes_again():
    c = ready()
    assert sent(give(c, task(3 * m.PART), None)) == [
        m.Pull(run="r", inc=1, key=key(), first=0, count=2)
    ]
    assert [x.first for x in sent(part(c))] == [2]
    assert part(c) == [Stray("doubled")]
    out = part(c, index=2)
    assert out[0] == ClosePayload("down", key(), False)
    assert [(f.key, f.again) for f in sent(out, m.Failed)] == [(key(), True)]
    assert part(c) == [Stray("late")]
    give(c, task(2 * m.PART), None)
    assert [DoTask in map(type, part(c, index=index)) for index in range(2)] == [False, True]
    assert part(c, index=2) == [Stray("late")]


def test_long_reply_waits_to_be_pulled_and_is_sent_in_turn():
    c = working()
    size = 2 * m.PART + 5
    assert [type(x) for x in sent(c.finish(reply(size)))] == [m.Reply]
    out = pull(c, 0, 2)
    assert [(i.message.index, len(i.body)) for i in out] == [(0, m.PART), (1, m.PART)]
    assert pull(c, 0, 2) == [Stray("doubled")]
    for first, count in ((3, 1), (2, 2)):
        with pytest.raises(RemoteProtocolError):
            pull(c, first, count)
    out = pull(c, 2, 1)
    assert (len(out[0].body), out[1]) == (5, ClosePayload("up", key()))
    assert c.task_state(key()) is ClientTaskState.GONE


@pytest.mark.parametrize("joining", [False, True])
def test_reply_that_is_done_while_away_is_announced_when_ready_again(joining):
    c = working()
    c.closed()
    if joining:
        c.opened(2.0)
    assert c.finish(reply(3)) == []
    if not joining:
        c.opened(2.0)
    out = c.received(WELCOME, None, 2.0)
    assert [type(x) for x in sent(out)] == [m.Ready, m.Reply]
    assert out[-1] == ClosePayload("up", key())


def test_cancel_lets_go_of_an_announced_reply():
    c = working()
    c.finish(reply(2 * m.PART))
    assert c.received(m.Cancel(run="r", inc=1, key=key()), None, 0.0) == [
        ClosePayload("up", key(), False),
        Cancelled(key()),
    ]
    assert c.task_state(key()) is ClientTaskState.GONE


def test_beats_tell_what_each_client_does():
    c = ready()
    c.doing[1] = ("training", 3, 9)
    assert c.tick(0.5) == []
    assert sent(c.tick(1.0)) == [
        m.Progress(run="r", inc=1, client=1, stage="training", step=3, steps=9)
    ]
    assert c.tick(1.5) == []


def test_silent_server_is_left():
    c = ready()
    assert Reconnect() not in c.tick(SILENCE)
    assert c.tick(SILENCE + 0.1) == [Reconnect()]
    assert Reconnect() not in c.tick(SILENCE + 0.2)  # once
    c.closed()
    c.opened(100.0)
    assert c.tick(107.0) == []
    c.received(WELCOME, None, 107.0)
    c.received(m.Alive(run="r", inc=1), None, 114.0)
    assert Reconnect() not in c.tick(122.0)
    assert c.tick(122.1) == [Reconnect()]


def test_a_server_whose_message_is_still_coming_is_not_left():
    came = [500]
    c = ready(bytes_read=lambda: came[0])
    c.tick(SILENCE / 2 + 0.1)
    came[0] += 1
    assert Reconnect() not in c.tick(SILENCE + 0.1)
    c.tick(1.5 * SILENCE + 0.2)
    assert c.tick(2 * SILENCE + 0.2) == [Reconnect()]


def test_message_that_the_server_could_not_read_is_said_anew_over_a_new_connection():
    c = working()
    assert c.received(m.Refuse(reason="a pull out of turn"), None, 0.0) == []
    assert c.received(m.Refuse(reason="damaged", unread=True), None, 0.0) == [Reconnect()]
    c.closed()
    assert sent(c.opened(0.0), m.Join)[0].holding == [key()]


def test_refused_join_is_tried_again_unless_that_cannot_help():
    c = ClientProtocol(JOIN)
    c.opened(0.0)
    # Each time after twice as long, up to 8 s, in which it does not take the server for silent.
    now = 0.0
    for wait in (1.0, 2.0, 4.0, 8.0, 8.0):
        full = m.Refuse(reason="full")
        assert c.received(full, None, now) == [full]
        assert c.tick(now + wait - 0.1) == []
        now += wait
        assert [type(x) for x in sent(c.tick(now))] == [m.Join]
    c.closed()
    c.opened(now)
    c.received(full, None, now)
    now += 1.0  # as the first time
    assert [type(x) for x in sent(c.tick(now))] == [m.Join]
    no = m.Refuse(reason="no", final=True)
    assert c.received(no, None, now) == [no]
    assert c.opened(now) == []


def test_end_of_the_run_is_the_end_but_the_end_of_a_server_is_not():
    c = ready()
    for over in (False, True):
        end = m.End(run="r", inc=1, over=over, reason="x")
        assert c.state is ClientState.READY
        assert c.received(end, None, 0.0) == [end]
    assert give(c) == [Stray("late")]
    assert c.opened(1.0) == []


def test_process_that_can_do_more_at_once_says_so_now_and_when_it_joins_again():
    c = ready()
    (beat,) = sent(c.slots_changed(3), m.Slots)
    assert beat.slots == 3
    assert c.slots_changed(3) == []
    c.closed()
    assert c.slots_changed(2) == []
    (join,) = sent(c.opened(2.0), m.Join)
    assert join.slots == 2
    c = ClientProtocol(JOIN)
    c.opened(0.0)
    c.received(WELCOME, None, 0.0)  # from then on, though it is not ready yet
    assert [x.slots for x in sent(c.slots_changed(3), m.Slots)] == [3]


def test_a_payload_is_in_memory_of_the_clients_own():
    """In one process all parts are views of the server's memory, and a method may write to its
    payload.
    """
    c = ready()
    sent_from = memoryview(bytearray(2 * m.PART))
    give(c, task(len(sent_from)), None)
    for index in range(2):
        out = part(c, index=index, data=sent_from[index * m.PART : (index + 1) * m.PART])
    (given,) = [i for i in out if isinstance(i, DoTask)]
    sent_from[:] = b"\1" * len(sent_from)
    assert bytes(given.body) == bytes(len(sent_from))
    beside = memoryview(bytearray(3))
    (given,) = [
        i for i in c.received(task(3, key=key(1)), Body([beside]), 0.0) if isinstance(i, DoTask)
    ]
    beside[:] = b"abc"
    assert bytes(given.body) == bytes(3)


def test_equal_payloads_of_a_process_are_in_memory_once():
    """As long as one of their tasks is to be done; all bytes cross all the same."""
    c = ClientProtocol(m.Join(worker="w", slots=3))
    size = 2 * m.PART
    c.opened(0.0)
    c.received(msgspec.structs.replace(WELCOME, ids=[0, 1, 2]), None, 0.0)
    c.ready("L")

    def begin(client, check=b"digest"):
        give(c, task(size, key=key(client), check=check), None)

    def given(client, data=b"a"):
        """The payload that the client's task is given, once all of it has come."""
        for index in range(2):
            out = part(c, key(client), index, data * m.PART)
        (found,) = [i.body for i in out if isinstance(i, DoTask)]
        assert bytes(found) == data * size
        return found

    begin(0)
    first = given(0)
    begin(1)
    c.finish(reply(3, key(0)))
    begin(2)
    assert given(1) is first
    assert given(2) is first
    c.abandon(key(2))
    begin(2, b"other")
    assert given(2, b"b") is not first
    c.finish(reply(3, key(1)))
    begin(1)
    assert given(1) is not first
    c.abandon(key(1))
    for client, data in ((0, b"c"), (1, b"d")):  # of which no digest says that they are equal
        begin(client, b"")
        given(client, data)


def test_a_damaged_part_of_an_equal_payload_does_not_change_the_one_in_memory():
    c = ready(slots=2)
    size = 2 * m.PART
    for client, data in ((0, b"a"), (1, b"!")):
        give(c, task(size, key=key(client), check=b"digest"), None)
        for index in range(2):
            out = part(c, key(client), index, data * m.PART)
        (given,) = [i for i in out if isinstance(i, DoTask)]
        assert bytes(given.body) == b"a" * size


@pytest.mark.parametrize("slots", [2, 5])
def test_a_process_that_has_a_slot_less_takes_the_tasks_that_were_on_their_way(slots):
    """As many as it had slots, and as many ahead, may have been sent before the server knew."""
    c = ready(slots=slots, largest=lambda key: 3)
    for attempt in range(2 * slots):
        if attempt == slots:
            c.slots_changed(slots - 1)
        one = msgspec.structs.replace(task(3), key=key(attempt=attempt))
        assert [i.task for i in give(c, one) if isinstance(i, DoTask)] == [one]


def test_who_has_just_said_something_need_not_say_that_it_is_alive():
    c = ready()
    c.tick(0.0)
    assert sent(c.tick(1.0)) == [m.Alive(run="r", inc=1)]
    assert c.tick(1.5) == []
    c.slots_changed(3)
    assert c.tick(1.9) == []
    assert c.tick(2.8) == []
    assert sent(c.tick(2.9)) == [m.Alive(run="r", inc=1)]
    c.doing[1] = ("training", 3, 9)
    c.slots_changed(4)
    assert sent(c.tick(3.9), m.Progress)  # of which nothing else tells


def test_reply_to_what_was_cancelled_is_not_sent():
    c = working()
    assert c.received(m.Cancel(run="r", inc=1, key=key()), None, 0.0) == [Cancelled(key())]
    assert c.finish(reply(3)) == []
    assert c.finish(failure("x", True)) == []
    assert c.received(m.Cancel(run="r", inc=1, key=key()), None, 0.0) == []


def test_reason_that_is_no_text_of_the_wire_is_made_one():
    (failed,) = sent(working().finish(failure("file \udcff " + "x" * 9000, False)))
    assert decode_from_client([encode(failed)])[0] == failed


def test_task_that_fits_into_no_machine_is_failed():
    (failed,) = sent(ready(room=lambda: 1 << 63).received(task(1 << 62), None, 0.0), m.Failed)
    assert "does not fit into this machine" in failed.reason


def test_a_status_ends_a_process_that_asked_for_it_and_no_other():
    answer = m.Standing(text="round 1 (training); client(s) 0: connected")
    asked = ClientProtocol(m.Join(worker="w", ids=[0], status=True))
    asked.opened(0.0)
    assert asked.received(answer, None, 0.1) == [answer]
    assert asked.state is ClientState.OVER
    works = ClientProtocol(m.Join(worker="w", ids=[0]))
    works.opened(0.0)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        works.received(answer, None, 0.1)
    assert works.state is ClientState.JOINING

"""The server's machine alone: events in, instructions out."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from fednet.errors import RemoteProtocolError
from fednet.protocol import workers
from fednet.protocol.instructions import (
    MOST_STRAYS,
    Arrived,
    ClosePayload,
    HangUp,
    Note,
    Resolved,
    Send,
    Store,
    Stray,
)
from fednet.protocol.server import BUDGET, UNUSED_S, ServerProtocol
from fednet.protocol.table import TaskState
from fednet.protocol.tasks import DEATHS, TRIES, Rules
from fednet.protocol.workers import SLOTS
from fednet.wire import messages as m
from fednet.wire.body import Body
from tests.protocol.net import form, machine, spec

READY = m.Ready(run="r", inc=1, layout="L")
ALIVE = m.Alive(run="r", inc=1)


def server(clients: int = 4, **options) -> ServerProtocol:
    return machine("r", 1, clients, **options)


BODY = Body([b"abc"])


def say(s, conn, message, now=0.0, body=None, user=None) -> list:
    return s.received(conn, message, body, now, user)


def ready(s, conn=b"1", worker="w", ids=(0,), now=0.0, **more) -> list:
    say(s, conn, m.Join(worker=worker, ids=list(ids), **more), now)
    return say(s, conn, READY, now)


def sent(instructions, kind=m.Message) -> list:
    return [i.message for i in instructions if isinstance(i, Send) and isinstance(i.message, kind)]


def of(instructions, kind) -> list:
    return [i for i in instructions if isinstance(i, kind)]


def key(client=0, attempt=0, round=1, phase=0, purpose="train") -> m.Key:
    return m.Key(round, phase, attempt, client, purpose)


def reply(client=0, size=3, attempt=0, **more) -> m.Reply:
    fields = {
        "run": "r",
        "inc": 1,
        "key": key(client, attempt),
        "form": form(size),
        "size": size,
        **more,
    }
    return m.Reply(**fields)


def replies(s, conn, client, now=0.0, **more) -> list:
    return say(s, conn, reply(client, **more), now, BODY)


def answer(s, conn, client, now=0.0, attempt=0) -> list:
    """The client's reply comes, and counts."""
    out = replies(s, conn, client, now, attempt=attempt)
    return out + s.accept(key(client, attempt), now)


def part(s, conn, client=0, index=0, now=0.0, data=bytes(m.PART), **more) -> list:
    message = m.Part(run="r", inc=1, key=key(client, **more), index=index)
    return say(s, conn, message, now, Body([data]))


def fails(s, conn, client=0, attempt=0, reason="x", now=0.0, **more) -> list:
    message = m.Failed(run="r", inc=1, key=key(client, attempt), reason=reason, **more)
    return say(s, conn, message, now)


def begun(specs=None, rules=None, **more) -> ServerProtocol:
    s = server(**more)
    ready(s, ids=range(4))
    s.begin(1, 0, "train", specs or [spec(0)], rules or Rules(), 0.0)
    return s


def given_to(out) -> list:
    """The connections that were given tasks."""
    return [i.conn for i in of(out, Send) if isinstance(i.message, m.Task)]


def refusal(instructions) -> str:
    (note,) = [n for n in of(instructions, Note) if n.event == "refused"]
    return note.fields["reason"]


def forty(rules=None) -> ServerProtocol:
    """Forty workers, each with the task of its own client."""
    s = server(40)
    for i in range(40):
        ready(s, b"%d" % i, f"w{i}", [i])
    s.begin(1, 0, "train", [spec(i) for i in range(40)], rules or Rules(), 0.0)
    return s


def two_of_client_0() -> ServerProtocol:
    """Workers a and b, which host client 0; a has its task."""
    s = server()
    ready(s, b"1", "a", [0])
    s.begin(1, 0, "train", [spec(0)], Rules(closed=3.0), 0.0)
    ready(s, b"2", "b", [0])
    return s


# -- joining ---------------------------------------------------------------------------------------
def test_task_goes_out_when_its_worker_is_ready_and_its_reply_settles_it():
    s = server()
    assert s.begin(1, 0, "train", [spec(0)], Rules(), 0.0) == []
    welcome = say(s, b"1", m.Join(worker="w", ids=[0]))
    assert [type(x) for x in sent(welcome)] == [m.Welcome]
    (task,) = sent(say(s, b"1", READY), m.Task)
    assert (task.key, task.size) == (key(), 5)
    got = replies(s, b"1", 0)
    (whole,) = got
    assert (whole.task.key, whole.task.reply, whole.body) == (key(), reply(), BODY)
    assert (whole.task.conn, whole.task.up_conn) == (b"1", b"1")
    assert s.accept(key(), 1.0) == [Resolved(key(0))]


@pytest.mark.parametrize(
    ("join", "reason"),
    [
        (m.Join(worker="w", ids=[4]), "client id 4; this federation has ids 0 to 3"),
        (m.Join(worker="w", ids=[]), "client id missing"),
        (m.Join(worker="w", share=(0, 2)), "client id -2"),
        (m.Join(worker="w", share=(3, 2)), "client id 4"),
        (m.Join(worker="w", share=(1, 0)), "join"),
        (m.Join(worker="w", share=(1, 1 << 40)), "empty"),
        (m.Join(worker="w", ids=[1]), "may not speak for client 1"),
        (m.Join(worker="w", ids=[0], files={"a.py": "other"}), "needs mine.py"),
    ],
)
def test_join_that_can_never_be_let_in_is_refused_for_good(join, reason):
    s = server(
        files={"mine.py": "sha"} if join.files else {},
        key_refusal=lambda user, client: "key revoked" if client == 1 else "",
    )
    out = say(s, b"1", join)
    assert reason in refusal(out)
    assert [x.final for x in sent(out, m.Refuse)] == [True]
    assert out[0] == Stray("refused")
    assert s.roster.workers == {}
    assert set(s.roster._absent) <= {*range(4)}  # nothing is kept of ids that are made up


@pytest.mark.parametrize("speaks", [0, m.PROTOCOL + 1])
def test_a_client_of_another_version_of_the_protocol_is_refused_in_one_sentence(speaks):
    s = server()
    out = say(s, b"1", m.Join(worker="w", ids=[0], speaks=speaks, versions={"fednet": "0.0.9"}))
    assert refusal(out) == (
        f"join: the client (fednet 0.0.9) speaks version {speaks} of the protocol, this server "
        f"version {m.PROTOCOL}; install the same release of fednet on both sides."
    )
    assert [x.final for x in sent(out, m.Refuse)] == [True]
    assert s.roster.workers == {}


def test_clients_ask_to_join_an_open_run_until_it_has_as_many_as_it_may():
    s = server(4, most_clients=7, key_refusal=lambda user, client: "revoked" if client == 6 else "")

    def ask(conn, *ids) -> tuple:
        """(what the event says, the reason that is sent, whether it is final)"""
        out = say(s, conn, m.Join(worker=conn.decode(), ids=list(ids)))
        assert out[0] == Stray("refused")
        (refuse,) = sent(out, m.Refuse)
        asked = [n.fields["clients"] for n in of(out, Note) if n.event == "asked_to_join"]
        return asked, refuse.reason.removeprefix("join: "), refuse.final

    gap = "join the run when a round ends, once client(s) 4 ask to join too."
    assert ask(b"5", 5) == ([[5]], f"client(s) 5 {gap}", False)
    assert ask(b"5", 5) == ([], f"client(s) 5 {gap}", False)  # again, which is no event
    assert s.clients_wanted() == 4
    # One that hosts a client of the run too.
    assert ask(b"4", 0, 4) == ([[4]], "client(s) 4 join the run when a round ends.", False)
    assert s.clients_wanted() == 6
    assert ask(b"6", 6) == ([], "this key may not speak for client 6.", True)
    assert ask(b"7", 7) == ([], "client id 7; this federation has ids 0 to 6.", True)
    assert s.roster.workers == {}
    assert ask(b"9", 5)[0] == [[5]]  # another process
    s.closed(b"5", 1.0)
    assert s.clients_wanted() == 6
    # One that has gone asks no more.
    s.closed(b"9", 1.0)
    assert s.clients_wanted() == 5
    for _ in range(MOST_STRAYS):
        ask(b"4", 0, 4)
    out = s.turn_away("because", 1.0)
    assert [(i.conn, i.message.reason, i.message.final) for i in of(out, Send)] == [
        (b"4", "join: because", True)
    ]
    assert s.clients_wanted() == 4


def test_connection_joins_once():
    s = server()
    ready(s)
    for name in ("w", "v"):
        assert "joined already" in refusal(say(s, b"1", m.Join(worker=name, ids=[0])))
    say(s, b"1", m.Leave(run="r", inc=1))
    assert "joined already" in refusal(say(s, b"1", m.Join(worker="v", ids=[0])))
    s.closed(b"1", 0.0)
    assert sent(say(s, b"1", m.Join(worker="v", ids=[0])), m.Welcome)  # another of the same name


def test_name_of_a_connected_worker_is_taken_over_only_with_its_session():
    s = server()
    ready(s)
    assert "of that name" in refusal(say(s, b"2", m.Join(worker="w", ids=[0])))
    out = say(s, b"2", m.Join(worker="w", ids=[0], session=s.roster.workers["w"].session))
    assert HangUp(b"1") in out
    assert "before a join" in refusal(say(s, b"1", ALIVE))
    assert of(s.closed(b"1", 0.0), Note) == []  # it is not away
    assert s.roster.workers["w"].conn == b"2"


def test_name_of_a_silent_worker_can_be_taken_over_without_its_session_but_not_with_another_key():
    s = server()
    say(s, b"1", m.Join(worker="w", ids=[0]), user="alice")
    s.tick(11.0)
    assert "of that name" in refusal(
        say(s, b"2", m.Join(worker="w", ids=[0]), 11.0, user="mallory")
    )
    assert sent(say(s, b"3", m.Join(worker="w", ids=[0]), 11.0, user="alice"), m.Welcome)


# -- refusals --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (m.Alive(run="x", inc=1), "another run ('x')"),
        (m.Alive(run="r", inc=2), "incarnation 2"),
        (reply(3, run="x"), "another run"),
        (reply(1), "client 1 is not hosted"),
        (m.Pull(run="r", inc=1, key=key(), first=1, count=1), "pull of parts 1 to 1"),
        (m.Pull(run="r", inc=1, key=key(), first=0, count=5), "pull of parts 0 to 4"),
    ],
)
def test_message_that_breaks_the_protocol_is_refused_and_changes_nothing(message, reason):
    s = server()
    ready(s)
    s.begin(1, 0, "train", [spec(0)], Rules(), 0.0)
    before = s.waiting()
    out = say(s, b"1", message)
    assert out[0] == Stray("refused")
    assert reason in refusal(out)
    assert s.waiting() == before
    assert s.refused == 1


def test_who_waits_for_a_busy_worker_is_told_from_who_is_not_there():
    s = server()
    ready(s, ids=(0, 1, 2))
    rules = Rules(deadline=10.0)
    s.begin(1, 0, "train", [spec(k, cost=9 - k % 3) for k in (2, 1, 3, 0)], rules, 0.0)
    s.tick(4.0)
    # The time of a task that is handed out ahead has not begun.
    assert [row["deadline_s"] for row in s.waiting()] == [6.0, 10.0, 10.0, 56.0]

    def rows() -> list[tuple]:
        return [(row["client"], row["phase"]) for row in s.waiting()]

    assert rows() == [(0, "handed"), (1, "queued"), (2, "queued"), (3, "waiting")]
    say(s, b"1", m.Progress(run="r", inc=1, client=0, stage="training", step=1, steps=9))
    assert rows()[0] == (0, "training")
    answer(s, b"1", 0)
    s.begin(2, 0, "train", [spec(0)], Rules(), 0.0)
    assert rows() == [(0, "handed")]
    s = begun([spec(k) for k in range(3)], Rules(silent=None))
    assert of(s.tick(99.0), Resolved) == []  # who waits for a busy worker is never lost


def test_peer_is_told_of_its_first_refusals_in_each_round():
    s = server()

    def told() -> int:
        noise = [s.undecodable(b"1", "noise", 0.0) for _ in range(MOST_STRAYS + 5)]
        return sum(len(sent(out, m.Refuse)) for out in noise)

    assert told() == MOST_STRAYS
    s.begin(1, 0, "train", [], Rules(), 0.0)
    assert told() == MOST_STRAYS
    s.add(1, [], 0.0)
    assert told() == 0
    s.add(2, [], 0.0)
    assert told() == MOST_STRAYS
    s.closed(b"1", 0.0)
    assert s.strays == {}


def test_a_reply_that_never_can_be_read_does_not_hold_its_task():
    s = begun()
    dropped = []
    for _ in range(MOST_STRAYS * TRIES):
        assert not dropped
        dropped = of(s.undecodable(b"1", "reply: state: no digest", 0.0), Resolved)
    (over,) = dropped
    assert over.key.client == 0
    assert over.reason == (
        f"refused: {MOST_STRAYS} messages that cannot be read, the last: reply: state: no digest"
    )


def test_of_messages_that_cannot_be_read_only_the_task_suffers_that_its_worker_is_at():
    s = begun([spec(0, cost=2), spec(1, cost=1), spec(2)])
    assert s.roster.workers["w"].queue == [0, 1]
    noise = [s.undecodable(b"1", "noise", 0.0) for _ in range(MOST_STRAYS)]
    notes = [n.fields for out in noise for n in of(out, Note)]
    assert [fields["client"] for fields in notes if fields["what"] == "reply"] == [0]


def test_an_empty_reply_is_whole_with_its_announcement():
    out = say(begun(), b"1", reply(size=0))
    assert [(type(i), i.body.size) for i in out] == [(Arrived, 0)]


def test_who_says_twice_that_it_is_ready_is_ready_once():
    s = begun()
    assert say(s, b"1", READY) == [Stray("doubled")]


def test_form_that_was_not_declared_is_refused_before_any_part_is_granted():
    def declared(key, found, evaluates):
        if found[0].size != 3:
            raise RemoteProtocolError("too large")

    s = begun(declared=declared)
    out = say(s, b"1", reply(size=1 << 40))
    assert "too large" in refusal(out)
    assert sent(out, m.Pull) == []
    assert [t.key.attempt for t in sent(out, m.Task)] == [1]


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (reply(size=3), b"ab"),
        (reply(size=3), None),
        (reply(size=3, form=form(4)), b"abc"),
        (reply(size=0, form=form(4)), None),
    ],
)
def test_reply_whose_sizes_do_not_agree_is_given_out_again(message, body):
    s = begun()
    out = say(s, b"1", message, body=None if body is None else Body([body]))
    assert out[0] == Stray("refused")
    assert [t.key for t in sent(out, m.Task)] == [key(attempt=1)]


def test_failed_task_is_given_out_again_only_if_that_could_help():
    s = begun([spec(0), spec(1)], Rules())
    out = fails(s, b"1", 0, reason="no data")
    assert of(out, Resolved) == [Resolved(key(0), "failed: no data")]
    (note,) = of(out, Note)
    assert (note.event, note.fields["purpose"]) == ("failed", "train")
    out = fails(s, b"1", 1, reason="damaged", again=True)
    assert [t.key for t in sent(out, m.Task)] == [key(1, 1)]


# -- doubled and late ------------------------------------------------------------------------------
def test_doubled_reply_is_stray():
    s = begun()
    replies(s, b"1", 0)
    assert s.accept(key(), 0.0) == [Resolved(key(0))]
    out = replies(s, b"1", 0)
    assert out[0] == Stray("doubled")
    assert of(out, ClosePayload) == []
    s = begun()
    long = reply(size=3 * m.PART)
    say(s, b"1", long)
    out = say(s, b"1", long)
    assert (out[0], sent(out)) == (Stray("doubled"), [])  # what is coming is not called off


def test_late_reply_is_stray_and_called_off_if_it_waits_to_be_asked_for_the_rest():
    s = begun(rules=Rules(deadline=5.0))
    assert of(s.tick(5.0), Resolved) == [Resolved(key(0), "deadline")]
    assert sent(replies(s, b"1", 0, 6.0)) == []
    out = say(s, b"1", reply(size=m.PART + 1), 6.0)
    assert out[0] == Stray("late")
    assert sent(out, m.Cancel) == [m.Cancel(run="r", inc=1, key=key())]


def test_part_sent_twice_is_stray():
    s = begun()
    say(s, b"1", reply(size=3 * m.PART))
    assert of(part(s, b"1"), Store)
    assert part(s, b"1") == [Stray("doubled")]


def test_part_out_of_turn_gives_the_task_out_again():
    s = begun()
    say(s, b"1", reply(size=3 * m.PART))
    out = part(s, b"1", index=1)
    assert of(out, ClosePayload) == [
        ClosePayload(b"1", "up", key(), "refused"),
        ClosePayload(b"1", "down", key(), "given out again"),
    ]
    assert [t.key.attempt for t in sent(out, m.Task)] == [1]
    assert sent(out, m.Cancel) == [m.Cancel(run="r", inc=1, key=key())]


def test_a_reply_is_checked_with_the_evaluation_that_its_task_asks_for():
    checked = []

    def declared(key, form, evaluates):
        checked.append((key.client, evaluates))

    s = begun([spec(0, evaluates=True), spec(1)], declared=declared)
    replies(s, b"1", 0)
    replies(s, b"1", 1)
    assert checked == [(0, True), (1, False)]


def test_an_evaluation_that_is_refused_changes_nothing_of_its_reply():
    s = begun([spec(0, evaluates=True)])
    replies(s, b"1", 0)
    out = s.accept(key(), 0.0, "more are correct than were tested")
    assert out == [
        Note(
            "refused",
            {
                "what": "reply",
                "client": 0,
                "round": 1,
                "reason": "its evaluation: more are correct than were tested",
                "worker": "w",
            },
        ),
        Resolved(key()),
    ]
    assert s.tasks[0].status is TaskState.DONE


# -- who gets what ---------------------------------------------------------------------------------
def test_longest_first_and_one_ahead_but_never_the_last_ones():
    s = begun([spec(i, cost=i) for i in range(4)])
    assert s.roster.workers["w"].queue == [3, 2]  # the longest runs, the next lies ready
    out = replies(s, b"1", 3)
    assert [t.key.client for t in sent(out, m.Task)] == [1]
    s.accept(key(3), 0.0)
    replies(s, b"1", 2)
    assert s.roster.workers["w"].queue == [1]  # the last one waits for a worker that is free
    out = replies(s, b"1", 1)
    assert [t.key.client for t in sent(out, m.Task)] == [0]


def test_a_task_that_no_worker_had_room_for_keeps_its_place():
    s = server(6)
    ready(s, b"1", "a", range(4))
    ready(s, b"2", "b", [4, 5])
    costs = {0: 9, 1: 8, 2: 7, 4: 6, 5: 5, 3: 1}
    s.begin(1, 0, "train", [spec(i, cost=cost) for i, cost in costs.items()], Rules(), 0.0)
    assert [x.queue for x in s.roster.workers.values()] == [[0, 1], [4, 5]]
    out = say(s, b"1", m.Slots(run="r", inc=1, slots=3))
    assert [t.key.client for t in sent(out, m.Task)] == [2]


def test_tasks_that_were_dropped_while_they_waited_do_not_count_among_those_that_wait():
    s = server()
    ready(s, ids=[0, 1])
    s.begin(1, 0, "train", [spec(2), spec(3)], Rules(), 0.0)
    out = s.begin(2, 0, "train", [spec(0), spec(1)], Rules(), 0.0)
    assert [t.key.client for t in sent(out, m.Task)] == [0]  # the last one is not handed out ahead


def test_an_upload_that_waits_for_its_link_leaves_its_slot_to_the_next_task():
    s = begun([spec(i, cost=4 - i) for i in range(4)], Rules(deadline=10.0, silent=None))
    out = say(s, b"1", m.Progress(run="r", inc=1, client=0, stage=m.UPLOADING), 5.0)
    assert [t.key.client for t in sent(out, m.Task)] == [2]
    assert s.roster.workers["w"].queue == [1, 2]
    for now, client in ((10.0, 0), (15.0, 1)):
        assert of(s.tick(now - 0.1), Resolved) == []
        assert of(s.tick(now), Resolved) == [Resolved(key(client), "deadline")]


def test_longest_first_for_a_worker_of_few_clients_and_after_a_failure_too():
    s = server(12)
    ready(s, b"1", "a", range(6))
    ready(s, b"2", "b", range(6, 12))
    s.begin(1, 0, "train", [spec(i, cost=i) for i in range(12)], Rules(silent=None), 0.0)
    assert s.roster.workers["a"].queue == [5, 4]
    out = replies(s, b"1", 5)
    assert [t.key for t in sent(out, m.Task)] == [key(3)]
    assert [t.key for t in sent(fails(s, b"1", 4, again=True), m.Task)] == [key(4, 1)]


def test_signs_of_life_do_not_put_off_a_deadline():
    s = begun(rules=Rules(deadline=10.0, silent=None))
    for now in (3.0, 6.0, 9.0):
        say(s, b"1", m.Progress(run="r", inc=1, client=0, stage="training", step=1, steps=9), now)
        assert of(s.tick(now), Resolved) == []
    assert of(s.tick(10.0), Resolved) == [Resolved(key(0), "deadline")]


def test_deadline_of_a_task_runs_from_when_it_is_its_turn():
    s = begun([spec(i, cost=i) for i in range(4)], Rules(deadline=5.0, silent=None))
    s.tick(4.0)
    assert of(s.tick(5.0), Resolved) == [Resolved(key(3), "deadline")]
    assert of(s.tick(9.9), Resolved) == []
    assert of(s.tick(10.0), Resolved) == [Resolved(key(2), "deadline")]
    # One that was given out again is behind another now, though it is before it in the phase.
    s = begun([spec(i, cost=9 - i) for i in range(4)], Rules(deadline=5.0, silent=None))
    fails(s, b"1", 0, again=True)
    assert s.roster.workers["w"].queue == [1, 0]
    assert of(s.tick(5.0), Resolved) == [Resolved(key(1), "deadline")]


def test_task_at_which_a_worker_failed_goes_to_another_even_if_that_is_busy():
    s = server()
    ready(s, b"1", "a", [0, 1])
    ready(s, b"2", "b", [0, 1])
    s.begin(1, 0, "train", [spec(0), spec(1)], Rules(), 0.0)
    assert (s.tasks[0].worker, s.tasks[1].worker) == ("a", "b")
    out = fails(s, b"1", 0, reason="broken", again=True)
    assert sent(out, m.Task) == []
    out = replies(s, b"2", 1)
    assert [(i.conn, i.message.key) for i in of(out, Send)] == [(b"2", key(0, 1))]


@pytest.mark.parametrize("given", ["", "key expired", "key revoked"])
def test_why_a_client_is_lost_is_in_the_event_the_drop_and_the_list_of_sites(given):
    s = begun(rules=Rules(closed=3.0))
    why = given or "connection closed"
    notes = of(s.closed(b"1", 1.0, given), Note)
    assert [(n.event, n.fields["why"]) for n in notes] == [("away", why)]
    say(s, b"9", m.Join(worker="x", ids=[0], speaks=0), 1.0)  # which is no reason for its absence
    assert of(s.tick(3.9), Resolved) == []
    assert of(s.tick(4.0), Resolved) == [Resolved(key(0, 1), f"lost: {why}")]
    (row,) = s.roster.sites(s.clients, 100.0)
    found = {k: row[k] for k in ("clients", "connected", "since", "seen", "why", "did")}
    said = {"clients": [(0, 3)], "connected": False, "since": 100.0, "seen": 100.0, "why": why}
    assert found == said | {"did": "was asked for client 0 in round 1"}
    ready(s, b"2", "w", range(4), now=50.0)
    (row,) = s.roster.sites(s.clients, 100.0)
    assert (row["connected"], row["since"], row["why"]) == (True, 150.0, "")


def test_clients_that_never_came_or_were_refused_are_listed_with_the_reason():
    s = server(3, key_refusal=lambda user, client: "key revoked" if client == 1 else "")
    say(s, b"0", m.Join(worker="w", ids=[1], speaks=0), 0.5)
    say(s, b"1", m.Join(worker="w", ids=[1]), 1.0)  # the last reason counts
    found = {str(row["clients"]): row["why"] for row in s.roster.sites(s.clients, 0.0)}
    refused = "refused: this key may not speak for client 1."
    assert found == {"[0, 2]": "has not connected", "[1]": refused}


def test_of_many_sites_the_absent_ones_are_shown_first(monkeypatch):
    monkeypatch.setattr(workers, "SHOWN", 3)
    s = server(6)
    for client in range(4):
        ready(s, b"%d" % client, f"w{client}", [client])
    s.closed(b"3", 1.0)
    rows = s.roster.sites(s.clients, 0.0)
    assert [str(row["clients"]) for row in rows] == ["[0]", "[3]", "[(4, 5)]"]
    monkeypatch.setattr(workers, "SHOWN", 1)
    assert [str(row["clients"]) for row in s.roster.sites(s.clients, 0.0)] == ["[3]"]


def test_a_client_that_is_waited_for_is_listed_with_the_seconds_until_it_is_dropped():
    s = server()  # started at 0
    s.begin(1, 0, "train", [spec(0)], Rules(join=60.0), 5.0)
    s.tick(20.0)
    assert [row["deadline_s"] for row in s.waiting()] == [40.0]
    s = begun(rules=Rules(closed=30.0))
    s.closed(b"1", 10.0)
    s.tick(20.0)
    s.begin(2, 0, "train", [spec(0)], Rules(closed=30.0), 20.0)
    assert [row["deadline_s"] for row in s.waiting()] == [20.0]
    s.begin(3, 0, "train", [spec(0)], Rules(closed=None, join=None), 20.0)
    assert [row["deadline_s"] for row in s.waiting()] == [20.0]  # it went before that


def test_a_task_that_begins_while_its_client_is_away_waits_for_what_is_left_of_its_patience():
    s = begun(rules=Rules(closed=3.0))
    rules = Rules(closed=3.0)
    s.closed(b"1", 1.0)
    s.begin(2, 0, "train", [spec(0)], rules, 2.0)
    assert of(s.tick(3.9), Resolved) == []
    assert of(s.tick(4.0), Resolved) == [Resolved(key(0, round=2), "lost: connection closed")]
    # What begins later does not wait for it, until it is back.
    out = s.begin(3, 0, "train", [spec(0)], rules, 9.0)
    assert of(out, Resolved) == [Resolved(key(0, round=3), "lost: connection closed")]
    ready(s, b"2", "w", [0], 9.0)
    assert given_to(s.begin(4, 0, "train", [spec(0)], rules, 9.0)) == [b"2"]


def test_a_client_that_may_be_away_for_ever_is_never_lost():
    s = begun(rules=Rules(closed=None))
    rules = Rules(closed=None)
    s.closed(b"1", 1.0)
    s.begin(2, 0, "train", [spec(0)], rules, 2.0)
    assert of(s.tick(1e6), Resolved) == []
    assert [row["deadline_s"] for row in s.waiting()] == [None]
    say(s, b"2", m.Join(worker="w", ids=[0]), 1e6)
    assert s.tick(1e6 + 9.0) == []  # it is not silent since it went
    assert given_to(say(s, b"2", READY, 1e6 + 9.0)) == [b"2"]


@pytest.mark.parametrize("others", [True, False])
def test_a_worker_that_leaves_is_announced_and_its_tasks_go_to_others(others):
    s = begun(rules=Rules(closed=3.0))
    if others:
        ready(s, b"2", "v", [0])
    reason, why = ("site policy", "left: site policy") if others else ("", "left")
    out = say(s, b"1", m.Leave(run="r", inc=1, reason=reason), 1.0)
    notes = {n.event: n.fields for n in of(out, Note)}
    assert (notes["left"]["worker"], notes["left"]["clients"]) == ("w", [0, 1, 2, 3])
    assert (notes["away"]["worker"], notes["away"]["why"]) == ("w", why)
    assert given_to(s.tick(1.0)) == ([b"2"] if others else [])
    assert s.roster.present() == ({0} if others else set())
    # It is not there for what comes later.
    assert given_to(s.begin(2, 0, "train", [spec(1)], s.rules, 1.5)) == []
    assert "before a join" in refusal(say(s, b"1", ALIVE, 2.0))
    assert of(s.tick(4.0), Resolved) == [Resolved(key(1, round=2), f"lost: {why}")]


def test_silent_worker_is_called_off_its_clients_are_lost_at_once_and_it_works_when_it_is_back():
    s = begun(rules=Rules(closed=None, silent=10.0))
    out = s.tick(10.1)
    assert of(out, Resolved) == [Resolved(key(0, 1), "lost: silent")]
    assert sent(out, m.Cancel) == [m.Cancel(run="r", inc=1, key=key())]
    out = say(s, b"1", ALIVE, 12.0)
    assert [n.event for n in of(out, Note)] == ["back"]
    assert given_to(s.begin(2, 0, "train", [spec(0)], Rules(), 12.0)) == [b"1"]
    assert s.tick(16.0) == []  # it is not away any more


def test_a_worker_whose_message_is_still_coming_is_not_silent():
    came = {b"1": 500, b"2": 500}
    s = server(bytes_read=came.get)
    ready(s, b"1", "w", [0])
    ready(s, b"2", "v", [1])
    s.begin(1, 0, "train", [spec(0), spec(1)], Rules(closed=None, silent=10.0), 0.0)
    came[b"1"] = came[b"2"] = 501  # soon after its last message
    s.tick(5.1)
    came[b"1"] = 502
    assert of(s.tick(10.1), Resolved) == [Resolved(key(1, 1), "lost: silent")]
    s.tick(15.2)
    came[b"1"] = 503
    assert of(s.tick(20.2), Resolved) == []
    s.tick(25.3)
    assert of(s.tick(30.3), Resolved) == [Resolved(key(0, 1), "lost: silent")]


def test_a_worker_that_was_silent_gets_bound_tasks_again_though_another_was_in_its_place():
    s = server()
    ready(s, b"1", "w", [0, 1])
    s.begin(1, 0, "train", [spec(0)], Rules(), 0.0)
    answer(s, b"1", 0)
    s.tick(11.0)
    ready(s, b"2", "v", [0], 11.0)
    s.tick(14.5)  # longer than `Rules.closed`, but its connection is there
    say(s, b"1", ALIVE, 15.0)
    out = s.begin(2, 0, "train", [spec(1, cost=9), spec(0, bound=True)], Rules(), 15.0)
    assert given_to(out) == [b"1"]  # the bound one waits for it


def test_a_bound_task_waits_for_its_worker_that_is_back_and_prepares():
    s = server()
    ready(s, b"1", "w", [0])
    s.begin(1, 0, "train", [spec(0)], Rules(), 0.0)
    answer(s, b"1", 0)
    s.closed(b"1", 0.0)
    ready(s, b"2", "v", [0])
    say(s, b"3", m.Join(worker="w", ids=[0]))
    assert given_to(s.begin(2, 0, "train", [spec(0, bound=True)], Rules(), 0.0)) == []
    assert given_to(say(s, b"3", READY)) == [b"3"]


@pytest.mark.parametrize(("joined_at", "absent_at"), [(None, 60.0), (50.0, 110.0)])
def test_client_that_never_joined_or_prepares_is_waited_for_but_not_for_ever(joined_at, absent_at):
    s = server()
    if joined_at is not None:
        say(s, b"0", m.Join(worker="v", ids=[0]), joined_at - 30.0)
        say(s, b"1", m.Join(worker="w", ids=[0]), joined_at)
    s.begin(1, 0, "train", [spec(0)], Rules(join=60.0, silent=None), 55.0)
    assert of(s.tick(absent_at - 0.1), Resolved) == []
    assert of(s.tick(absent_at), Resolved) == [Resolved(key(0), "absent")]


def test_client_that_is_back_and_prepares_is_not_taken_for_lost():
    s = begun(rules=Rules(closed=3.0))
    session = s.roster.workers["w"].session
    s.closed(b"1", 1.0)
    again = m.Join(run="r", inc=1, worker="w", ids=[0], session=session, holding=[key()])
    say(s, b"2", again, 3.0)
    assert s.tick(6.0) == []


def test_task_that_kills_its_workers_ends():
    s = begun(rules=Rules(closed=0.0))
    now = 0.0
    for n in range(2, 3 + DEATHS):
        s.closed(b"%d" % (n - 1), now)
        out = [*ready(s, b"%d" % n, f"w{n}", [0], now), *s.tick(now)]
        if s.tasks[0].status is TaskState.DROPPED:
            break
    why = f"failed: its worker was lost {DEATHS} times at this task"
    assert of(out, Resolved) == [Resolved(key(0, DEATHS - 1), why)]


def test_a_task_goes_to_a_worker_that_has_the_state_it_starts_from_or_its_client_fails():
    s = server()
    start = spec(0, start="1-0-0")
    ready(s, b"1", "a", [0])
    s.begin(1, 0, "train", [start], Rules(silent=None), 0.0)
    ready(s, b"2", "b", [0, 1])
    assert given_to(fails(s, b"1", now=1.0, lacks=True)) == [b"2"]
    answer(s, b"2", 0, 2.0, attempt=1)
    # From then on a is not asked for what it has not.
    s.begin(2, 0, "train", [spec(1, cost=9), start], s.rules, 3.0)
    assert s.tasks[1].worker == "b"
    assert s.tasks[0].status is TaskState.WAITING  # for b, though a is free
    s.begin(2, 1, "train", [spec(1, cost=9), spec(0)], s.rules, 3.0)
    assert s.tasks[0].worker == "a"  # which needs no state for this one
    s.begin(3, 0, "train", [start], s.rules, 4.0)
    out = say(s, b"2", m.Failed(run="r", inc=1, key=key(round=3), reason="x", lacks=True), 5.0)
    assert of(out, Resolved) == [Resolved(key(round=3), "failed: state lost: x")]
    # Where all lack it one of them is asked: it would have to wait for ever.
    assert len(given_to(s.begin(4, 0, "train", [start], s.rules, 6.0))) == 1


def test_a_worker_has_the_state_of_a_client_again_once_it_has_answered_for_it():
    s = server()
    start = spec(0, start="1-0-0")
    rules = Rules(silent=None)
    ready(s, b"1", "a", [0])
    s.begin(1, 0, "train", [start], rules, 0.0)
    fails(s, b"1", lacks=True)
    s.begin(1, 0, "train", [spec(0)], rules, 0.0)
    answer(s, b"1", 0)
    ready(s, b"2", "b", [0])
    assert given_to(s.begin(2, 0, "train", [start], rules, 0.0)) == [b"1"]


def test_who_lacks_the_model_that_training_starts_from_is_sent_it_once():
    plain = spec(0, 3, start="1-0-0")
    whole = replace(plain, body=Body([b"all"]))
    s = begun([replace(plain, with_base=lambda: whole)], rules=Rules(silent=None))
    (again,) = of(fails(s, b"1", lacks=True, base=True), Send)
    assert bytes(again.body) == b"all"
    out = fails(s, b"1", attempt=1, lacks=True, base=True)
    assert of(out, Resolved) == [Resolved(key(0, 1), "failed: x")]
    s = begun([replace(plain, with_base=lambda: whole)])
    assert of(fails(s, b"1"), Resolved) == [Resolved(key(0), "failed: x")]  # for another reason


def test_a_bound_task_that_nobody_can_do_is_lost_and_its_workers_lack_nothing_later():
    s = begun([spec(0)], rules=Rules(silent=None))
    ready(s, b"2", "idle", [0])
    answer(s, b"1", 0, 1.0)
    s.begin(1, 0, "train", [spec(0, bound=True)], s.rules, 2.0)
    assert given_to(fails(s, b"1", 0, 0, now=3.0, lacks=True)) == [
        b"2"
    ]  # an earlier server gave it the last
    assert of(fails(s, b"2", 0, 1, now=4.0, lacks=True), Resolved) == [
        Resolved(key(0, 1), "lost: x")
    ]
    assert not any(x.lacks for x in s.roster.workers.values())


@pytest.mark.parametrize("closed", [True, False])
def test_rejoin_with_fewer_clients_gives_the_others_tasks_on(closed):
    s = begun([spec(1)])
    session = s.roster.workers["w"].session
    if closed:
        s.closed(b"1", 0.0)
    held = m.Join(run="r", inc=1, worker="w", ids=[0], session=session, holding=[key(1)])
    out = say(s, b"2", held)
    assert [c.key for c in sent(out, m.Cancel)] == [key(1)]
    assert s.tasks[1].status is TaskState.WAITING
    if closed:
        out = ready(s, b"3", "v", [1], 2.9)
        assert [t.key for t in sent(out, m.Task)] == [key(1, 1)]
    else:  # it did not go away to come back
        assert of(s.tick(0.0), Resolved) == [Resolved(key(1, 1), "lost")]


def test_a_task_that_was_lost_on_its_way_is_sent_again_as_the_same_attempt():
    s = begun()
    s.closed(b"1", 0.0)
    assert [t.key for t in sent(ready(s, b"2", ids=[0], inc=1), m.Task)] == [key(0)]


def test_task_of_an_earlier_server_is_left_to_the_worker_that_holds_it():
    s = server()
    s.begin(1, 0, "train", [spec(0)], Rules(), 0.0)
    assert (
        sent(say(s, b"1", m.Join(run="r", inc=0, worker="w", ids=[0], holding=[key(0)])), m.Cancel)
        == []
    )


def test_parts_of_a_task_are_sent_once():
    size = 6 * m.PART
    body = Body([bytes(size)])
    s = begun([spec(0)])
    s.begin(2, 0, "train", [type(spec(0))(0, form(size), body, 0)], Rules(), 0.0)
    k = key(round=2)
    pull = m.Pull(run="r", inc=1, key=k, first=0, count=2)
    out = say(s, b"1", pull)
    assert [type(i) for i in out] == [Send] * 2  # of use, so none of it is stray
    assert say(s, b"1", pull) == [Stray("doubled")]
    for first, count in ((2, 3), (1 << 40, 1)):
        out = say(s, b"1", m.Pull(run="r", inc=1, key=k, first=first, count=count))
        assert out[0] == Stray("refused")
        assert sent(out, m.Part) == []
    assert len(sent(say(s, b"1", m.Pull(run="r", inc=1, key=k, first=2, count=2)), m.Part)) == 2


def test_parts_granted_to_all_together_stay_within_the_budget():
    s = forty()
    granted = [p for i in range(40) for p in sent(say(s, b"%d" % i, reply(i, 9 * m.PART)), m.Pull)]
    assert sum(p.count for p in granted) == BUDGET == 64 * 2**20 // m.PART


def test_senders_that_send_nothing_do_not_use_up_the_budget_of_the_others():
    s = forty(Rules(silent=None))
    for i in range(8):  # as many as there are grants for
        assert len(sent(say(s, b"%d" % i, reply(i, 9 * m.PART)), m.Pull)) == 1
    assert sent(say(s, b"20", reply(20, 9 * m.PART), 0.1), m.Pull) == []
    for i in range(8):  # which is not a part
        say(s, b"%d" % i, m.Progress(run="r", inc=1, client=i, stage="training"), 0.1)
    assert sent(s.tick(UNUSED_S - 0.1), m.Pull) == []
    assert [p.key.client for p in sent(s.tick(UNUSED_S), m.Pull)] == [20]
    assert len(sent(say(s, b"21", reply(21, 9 * m.PART), UNUSED_S), m.Pull)) == 1


def test_worker_that_can_do_more_at_once_says_so_and_is_given_more():
    s = server()
    ready(s, ids=range(4))
    out = s.begin(1, 0, "train", [spec(i, cost=4 - i) for i in range(4)], Rules(deadline=10.0), 0.0)
    assert [x.key.client for x in sent(out, m.Task)] == [0, 1]  # one at work, one ahead
    out = say(s, b"1", m.Slots(run="r", inc=1, slots=3), 5.0)
    assert [x.key.client for x in sent(out, m.Task)] == [2]  # the last one is not handed out ahead
    assert [s.tasks[i].running for i in range(4)] == [True, True, True, False]
    assert [(x.key.client, x.reason) for x in of(s.tick(10.0), Resolved)] == [(0, "deadline")]
    # Their turn came at 5.
    assert [(x.key.client, x.reason) for x in of(s.tick(15.0), Resolved)] == [
        (1, "deadline"),
        (2, "deadline"),
    ]
    say(s, b"1", ALIVE, 16.0)
    assert s.roster.workers["w"].slots == 3


def test_a_worker_that_is_back_with_more_slots_runs_what_lay_ready():
    s = begun([spec(i, cost=4 - i) for i in range(4)], Rules(deadline=10.0))
    assert s.roster.workers["w"].queue == [0, 1]
    session = s.roster.workers["w"].session
    holding = [key(0), key(1)]
    ready(s, b"2", ids=range(4), now=5.0, inc=1, slots=2, session=session, holding=holding)
    assert of(s.tick(14.9), Resolved) == [Resolved(key(0), "deadline")]
    assert of(s.tick(15.0), Resolved) == [Resolved(key(1), "deadline")]


def test_all_workers_hear_of_the_end():
    end = m.End(run="r", inc=1, over=False, reason="stopped")
    s = begun()
    assert sent(s.finish(False, "stopped"), m.End) == [end]
    s.tick(11.0)  # silent, but its connection is there
    assert sent(s.finish(False, "stopped"), m.End) == [end]


def test_nothing_is_kept_of_progress_that_a_worker_reports_of_clients_of_others():
    s = begun()
    for client in (0, 9):
        say(s, b"1", m.Progress(run="r", inc=1, client=client, stage="training"))
    assert list(s.roster.workers["w"].doing) == [0]


@pytest.mark.parametrize("died", ["with its task", "before its task", "silently before it"])
def test_a_bound_task_leaves_a_dead_worker_for_the_one_in_its_place(died):
    """Its connection may be away for ever, and the worker in its place is ready."""
    s = server()
    rules = Rules(closed=None, silent=10.0)
    ready(s, b"1", "first", (0,))
    s.begin(1, 0, "train", [spec(0)], rules, 1.0)
    answer(s, b"1", 0, 1.0)
    bound = [spec(0, bound=True)]
    if died == "with its task":
        assert given_to(s.begin(1, 1, "train", bound, rules, 2.0)) == [b"1"]
    if died == "silently before it":
        s.tick(13.0)
    else:
        s.closed(b"1", 3.0)
    given = ready(s, b"2", "second", (0,), 14.0)
    if died != "with its task":
        given = s.begin(1, 1, "train", bound, rules, 14.0)
    assert given_to(given) == [b"2"]


def test_a_bound_task_leaves_a_worker_that_stays_silent_for_one_that_was_ready_before():
    s = server()
    rules = Rules(closed=None, silent=10.0)
    ready(s, b"1", "first", (0,))
    s.begin(1, 0, "train", [spec(0)], rules, 0.0)
    answer(s, b"1", 0)
    ready(s, b"2", "second", (0,), 9.0)
    s.tick(11.0)
    assert given_to(s.begin(1, 1, "train", [spec(0, bound=True)], rules, 11.0)) == []
    say(s, b"2", ALIVE, 19.0)
    assert given_to(s.tick(20.9)) == []
    assert given_to(s.tick(21.0)) == [b"2"]


def test_a_worker_that_dies_after_another_was_ready_does_not_keep_its_tasks():
    s = server()
    rules = Rules(closed=None, silent=10.0)
    ready(s, b"1", "first", (0, 1, 2))
    s.begin(1, 0, "train", [spec(0), spec(1), spec(2)], rules, 1.0)
    ready(s, b"2", "second", (0,), 2.0)
    s.closed(b"1", 3.0)
    assert given_to(s.tick(12.0)) == []  # it may come back
    say(s, b"2", ALIVE, 12.0)
    assert given_to(s.tick(13.0)) == [b"2"]
    say(s, b"2", ALIVE, 99.0)
    assert not of(s.tick(100.0), Resolved)
    assert s.tasks[1].worker == "first"  # nobody else hosts client 1


def test_death_counts_for_the_task_that_was_running_not_for_what_waited_behind_it():
    s = begun([spec(0), spec(1), spec(2)], rules=Rules(closed=0.0))
    assert s.roster.workers["w"].queue == [0, 1]
    s.closed(b"1", 1.0)
    s.tick(1.0)
    assert [s.tasks[i].deaths for i in range(3)] == [1, 0, 0]


def test_no_process_is_given_more_than_it_can_be_working_on():
    s = server(200)
    ready(s, ids=range(200), slots=1024)
    out = s.begin(1, 0, "train", [spec(i) for i in range(200)], Rules(), 0.0)
    assert len(sent(out, m.Task)) == 2 * SLOTS
    assert sent(say(s, b"1", m.Slots(run="r", inc=1, slots=1024)), m.Task) == []


def test_phase_that_begins_cancels_the_one_before():
    s = begun([spec(0, 3), spec(1)])
    out = s.begin(2, 0, "train", [spec(2)], Rules(), 0.0)
    assert of(out, Resolved) == [Resolved(key(c), "the phase is over") for c in (0, 1)]
    assert sent(out, m.Cancel)[0].key == key(0)
    assert ClosePayload(b"1", "down", key(0), "the phase is over") in out


def test_part_with_the_key_of_an_evaluation_is_not_stored():
    s = begun()
    say(s, b"1", reply(size=m.PART + 1))
    assert part(s, b"1", purpose="evaluate") == [Stray("late")]


@pytest.mark.parametrize("ends", ["phase", "deadline", "closed", "refused", "accepted"])
def test_an_upload_that_ends_in_any_way_gives_its_budget_back(ends):
    rules = Rules(silent=None, deadline=1.0 if ends == "deadline" else None)
    s = forty(rules)
    for i in range(8):  # all of the budget
        say(s, b"%d" % i, reply(i, 4 * m.PART))
    assert sent(say(s, b"20", reply(20, 4 * m.PART)), m.Pull) == []
    out = []
    for i in range(8):
        if ends == "closed":
            out += s.closed(b"%d" % i, 0.0)
        elif ends == "refused":
            out += part(s, b"%d" % i, i, 3)
        elif ends == "accepted":
            for index in range(4):
                out += part(s, b"%d" % i, i, index)
            out += s.accept(key(i), 0.0)
    if ends == "phase":
        s.begin(2, 0, "train", [spec(i) for i in range(40)], rules, 0.0)
    out += s.tick(1.0)
    round = 2 if ends == "phase" else 1
    if ends == "deadline":  # of all tasks
        s.begin(2, 0, "train", [spec(i) for i in range(40)], Rules(silent=None), 1.0)
        round = 2
    first = 20 if round == 2 else 21
    for i in range(first, 40):
        out += say(s, b"%d" % i, reply(i, 4 * m.PART, key=key(i, round=round)), 1.0)
    # As much as before is granted again.
    pulls = Counter()
    for pull in sent(out, m.Pull):
        pulls[pull.key.client] += pull.count
    assert sum(pulls[i] for i in range(20, 40)) == BUDGET
    assert all(client >= 20 for client in s._granted)  # nothing is kept of those that ended


def test_one_process_cannot_host_more_clients_than_are_bounded(monkeypatch):
    monkeypatch.setattr(m, "MAX_IDS", 10)
    for clients, refused in ((10, 0), (11, 1)):
        found = say(server(clients), b"1", m.Join(worker="w", share=(1, 1)))
        reasons = [n.fields["reason"] for n in of(found, Note) if n.event == "refused"]
        assert ["at most 10" in reason for reason in reasons] == [True] * refused


def test_among_free_workers_the_least_busy_and_then_the_one_that_had_the_client_gets_a_task():
    s = server()
    ready(s, b"1", "a", range(3), slots=2)
    ready(s, b"2", "b", range(3))
    s.begin(1, 0, "train", [spec(i, cost=3 - i) for i in range(3)], Rules(), 0.0)
    assert [s.tasks[i].worker for i in range(3)] == ["a", "b", "a"]
    for conn, client in ((b"1", 0), (b"2", 1), (b"1", 2)):
        answer(s, conn, client)
    s.begin(2, 0, "train", [spec(1)], Rules(), 0.0)
    assert s.tasks[1].worker == "b"  # which has its data in memory


def test_of_a_task_only_its_worker_sends_the_reply_and_only_over_one_connection_its_parts():
    s = two_of_client_0()
    assert replies(s, b"2", 0)[0] == Stray("late")
    assert replies(s, b"1", 0, inc=0)[0] == Stray("late")
    say(s, b"1", reply(0, 3 * m.PART))
    out = part(s, b"2")
    assert out[0] == Stray("late")
    assert of(out, Store) == []


def test_a_key_that_was_revoked_since_its_join_speaks_no_more_for_that_client():
    revoked: set[int] = set()
    s = server(key_refusal=lambda user, client: "key revoked" if client in revoked else "")
    ready(s, b"0", ids=[0, 1])
    s.begin(0, 0, "train", [], Rules(closed=100.0), 0.0)
    s.closed(b"0", 0.0)
    ready(s, ids=[0, 1], slots=2)
    s.begin(1, 0, "train", [spec(0), spec(1)], Rules(), 0.0)
    revoked.add(0)
    out = replies(s, b"1", 0)
    assert "may not speak for client 0 any more" in refusal(out)
    assert of(out, Arrived) == []
    assert s.tasks[0].status is TaskState.WAITING
    assert len(of(replies(s, b"1", 1, 2.0), Arrived)) == 1
    assert of(s.tick(2.0), Resolved) == [Resolved(key(0, 1), "lost: key revoked")]  # at once
    away, here = sorted(s.roster.sites(2, 0.0), key=lambda row: row["connected"])
    assert (away["clients"], away["why"], away["seen"]) == ([0], "key revoked", 0.0)
    assert (here["clients"], here["why"], here["seen"]) == ([1], "", 2.0)


def test_parts_of_senders_that_are_slow_count_in_the_budget():
    s = forty(Rules(silent=None))
    for i in range(40):
        say(s, b"%d" % i, reply(i, 9 * m.PART), 0.1)
    for i in range(8):
        part(s, b"%d" % i, i, now=1.5)
    s.tick(0.1 + UNUSED_S)
    first = [s.tasks[i].up.ahead for i in range(8)]
    assert first == [1] * 8
    # What was granted to the others at second 1.5 is theirs for as long.
    assert sum(s.tasks[i].up.ahead for i in range(8, 40)) <= 2 * (BUDGET - sum(first))


def test_a_worker_that_is_gone_makes_room_for_another_unless_a_task_waits_for_it():
    s = server(2)
    s.roster.limit = 2
    ready(s, b"0", "here", [1])
    ready(s, b"1", "w", [0])
    s.begin(1, 0, "train", [spec(0)], Rules(closed=None, silent=None), 0.0)
    s.closed(b"1", 0.0)
    other = m.Join(worker="x", ids=[1])
    (refuse,) = sent(say(s, b"2", other))
    assert (refuse.final, refuse.reason) == (False, "join: 2 workers are connected already.")
    s.cancel("over", 0.0)
    assert sent(say(s, b"3", other), m.Welcome)
    assert list(s.roster.workers) == ["here", "x"]


def test_of_a_task_only_its_worker_pulls_and_fails_it_and_nobody_once_it_is_answered():
    s = server()
    ready(s, b"1", "a", [0])
    s.begin(1, 0, "train", [spec(0, 3 * m.PART)], Rules(), 0.0)
    ready(s, b"2", "b", [0])
    pull = m.Pull(run="r", inc=1, key=key(), first=0, count=1)
    late = Stray("late")
    assert (say(s, b"2", pull)[0], fails(s, b"2")[0]) == (late, late)
    assert len(sent(say(s, b"1", pull), m.Part)) == 1
    replies(s, b"1", 0)
    for _ in range(2):  # before it is accepted and after
        assert (say(s, b"1", replace(pull, first=1))[0], fails(s, b"1")[0]) == (late, late)
        s.accept(key(), 0.0)


def test_a_worker_that_was_silent_before_it_was_ready_is_not_ready_when_it_is_heard_again():
    s = server()
    ready(s, b"0")
    s.closed(b"0", 0.0)  # and what it was ready for has gone with that connection
    say(s, b"1", m.Join(worker="w", ids=[0]))
    s.tick(11.0)
    say(s, b"1", ALIVE, 12.0)
    assert s.roster.present() == frozenset()
    assert given_to(s.begin(1, 0, "train", [spec(0)], Rules(), 12.0)) == []
    assert given_to(say(s, b"1", READY, 13.0)) == [b"1"]


def test_a_worker_that_is_back_with_more_clients_is_given_their_tasks_as_it_answers():
    s = server()
    ready(s, b"1", "w", [0, 1])
    s.begin(1, 0, "train", [spec(i, cost=4 - i) for i in range(4)], Rules(), 0.0)
    session = s.roster.workers["w"].session
    answer(s, b"1", 0)
    s.closed(b"1", 0.0)
    ready(s, b"2", "w", range(4), inc=1, session=session, holding=[key(1)])
    assert s.roster.workers["w"].queue == [1, 2]
    out = answer(s, b"2", 1)
    out += replies(s, b"2", 2)
    assert [t.key.client for t in sent(out, m.Task)] == [3]


# -- tasks of several rounds at a time -------------------------------------------------------------
def test_more_tasks_go_out_under_their_own_round_beside_those_under_way():
    s = server()
    ready(s, ids=range(4), slots=4)
    s.begin(1, 0, "train", [spec(0, round=1), spec(1, round=1)], Rules(), 0.0)
    answer(s, b"1", 0)
    out = s.add(2, [spec(0, round=2), spec(2, round=2)], 1.0)
    assert [t.key for t in sent(out, m.Task)] == [key(0, round=2), key(2, round=2)]
    assert sent(out, m.Cancel) == []
    assert {t.spec.client for t in s.open_tasks()} == {0, 1, 2}
    # A reply to a task after which its client has another is stray; one of an earlier round counts.
    out = replies(s, b"1", 0, 2.0)
    assert isinstance(out[0], Stray)
    assert of(out, Resolved) == []
    assert of(answer(s, b"1", 1, 2.0), Resolved) == [Resolved(key(1))]
    # A server that takes up such a run hands out tasks of several rounds.
    out = s.begin(3, 0, "train", [spec(0, round=2), spec(1, round=3)], Rules(), 3.0)
    assert [t.key for t in sent(out, m.Task)] == [key(0, round=2), key(1, round=3)]


def whys(s: ServerProtocol) -> dict[str, str]:
    """Why clients are not there, as the run's status shows it."""
    return {str(row["clients"]): row["why"] for row in s.roster.sites(s.clients, 0.0)}


def test_a_client_whose_key_expired_before_this_server_began_is_absent_for_that_reason():
    keys = {0: "", 1: "key expired", 2: "no key is allowed"}
    s = server(3, no_key=lambda client: keys[client])
    assert whys(s) == {"[0]": "has not connected", "[1]": "key expired", "[2]": "no key is allowed"}
    s.begin(1, 0, "train", [spec(1)], Rules(join=5.0), 0.0)
    (dropped,) = of(s.tick(5.0), Resolved)
    assert dropped.reason == "absent: key expired"
    keys[1] = ""  # allowed again
    ready(s, ids=(1,), now=6.0)
    assert whys(s)["[1]"] == ""
    s.closed(b"1", 7.0)
    assert whys(s)["[1]"] == "connection closed"
    keys[1] = "key expired"  # while it was away
    assert whys(s)["[1]"] == "key expired"


def test_a_site_asks_what_the_server_knows_of_its_clients_and_hosts_nobody_by_that():
    s = server(4, no_key={0: "", 1: "", 2: "key expired", 3: ""}.__getitem__)
    ready(s, ids=(0,))
    before = whys(s)
    out = say(s, b"2", m.Join(worker="v", ids=[0, 1, 2], status=True))
    (answer,) = sent(out)
    assert answer.text == (
        "before the first round; client(s) 0: connected; client(s) 1: has not connected; "
        "client(s) 2: key expired"
    )
    assert not of(out, Note)
    assert not of(s.closed(b"2", 1.0), Note)
    assert whys(s) == before
    s.begin(1, 0, "train", [spec(0)], Rules(), 1.0)
    (answer,) = sent(say(s, b"3", m.Join(worker="u", ids=[0], status=True)))
    assert answer.text == (
        "round 1 (training); client(s) 0: connected, was asked for client 0 in round 1"
    )


def test_a_site_that_asks_a_resumed_server_is_told_which_round_is_over():
    s = server(1, round=3)
    join = m.Join(worker="v", ids=[0], status=True)
    (answer,) = sent(say(s, b"1", join))
    assert answer.text == "after round 3; client(s) 0: has not connected"
    s.begin(4, 0, "evaluate", [spec(0)], Rules(), 1.0)
    (answer,) = sent(say(s, b"2", join))
    assert answer.text == "round 4 (evaluation); client(s) 0: has not connected"


def test_sites_have_the_names_that_their_keys_have():
    s = server(4, site_name={0: "uke", 1: "uke", 2: "charite", 3: ""}.__getitem__)
    out = ready(s, ids=(0, 1))
    assert {note.fields["site"] for note in of(out, Note)} == {"uke"}
    rows = s.roster.sites(4, 0.0)
    shown = {str(row["clients"]): (row["connected"], row["site"]) for row in rows}
    assert shown == {"[(0, 1)]": (True, "uke"), "[2]": (False, "charite"), "[3]": (False, "")}
    (away,) = of(s.closed(b"1", 1.0), Note)
    assert away.fields["site"] == "uke"
    ready(s, b"2", "v", ids=(1, 2, 3), now=2.0)
    assert s.roster.workers["v"].site == "uke, charite"


def test_a_process_that_only_asks_what_leaves_its_site_gets_the_configuration_and_hosts_nobody():
    s = server(2)
    before = whys(s)
    out = say(s, b"1", m.Join(worker="w", ids=[1], host="a", explain=True))
    (welcome,) = sent(out)
    assert isinstance(welcome, m.Welcome)
    assert welcome.ids == [1]
    assert [note.event for note in of(out, Note)] == ["explained"]
    out = say(s, b"1", ALIVE)  # while it builds the model
    assert sent(out) == [ALIVE]
    assert not of(s.closed(b"1", 1.0), Note)
    assert whys(s) == before
    out = say(s, b"2", m.Join(worker="v", ids=[7], host="a", explain=True))
    assert [type(message) for message in sent(out)] == [m.Refuse]
    assert whys(s) == before

"""The server's protocol with planned faults around it: what goes out with the tasks, and what comes
of one whose reply is lost.
"""

from __future__ import annotations

import pytest

from fednet.errors import RemoteProtocolError
from fednet.protocol.instructions import ClosePayload, Note, Resolved, Store
from fednet.protocol.server import BUDGET
from fednet.protocol.tasks import Rules
from fednet.protocol.transfers import WINDOW
from fednet.server.faulty_protocol import FaultyServerProtocol, FaultySpec
from fednet.wire import messages as m
from fednet.wire.body import Body
from tests.protocol.net import form
from tests.protocol.test_server import fails, key, of, part, ready, reply, say, sent

PART = 8


def server(clients: int = 4, **options) -> FaultyServerProtocol:
    def welcome(ids: list[int], session: str) -> m.Welcome:
        return m.Welcome(run="r", inc=1, ids=ids, session=session, name="n", config="c", beat_s=1.0)

    return FaultyServerProtocol("r", 1, clients, welcome, 0.0, layout="L", part=PART, **options)


def spec(client: int, *kinds: str, lost: str = "", amount: float = 0.5, **more) -> FaultySpec:
    body = Body([bytes(5)])
    faults = [m.Fault(kind, 0.5) for kind in kinds]
    if lost:
        faults.append(m.Fault(lost, amount))
    return FaultySpec(client, form(5), body, body.digest(), faults=faults, lost=lost, **more)


def begun(*specs: FaultySpec, **rules) -> FaultyServerProtocol:
    s = server()
    ready(s, ids=range(4))
    s.begin(1, 0, "train", specs, Rules(**{"closed": 3.0, **rules}), 0.0)
    return s


def ends(instructions) -> list:
    return of(instructions, Resolved)


def refusals(instructions) -> list:
    return [n.fields["what"] for n in of(instructions, Note) if n.event == "refused"]


def test_planned_faults_are_sent_with_the_first_hand_out_and_a_devices_pace_with_each():
    s = server()
    ready(s)
    planned = spec(0, "delay", pace=(m.Fault("pace", 2.0),))
    out = s.begin(1, 0, "train", [planned], Rules(), 0.0)
    out += fails(s, b"1", again=True)
    kinds = [[f.kind for f in t.faults] for t in sent(out, m.Task)]
    assert kinds == [["delay", "pace"], ["pace"]]
    assert [n.fields["kind"] for n in of(out, Note) if n.event == "fault"] == ["delay"]


def test_each_task_of_a_client_has_the_faults_that_are_planned_for_it():
    s = begun(spec(0, "delay"))
    out = s.begin(2, 0, "train", [spec(0, "slow")], Rules(), 1.0)
    assert [[f.kind for f in t.faults] for t in sent(out, m.Task)] == [["slow"]]


def test_a_site_that_falls_silent_by_plan_is_waited_for_from_its_last_report():
    s = begun(spec(0, lost="crash"), closed=10.0, silent=None)
    assert ends(s.tick(9.0)) == []
    say(s, b"1", m.Progress(run="r", inc=1, client=0, stage="training", step=1, steps=9), 9.0)
    assert ends(s.tick(18.0)) == []
    assert ends(s.tick(19.0)) == [Resolved(key(0), "lost: crash")]


def test_a_task_that_is_lost_by_plan_behind_another_is_waited_for_once_it_is_first():
    s = begun(spec(0, lost="crash", cost=9), spec(1, lost="crash"), spec(2))
    say(s, b"1", m.Progress(run="r", inc=1, client=0, stage="training"), 2.0)
    assert ends(s.tick(4.9)) == []
    assert ends(s.tick(5.0)) == [Resolved(key(0), "lost: crash")]
    assert ends(s.tick(7.9)) == []
    assert ends(s.tick(8.0)) == [Resolved(key(1), "lost: crash")]


@pytest.mark.parametrize("how", ["failed", "came back without it", "left"])
def test_a_task_whose_reply_is_lost_by_plan_is_handed_out_once(how):
    s = begun(spec(0, lost="crash"))
    if how == "failed":
        out = fails(s, b"1", again=True)
    elif how == "left":
        out = say(s, b"1", m.Leave(run="r", inc=1))
    else:
        s.closed(b"1", 1.0)
        session = s.roster.workers["w"].session
        out = say(s, b"2", m.Join(worker="w", ids=[0, 1, 2, 3], session=session), 1.5)
    assert ends(out) == [Resolved(key(0), "lost: crash")]
    assert sent(out, m.Task) == []


def test_a_planned_cut_ends_behind_a_task_that_was_dropped_without_a_word():
    silent = "drop_before_sending"
    cut = "drop_during_upload"
    s = begun(spec(0, lost=silent, cost=9), spec(1, lost=cut, cost=8), spec(2), spec(3))
    # The worker forgot the first, which is at the head of its queue as far as the server knows.
    assert s.roster.workers["w"].queue == [0, 1]
    out = say(s, b"1", reply(1, size=4), 2.0, Body([b"ab"]))
    assert sent(out, m.Pull) == []
    assert s.roster.workers["w"].queue == [0, 2]  # it is free for the next one
    assert ends(s.tick(3.0)) == [Resolved(key(0), f"lost: {silent}")]
    assert ends(s.tick(4.9)) == []
    out = s.tick(5.0)
    assert ends(out) == [Resolved(key(1), f"lost: {cut}")]
    assert [i.direction for i in of(out, ClosePayload)] == [
        "up",
        "down",
    ]  # what came is in the books


def test_of_an_upload_in_parts_nothing_is_asked_for_after_the_one_in_which_it_is_cut():
    s = begun(spec(0, lost="drop_during_upload"), spec(1))
    size = 2 * (PART + 3)  # cut after a part and three bytes
    assert sent(say(s, b"1", reply(0, size=size)), m.Pull)
    assert of(part(s, b"1", data=bytes(PART)), Store)
    out = part(s, b"1", index=1, data=bytes(3), now=2.0)
    assert sent(out, m.Pull) == []
    assert ends(s.tick(4.9)) == []
    out = s.tick(5.0)
    assert ends(out) == [Resolved(key(0), "lost: drop_during_upload")]
    assert sent(out, m.Cancel) == [m.Cancel(run="r", inc=1, key=key(0))]


def test_an_upload_that_is_cut_leaves_its_share_of_the_parts_that_are_asked_for_to_others():
    most = BUDGET // WINDOW  # uploads that are granted a window
    s = server(most + 1)
    for i in range(most + 1):
        ready(s, b"%d" % i, f"w{i}", [i])
    cut = most - 1
    specs = [spec(i) for i in range(most + 1)]
    specs[cut] = spec(cut, lost="drop_during_upload", amount=0.005)
    s.begin(1, 0, "train", specs, Rules(), 0.0)
    out = []
    for i in range(most + 1):
        out += say(s, b"%d" % i, reply(i, size=100 * PART))
    assert [pull.key.client for pull in sent(out, m.Pull)] == list(range(most))
    out = part(s, b"%d" % cut, cut, data=bytes(4))
    assert [pull.key.client for pull in sent(out, m.Pull)] == [most]


def test_after_the_part_in_which_an_upload_is_cut_no_other_is_taken():
    s = begun(spec(0, lost="drop_during_upload"))
    say(s, b"1", reply(0, size=4 * PART))
    part(s, b"1", data=bytes(PART))
    part(s, b"1", index=1, data=bytes(PART))  # it is cut after this one
    assert refusals(part(s, b"1", index=2, data=bytes(PART))) == ["reply"]


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("came", [1, 3])
def test_an_upload_that_is_short_elsewhere_than_at_its_cut_is_refused(small, came):
    s = begun(spec(0, lost="drop_during_upload"))
    if small:
        out = say(s, b"1", reply(0, size=4), body=Body([bytes(came)]))
    else:
        say(s, b"1", reply(0, size=4 * PART + 4))  # cut after two parts and two bytes
        for index in range(2):
            part(s, b"1", index=index, data=bytes(PART))
        out = part(s, b"1", index=2, data=bytes(came))
    assert refusals(out) == ["reply"]
    assert ends(out) == [Resolved(key(0), "lost: drop_during_upload")]


@pytest.mark.parametrize("wrong", [form(5), form(4, "delta")])
def test_a_cut_reply_that_is_not_as_declared_is_refused(wrong):
    def declared(key, form, evaluates):
        if form[0].kind != "state":
            raise RemoteProtocolError("not declared")

    s = server(declared=declared)
    ready(s)
    s.begin(1, 0, "train", [spec(0, lost="drop_during_upload")], Rules(), 0.0)
    out = say(s, b"1", reply(0, size=4, form=wrong), body=Body([b"ab"]))
    assert refusals(out) == ["reply"]
    assert ends(s.tick(3.0)) == [Resolved(key(0), "lost: drop_during_upload")]

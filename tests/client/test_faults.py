"""What a planned fault does to the work of a task and to what is sent of its reply."""

from __future__ import annotations

import math
import time

import pytest

from fednet.client.faults import CutUploads, PlannedFaults, Silenced
from fednet.client.stages import Stages
from fednet.protocol import client as p
from fednet.protocol.table import ClientTaskState
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body

KEY = m.Key(1, 0, 0, 0)
PART = 8
WELCOME = m.Welcome(run="r", inc=1, session="s", name="n", config="c", ids=[0], beat_s=1.0)


class Crashed(Exception):
    pass


def crash():
    raise Crashed


def trained(steps, body=b"abcd"):
    """A worker that trains so many steps, and what it was heard to do."""
    heard = []

    def work(stages):
        for done in range(1, steps + 1):
            heard.append(done)
            stages.trained(done, steps)
        heard.append("replied")
        reply = m.Reply(key=KEY, form=[], size=len(body), check=Body([body]).digest())
        return reply, Body([body])

    return work, heard


def stages() -> Stages:
    """Of a task that is wanted all the time."""
    given = p.DoTask(m.Task(key=KEY, form=[], size=0), NOTHING)
    return Stages(given, {KEY: given}, {})


def test_without_a_planned_fault_the_work_is_as_it_was():
    work, _ = trained(2)
    assert PlannedFaults().around(work, crash) is work
    assert PlannedFaults().apply_to([p.Send(m.Alive())]) == [p.Send(m.Alive())]


def test_a_client_that_is_dropped_before_training_does_nothing():
    work, heard = trained(2)
    with pytest.raises(Silenced):
        PlannedFaults({"drop_before_training": 0.0}).around(work, crash)(stages())
    assert heard == []


@pytest.mark.parametrize(("steps", "taken"), [(4, 2), (5, 3), (0, 0)])
def test_a_client_crashes_in_the_middle_of_its_training_or_after_one_without_steps(steps, taken):
    work, heard = trained(steps)
    with pytest.raises(Crashed):
        PlannedFaults({"crash": 1.0}).around(work, crash)(stages())
    assert heard == ([*range(1, taken + 1)] if steps else ["replied"])


def test_a_reply_is_corrupted_in_one_byte_after_its_digest_was_taken():
    work, _ = trained(0)
    reply, body = PlannedFaults({"corrupt": 0.0}).around(work, crash)(stages())
    assert bytes(body) == b"ab\x9cd"
    assert reply.check == Body([b"abcd"]).digest()


def test_a_slow_client_takes_so_many_times_as_long_and_a_delay_comes_on_top(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 12.0)
    assert PlannedFaults({"slow": 3.0, "delay": 5.0}).due(10.0) == 10.0 + 3 * 2 + 5
    assert PlannedFaults({"pace": 7.0}).due(10.0) == 10.0 + 7  # of its device, which is slower


def test_a_reply_is_doubled_and_nothing_else_that_is_sent_with_it():
    reply = p.Send(m.Reply(key=KEY, form=[], size=0))
    part = p.Send(m.Part(key=KEY, index=0))
    assert PlannedFaults({"duplicate": 0.0}).apply_to([reply, part]) == [reply, part, reply]
    assert PlannedFaults({"disconnect": 0.0}).after() == [p.Reconnect()]


def test_a_cut_is_at_the_byte_and_loses_one_at_least():
    def ends(size, *shares):
        return [PlannedFaults({"drop_during_upload": share}).cut(size) for share in shares]

    assert ends(10, 0.0, 0.55, 0.9, 1.0) == [0, 5, 9, 9]
    assert ends(0, 0.9) + ends(1, 0.9) + ends(2, 0.9) == [0, 0, 1]
    assert PlannedFaults().cut(10) is None


@pytest.mark.parametrize(("size", "silent"), [(0, True), (1, False)])
def test_of_a_cut_reply_without_a_payload_nothing_is_sent(size, silent):
    cut = PlannedFaults({"drop_during_upload": 0.5})
    assert cut.silent(m.Reply(key=KEY, form=[], size=size)) == silent


def with_task(part: int = PART) -> p.ClientProtocol:
    """A process that works on the task KEY."""
    c = p.ClientProtocol(m.Join(worker="w", ids=[0]), part=part)
    c.opened(0.0)
    c.received(WELCOME, None, 0.0)
    c.ready("L")
    c.received(m.Task(run="r", inc=1, key=KEY, form=[], size=0), None, 0.0)
    return c


def replied(c: p.ClientProtocol, size: int) -> list[p.Instruction]:
    form = [m.Field("x", "delta", size, size)]
    reply = m.Reply(key=KEY, form=form, size=size)
    return c.finish([(reply, Body([bytes(size)]))])


def passed(cuts: CutUploads, instructions: list[p.Instruction]) -> list[int | p.ClosePayload]:
    """The bytes of each payload that is sent, and what is booked."""
    found = []
    for i in cuts.apply_to(instructions):
        if isinstance(i, p.Send) and i.body is not None:
            found.append(len(i.body))
        elif isinstance(i, p.ClosePayload):
            found.append(i)
    return found


@pytest.mark.parametrize("end", [0, 5])
@pytest.mark.parametrize("handed_over", [False, True])
def test_a_small_upload_is_sent_up_to_its_end_and_once(end, handed_over):
    """Also one that is handed over within this process."""
    c = with_task()
    cuts = CutUploads(c)
    cuts.plan(KEY, end)
    out, booked = replied(c, PART)
    if handed_over:
        out = p.Send(out.message, Body([bytes(PART)]))
    assert passed(cuts, [out, booked, out]) == [end, p.ClosePayload("up", KEY, False)]
    assert passed(cuts, [out]) == [PART]  # nothing is kept of what is over


@pytest.mark.parametrize(
    ("end", "sent"),
    [(0, []), (PART, [PART]), (PART + 3, [PART, 3]), (3 * PART - 1, [PART, PART, PART - 1])],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_an_upload_in_parts_is_sent_up_to_its_end_and_its_task_is_over(end, sent, at_once):
    """As soon as the server has asked for the part with its end, or for more."""
    c = with_task()
    cuts = CutUploads(c)
    cuts.plan(KEY, end)
    assert passed(cuts, replied(c, 3 * PART)) == []
    found = []
    most = m.WINDOW if at_once else 1
    for first in range(0, max(1, math.ceil(end / PART)), most):
        pull = m.Pull(run="r", inc=1, key=KEY, first=first, count=min(most, 3 - first))
        found += passed(cuts, c.received(pull, None, 0.0))
    assert found == [*sent, p.ClosePayload("up", KEY, False)]
    assert c.task_state(KEY) is ClientTaskState.GONE


def test_an_upload_that_begins_again_over_another_connection_ends_at_the_same_byte():
    c = with_task()
    cuts = CutUploads(c)
    cuts.plan(KEY, PART + 3)
    replied(c, 2 * PART)
    c.received(m.Pull(run="r", inc=1, key=KEY, first=0, count=1), None, 0.0)
    assert passed(cuts, c.closed()) == [p.ClosePayload("up", KEY, False)]
    c.opened(2.0)
    c.received(WELCOME, None, 2.0)
    pull = m.Pull(run="r", inc=1, key=KEY, first=0, count=2)
    assert passed(cuts, c.received(pull, None, 2.0)) == [PART, 3, p.ClosePayload("up", KEY, False)]

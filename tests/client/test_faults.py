"""What a planned fault does to the work of a task and to what is sent of its reply."""

from __future__ import annotations

import time

import pytest

from fednet.client.faults import PlannedFaults, Silenced
from fednet.client.worker import EncodedReply
from fednet.protocol import client as p
from fednet.wire import messages as m
from fednet.wire.codec import Body

KEY = m.Key(1, 0, 0, 0)


class Crashed(Exception):
    pass


def crash():
    raise Crashed


def trained(steps, body=b"abcd"):
    """A worker that trains so many steps, and what it was heard to do."""
    heard = []

    def work(step):
        for done in range(1, steps + 1):
            step("training", done, steps)
        heard.append("replied")
        return EncodedReply(
            m.Reply(key=KEY, form=[], size=len(body), check=Body([body]).check()), Body([body])
        )

    return work, heard


def test_without_a_planned_fault_the_work_is_as_it_was():
    work, _ = trained(2)
    assert PlannedFaults().around(work, crash) is work
    assert PlannedFaults().due(0.0) == 0.0
    assert PlannedFaults().apply_to([p.Out(m.Alive())]) == [p.Out(m.Alive())]


def test_a_client_that_is_dropped_before_training_does_nothing():
    work, heard = trained(2)
    with pytest.raises(Silenced):
        PlannedFaults({"drop_before_training": 0.0}).around(work, crash)(lambda *stage: None)
    assert heard == []


@pytest.mark.parametrize(("steps", "taken"), [(4, 2), (5, 3), (0, 0)])
def test_a_client_crashes_in_the_middle_of_its_training_or_after_one_without_steps(steps, taken):
    work, heard = trained(steps)
    seen = []
    with pytest.raises(Crashed):
        PlannedFaults({"crash": 1.0}).around(work, crash)(lambda *stage: seen.append(stage))
    assert [done for _, done, _ in seen] == list(range(1, taken + 1))
    assert heard == ([] if steps else ["replied"])


def test_a_reply_is_corrupted_in_one_byte_after_its_digest_was_taken():
    work, _ = trained(0)
    reply = PlannedFaults({"corrupt": 0.0}).around(work, crash)(lambda *stage: None)
    assert bytes(reply.body.whole()) == b"ab\x9cd"
    assert reply.reply.check == Body([b"abcd"]).check()


def test_a_slow_client_takes_so_many_times_as_long_and_a_delay_comes_on_top(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 12.0)
    assert PlannedFaults({"slow": 3.0, "delay": 5.0}).due(10.0) == 10.0 + 3 * 2 + 5
    assert PlannedFaults({"pace": 7.0}).due(10.0) == 10.0 + 7  # of its device, which is slower


def test_a_reply_is_doubled_and_nothing_else_that_is_sent_with_it():
    reply, part = p.Out(m.Reply(key=KEY, form=[], size=0)), p.Out(m.Part(key=KEY, index=0))
    assert PlannedFaults({"duplicate": 0.0}).apply_to([reply, part]) == [reply, part, reply]
    assert PlannedFaults({"disconnect": 0.0}).after() == [p.Reconnect()]

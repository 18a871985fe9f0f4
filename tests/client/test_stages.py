"""What a task says of itself as it goes on, and when it ends before its end."""

from __future__ import annotations

import math
import time

import pytest

from fednet.client.stages import Stages, TaskCancelled
from fednet.protocol.client import DoTask
from fednet.wire import messages as m
from fednet.wire.body import NOTHING

KEY = m.Key(3, 0, 0, 7)


@pytest.fixture
def begun(monkeypatch):
    """A task of client 7 at second 10, what is wanted, what is done, and its clock."""
    clock = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    given = DoTask(m.Task(key=KEY, form=[], size=0), NOTHING)
    wanted = {KEY: given}
    doing: dict[int, tuple[str, int, int]] = {}
    return Stages(given, wanted, doing), wanted, doing, clock


def test_the_seconds_of_each_stage_are_added_up_and_those_of_a_step_are_the_least_mean(begun):
    stages, _, doing, clock = begun
    assert doing == {7: ("loading", 0, 0)}
    assert stages.step_s == math.inf
    for now, stage in [
        (11.0, "training"),
        (17.0, "evaluating"),
        (18.5, "training"),
        (19.0, "over"),
    ]:
        clock[0] = now
        stages.enter(stage)
        assert doing == {7: (stage, 0, 0)}
        if stage == "training" and now == 11.0:
            clock[0] = 14.0
            stages.trained(1, 2)  # 3 s for the first
            assert doing == {7: ("training", 1, 2)}
            clock[0] = 15.0
            stages.trained(2, 2)  # 4 s for both
    assert stages.step_s == 2.0
    assert stages.seconds == {"loading": 1.0, "training": 6.5, "evaluating": 1.5}


@pytest.mark.parametrize("instead", [{}, {KEY: DoTask(m.Task(key=KEY, form=[], size=0), NOTHING)}])
def test_a_task_that_is_wanted_no_more_ends_at_its_next_step_or_stage(begun, instead):
    stages, wanted, _, _ = begun
    stages.enter("training")
    stages.trained(1, 2)
    wanted.clear()
    wanted.update(instead)  # the same task was sent again: it is another one
    for act in (lambda: stages.trained(2, 2), lambda: stages.enter("encoding")):
        with pytest.raises(TaskCancelled, match="task of client 7 in round 3"):
            act()

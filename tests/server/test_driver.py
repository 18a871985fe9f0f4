"""The order of a run's steps, and where its events come from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from fednet.protocol.instructions import Resolved
from fednet.protocol.tasks import TaskSpec
from fednet.server.driver import drive
from fednet.server.schedule import Cohort
from fednet.server.sources import AskedClient, RealTime, ScheduleEvent, SimulatedTime
from fednet.wire.messages import Key


@dataclass
class Told:
    """An engine of rounds with so many exchanges each, which says what it was told."""

    rounds: int
    exchanges: int = 1
    early: bool = False
    said: list[str] = field(default_factory=list)
    recorded: int = 0
    number: int = 0

    def has_next_round(self):
        return self.recorded < self.rounds

    def open(self, after):
        assert after is None or after.number == self.number
        self.number += 1
        self.said.append(f"open {self.number}")
        self.left = self.exchanges
        self._begin()

    def _begin(self):
        self.schedule = Cohort((0, 1))
        clients = iter((1, 0))
        self.source = SimpleNamespace(next=lambda wakeup: ScheduleEvent(1.0, next(clients)))

    def take_event(self, event):
        self.said.append(f"take {event.client}")
        self.schedule.take_event(*event)

    def close(self):
        self.said.append("close")
        self.left -= 1
        if self.left:
            self._begin()
            return None
        return SimpleNamespace(number=self.number)

    def admit(self, round):
        pass

    def may_open_early(self, round):
        return self.early and round.number < self.rounds

    def conclude(self, round):
        self.said.append(f"conclude {round.number}")
        self.recorded = round.number

    def end(self):
        self.said.append("end")


ROUND = ["take 1", "take 0", "close"]


def test_a_round_is_concluded_before_the_next_one_opens():
    engine = Told(rounds=2)
    drive(engine)
    one = ["open 1", *ROUND, "conclude 1"]
    two = ["open 2", *ROUND, "conclude 2"]
    assert engine.said == [*one, *two, "end"]


def test_where_it_may_the_next_round_opens_before_this_one_is_concluded():
    engine = Told(rounds=2, early=True)
    drive(engine)
    one = ["open 1", *ROUND, "open 2", "conclude 1"]
    two = [*ROUND, "conclude 2"]
    assert engine.said == [*one, *two, "end"]


def test_all_exchanges_of_a_round_are_taken_before_it_is_concluded():
    engine = Told(rounds=1, exchanges=3)
    drive(engine)
    assert engine.said == ["open 1", *ROUND * 3, "conclude 1", "end"]


def test_a_run_whose_rounds_are_done_only_ends():
    engine = Told(rounds=0)
    drive(engine)
    assert engine.said == ["end"]


# -- sources ---------------------------------------------------------------------------------------
class Box:
    """The outcomes that come, and those that were of no use."""

    def __init__(self, *outcomes):
        self.outcomes = deque(outcomes)
        self.of_no_use = []
        self.discard = self.of_no_use.append
        self.watch = SimpleNamespace(check=lambda: None)

    def wait(self, timeout_s):
        return self.outcomes.popleft() if self.outcomes else None


def outcome(client, reason="lost", round=3, phase=0, purpose="train"):
    return Resolved(Key(round, phase, 0, client, purpose), reason)


def real(box, clients=3, **more):
    tasks = {client: AskedClient(TaskSpec(client, round=3)) for client in range(clients)}
    return RealTime(box, tasks, 0.0, **more)


def test_an_outcome_of_another_exchange_or_of_a_task_that_is_over_is_no_event():
    wrong = [outcome(0, round=2), outcome(0, phase=1), outcome(0, purpose="evaluate"), outcome(9)]
    box = Box(*wrong, outcome(1, "left"), outcome(1, "again"), outcome(2))
    source = real(box)
    found = [source.next(math.inf)[1:] for _ in range(2)]
    assert found == [(1, "left"), (2, "lost")]
    assert box.of_no_use == [*wrong, outcome(1, "again")]


def test_tasks_that_were_over_before_they_went_out_are_the_first_events():
    source = real(Box(outcome(0)))
    source.tasks[2].reason = "away"
    source.expect(range(3))
    assert [source.next(math.inf)[1:] for _ in range(2)] == [(2, "away"), (0, "lost")]


def test_a_client_that_is_asked_again_has_no_event_yet():
    source = real(Box(outcome(0, "state lost"), outcome(1)), again=lambda client: client == 0)
    assert source.next(math.inf)[1:] == (1, "lost")


def test_a_schedule_is_woken_at_its_second_where_nothing_ends_before():
    source = real(Box())
    second = source.now() + 0.01
    at, client, reason = source.next(second)
    assert (client, reason) == (None, "")
    assert at >= second


def test_an_event_has_the_second_in_which_its_outcome_came(monkeypatch):
    second = 0.0
    monkeypatch.setattr("fednet.server.sources.time.monotonic", lambda: second)
    box = Box()

    def wait(timeout_s):
        nonlocal second
        second = 3.0
        return outcome(1)

    box.wait = wait
    assert real(box).next(math.inf) == (3.0, 1, "lost")


@pytest.mark.parametrize("arrivals", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_in_simulated_time_events_come_in_the_order_of_the_clock(arrivals):
    ends = {0: (5.0, "late"), 1: (2.0, "gone"), 2: (5.0, "")}
    source = SimulatedTime(
        real(Box(*[outcome(client) for client in arrivals])),
        lambda client, up: (1.0, "") if up is None else ends[client],
    )
    source.expect(range(3))
    assert source.next(0.5) == (0.5, None, "")
    found = [source.next(math.inf) for _ in range(3)]
    assert found == [(2.0, 1, "gone"), (5.0, 0, "late"), (5.0, 2, "")]

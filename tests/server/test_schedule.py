"""Who is given a task when, and what makes an update: events in, instructions out."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.server.schedule import Buffer, Period
from fednet.server.sources import Order

UPDATE = ([], True)
NOTHING = ([], False)


def schedule(clients=5, at_once=3, buffer=2, every=None, **more):
    if every is not None:
        return Period(0, at_once, lambda round: range(clients), every=every, **more)
    return Buffer(buffer, at_once, lambda round: range(clients), **more)


def step(s, at, client=None, lost=False):
    """Who is asked at an event, and whether the update can be made."""
    return s.take_event(at, client, "lost" if lost else ""), s.closed


def gives(*clients):
    return [*clients], False


def begins(s):
    s.next_round()
    return step(s, s.at)


def test_a_free_client_is_asked_as_soon_as_another_replied():
    s = schedule()
    assert step(s, 0.0) == gives(0, 1, 2)
    assert step(s, 0.5, 1) == gives(3)
    assert step(s, 0.7, 0) == UPDATE
    assert list(s.came.items()) == [(1, 1), (0, 1)]  # in the order in which they came
    assert begins(s) == gives(0)  # 2 and 3 still train
    assert s.training == {2: 1, 3: 1, 0: 2}


def test_a_reply_keeps_the_round_of_its_task():
    s = schedule(at_once=2, buffer=1)
    step(s, 0.0)
    assert step(s, 1.0, 0) == UPDATE
    assert begins(s) == gives(0)
    step(s, 2.0, 0)
    begins(s)
    assert step(s, 3.0, 1) == UPDATE
    assert (s.round, s.came) == (3, {1: 1})  # two updates old


def test_a_lost_client_is_replaced_and_not_asked_again_in_its_round():
    s = schedule(clients=4, at_once=1, buffer=2)
    assert step(s, 0.0) == gives(0)
    assert step(s, 1.0, 0, lost=True) == gives(1)
    assert step(s, 2.0, 1) == gives(2)


def test_semi_synchronous_updates_come_with_the_clock_and_stale_ones_count_later():
    s = schedule(clients=4, at_once=3, buffer=None, every=10.0)
    assert step(s, 0.0) == gives(0, 1, 2)
    assert step(s, 4.0, 2) == NOTHING
    assert s.next_wakeup() == 10.0
    assert step(s, 10.0) == UPDATE
    assert begins(s) == gives(2)  # 0 and 1 go on
    assert step(s, 12.0, 1) == NOTHING
    assert s.next_wakeup() == 20.0
    assert step(s, 20.0) == UPDATE
    assert (s.round, s.came) == (2, {1: 1})


def test_who_is_not_there_is_asked_when_it_comes():
    there = {0: 0.0, 1: 7.0, 2: 5.0}
    s = schedule(clients=3, at_once=2, buffer=2, comes=lambda c, at: max(at, there[c]))
    assert step(s, 0.0) == gives(0)
    assert s.next_wakeup() == 5.0
    assert step(s, 5.0) == gives(2)
    assert s.next_wakeup() == math.inf  # two train


def test_while_nobody_trains_the_update_waits_for_who_will_come():
    s = schedule(clients=2, at_once=2, buffer=2, comes=lambda c, at: max(at, 4.0 * c))
    assert step(s, 0.0) == gives(0)
    assert step(s, 1.0, 0) == NOTHING  # 1 comes at 4
    assert step(s, 4.0) == gives(1)
    assert step(s, 5.0, 1, lost=True) == UPDATE


# -- the order of events on the virtual clock ------------------------------------------------------
def test_an_event_is_next_once_nothing_unknown_can_come_before_it():
    order = Order()
    order.expect(0, 5.0)
    order.expect(1, 2.0)
    order.set_end(0, 6.0)
    assert order.next(math.inf) is None  # 1 may end at 2
    order.set_end(1, 9.0)
    assert order.next(math.inf) == (6.0, 0, "")
    order.expect(2, 9.0)
    order.expect(3, 9.0)
    assert order.next(math.inf) is None  # 2 and 3 may end at 9 too
    order.set_end(2, 9.0)
    order.set_end(3, 9.0, "lost")
    told = [order.next(math.inf) for _ in range(3)]
    assert told == [(9.0, 3, "lost"), (9.0, 1, ""), (9.0, 2, "")]
    assert order.next(10.0) == (10.0, None, "")


def test_the_clock_strikes_only_when_no_task_can_end_before():
    order = Order()
    order.expect(0, 5.0)
    assert order.next(4.0) == (4.0, None, "")
    assert order.next(5.0) is None  # it may end right then, and counts
    order.set_end(0, 5.0, "lost")
    assert order.next(5.0) == (5.0, 0, "lost")
    assert order.next(5.0) == (5.0, None, "")


LENGTHS = st.lists(st.integers(1, 9), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, arrivals=st.permutations(range(4)), buffer=st.integers(1, 3))
def test_the_order_in_which_replies_arrive_changes_nothing(lengths, arrivals, buffer):
    def play(rank):
        """rank: of each client; of the tasks under way the one of lowest rank arrives first."""
        s = schedule(4, 3, buffer)
        order = Order()
        told = []
        pending = {}
        given, due = step(s, 0.0)
        while s.round < 6:
            told.append((s.round, s.at, given, due, dict(s.came)))
            for client in given:
                order.expect(client, s.at + 1)
                pending[client] = s.at + lengths[client] * (1 + s.round % 3)
            if due:
                given, due = begins(s)
                continue
            event = order.next(s.next_wakeup())
            if event is None:
                client = min(pending, key=rank.index)
                order.set_end(client, pending.pop(client))
                given = []
                continue
            at, client, _ = event
            given, due = step(s, at, client)
        return [one for one in told if one[2] or one[3]]

    assert play(list(arrivals)) == play(list(range(4)))


def test_a_long_run_counts_every_reply_once():
    s = schedule(clients=7, at_once=4, buffer=3)
    counted = []
    given_out = []
    clock = itertools.count(1)
    given, due = step(s, 0.0)
    while s.round < 50:
        given_out += [(client, s.round) for client in given]
        if due:
            counted += sorted(s.came.items())
            given, due = begins(s)
        else:
            given, due = step(s, next(clock), sorted(s.training)[s.round % 4])
    assert len(counted) == len(set(counted)) == 49 * 3
    assert set(counted) <= set(given_out)
    assert len(given_out) == len(set(given_out))


def test_a_client_whose_stale_reply_waits_is_not_asked_before_it_is_counted():
    s = schedule(clients=3, at_once=2, buffer=2)
    assert step(s, 0.0) == gives(0, 1)
    assert step(s, 1.0, 0) == gives(2)
    assert step(s, 2.0, 2) == UPDATE
    assert s.came == {0: 1, 2: 1}
    assert begins(s) == gives(0)
    assert step(s, 3.0, 1) == gives(2)


def test_when_all_are_lost_or_waiting_what_is_there_makes_the_update():
    s = schedule(clients=3, at_once=3, buffer=3)
    step(s, 0.0)
    assert step(s, 1.0, 1) == NOTHING
    assert step(s, 2.0, 0, lost=True) == NOTHING
    assert step(s, 3.0, 2, lost=True) == UPDATE
    assert s.came == {1: 1}


def test_a_period_in_which_nothing_came_makes_no_update():
    s = schedule(clients=3, at_once=3, buffer=None, every=10.0)
    step(s, 0.0)
    assert step(s, 10.0) == NOTHING
    assert (s.round, s.next_wakeup()) == (1, 20.0)


@pytest.mark.parametrize("every", [0.001, 0.05, 0.1, 0.7, 1.1, 12.34])
def test_each_period_ends_after_the_one_before_whatever_its_length_is_rounded_to(every):
    """3 periods of 0.7 s end at a second that, divided by 0.7, is a little less than 3."""
    s = schedule(clients=1, at_once=1, buffer=None, every=every)
    step(s, 0.0)
    for period in range(1, 3000):
        assert s.next_wakeup() == period * every
        assert step(s, period * every) == NOTHING


def test_a_period_in_which_all_are_lost_ends_at_once():
    s = schedule(clients=2, at_once=2, buffer=None, every=10.0)
    step(s, 0.0)
    assert step(s, 1.0, 0, lost=True) == NOTHING
    assert step(s, 2.0, 1, lost=True) == UPDATE
    assert s.came == {}


def test_no_task_ends_before_the_second_that_others_were_held_back_by():
    """Whoever knows the end later, and finds it earlier, must not turn the order around."""
    order = Order()
    order.expect(1, 5.0)
    order.expect(2, 4.0)
    order.set_end(2, 4.5)
    assert order.next(9.0) == (4.5, 2, "")
    order.set_end(1, 3.0)
    assert order.next(9.0) == (5.0, 1, "")

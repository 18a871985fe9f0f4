"""Who is given a task when, and what makes an update: lists of events in, lists of instructions
out.
"""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from fednet.server.asynchronous import Give, Order, Schedule, Update


def schedule(clients=5, at_once=3, buffer=2, every=None, **more):
    return Schedule(at_once, buffer, every, lambda round: range(clients), **more)


def updated(s):
    s.next_round()
    return s.begin()


def gives(instructions):
    return [(g.client, g.round) for g in instructions if isinstance(g, Give)]


def updates(instructions):
    return [(u.round, u.came) for u in instructions if isinstance(u, Update)]


def test_a_free_client_is_asked_as_soon_as_another_replied():
    s = schedule()
    assert gives(s.begin()) == [(0, 1), (1, 1), (2, 1)]
    assert gives(s.replied(1, 0.5)) == [(3, 1)]
    assert s.replied(0, 0.7) == [Update(1, {1: 1, 0: 1}, 0.7)]
    assert gives(updated(s)) == [(0, 2)]  # 2 and 3 still train


def test_staleness_is_the_updates_since_the_model_that_a_reply_started_from():
    s = schedule(at_once=2, buffer=1)
    s.begin()
    assert updates(s.replied(0, 1.0)) == [(1, {0: 1})]
    assert gives(updated(s)) == [(0, 2)]
    s.replied(0, 2.0)
    updated(s)
    late = s.replied(1, 3.0)[0]
    assert (late.came, late.staleness(1)) == ({1: 1}, 2)


def test_a_lost_client_is_replaced_and_not_asked_again_in_its_round():
    s = schedule(clients=4, at_once=1, buffer=2)
    assert gives(s.begin()) == [(0, 1)]
    assert gives(s.lost(0, 1.0)) == [(1, 1)]
    assert gives(s.replied(1, 2.0)) == [(2, 1)]


def test_semi_synchronous_updates_come_with_the_clock_and_stale_ones_count_later():
    s = schedule(clients=4, at_once=3, buffer=None, every=10.0)
    assert gives(s.begin()) == [(0, 1), (1, 1), (2, 1)]
    assert (s.replied(2, 4.0), s.wakes()) == ([], 10.0)
    assert s.tick(10.0) == [Update(1, {2: 1}, 10.0)]
    assert gives(updated(s)) == [(2, 2)]  # 0 and 1 go on
    assert s.replied(1, 12.0) == []
    assert s.wakes() == 20.0
    late = s.tick(20.0)[0]
    assert late.staleness(1) == 1


def test_who_is_not_there_is_asked_when_it_comes():
    there = {0: 0.0, 1: 7.0, 2: 5.0}
    s = schedule(clients=3, at_once=2, buffer=2, comes=lambda c, at: max(at, there[c]))
    assert gives(s.begin()) == [(0, 1)]
    assert s.wakes() == 5.0
    assert gives(s.tick(5.0)) == [(2, 1)]
    assert s.wakes() == math.inf  # two train


# -- the order of events on the virtual clock ------------------------------------------------------
def test_an_event_is_next_once_nothing_unknown_can_come_before_it():
    order = Order()
    order.given(0, 5.0)
    order.given(1, 2.0)
    order.known(0, 6.0)
    assert order.next(math.inf) is None  # 1 may end at 2
    order.known(1, 9.0)
    assert order.next(math.inf) == (6.0, 0, "")
    order.given(2, 9.0)
    assert order.next(math.inf) == (9.0, 1, "")  # at 9 too, 1 is before 2
    assert order.next(math.inf) is None


def test_the_clock_strikes_only_when_no_task_can_end_before():
    order = Order()
    order.given(0, 5.0)
    assert order.next(4.0) == (4.0, None, "")
    assert order.next(5.0) is None  # it may end right then, and counts
    order.known(0, 5.0, "lost")
    assert order.next(5.0) == (5.0, 0, "lost")
    assert order.next(5.0) == (5.0, None, "")


LENGTHS = st.lists(st.integers(1, 9), min_size=4, max_size=4)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, arrivals=st.permutations(range(4)), buffer=st.integers(1, 3))
def test_the_order_in_which_replies_arrive_changes_nothing(lengths, arrivals, buffer):
    def play(rank):
        """rank: of each client; of the tasks under way the one of lowest rank arrives first."""
        s, order, told, pending = schedule(4, 3, buffer), Order(), [], {}
        todo = s.begin()
        while s.round < 6:
            for i in todo:
                told.append(i)
                if isinstance(i, Give):
                    order.given(i.client, i.at + 1)
                    pending[i.client] = i.at + lengths[i.client] * (1 + i.round % 3)
            if any(isinstance(i, Update) for i in todo):
                todo = updated(s)
                continue
            event = order.next(s.wakes())
            if event is None:
                client = min(pending, key=rank.index)
                order.known(client, pending.pop(client))
                todo = []
                continue
            at, client, _ = event
            todo = s.replied(client, at)
        return told

    assert play(list(arrivals)) == play(list(range(4)))


def test_a_long_run_counts_every_reply_once():
    s = schedule(clients=7, at_once=4, buffer=3)
    counted, given_out, clock = [], [], itertools.count(1)
    todo = s.begin()
    while s.round < 50:
        given_out += gives(todo)
        made = [u for u in todo if isinstance(u, Update)]
        for u in made:
            counted += sorted(u.came.items())
        todo = updated(s) if made else s.replied(sorted(s.training)[s.round % 4], next(clock))
    assert len(counted) == len(set(counted)) == 49 * 3
    assert set(counted) <= set(given_out)
    assert len(given_out) == len(set(given_out))


def test_a_client_whose_stale_reply_waits_is_not_asked_before_it_is_counted():
    s = schedule(clients=3, at_once=2, buffer=2)
    assert gives(s.begin()) == [(0, 1), (1, 1)]
    assert gives(s.replied(0, 1.0)) == [(2, 1)]
    assert updates(s.replied(2, 2.0)) == [(1, {0: 1, 2: 1})]
    assert gives(updated(s)) == [(0, 2)]
    assert gives(s.replied(1, 3.0)) == [(2, 2)]


def test_when_all_are_lost_or_waiting_what_is_there_makes_the_update():
    s = schedule(clients=3, at_once=3, buffer=3)
    s.begin()
    assert s.replied(1, 1.0) == []
    assert s.lost(0, 2.0) == []
    assert s.lost(2, 3.0) == [Update(1, {1: 1}, 3.0)]


def test_a_period_in_which_nothing_came_makes_no_update():
    s = schedule(clients=3, at_once=3, buffer=None, every=10.0)
    s.begin()
    assert (s.tick(10.0), s.round, s.wakes()) == ([], 1, 20.0)


def test_no_task_ends_before_the_second_that_others_were_held_back_by():
    """Whoever knows the end later, and finds it earlier, must not turn the order around."""
    order = Order()
    order.given(1, 5.0)
    order.given(2, 4.0)
    order.known(2, 4.5)
    assert order.next(9.0) == (4.5, 2, "")
    order.known(1, 3.0)
    assert order.next(9.0) == (5.0, 1, "")

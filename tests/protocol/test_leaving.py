"""A client that is gone in the middle of its task: what crossed is spent, nothing more is asked."""

from __future__ import annotations

import pytest

from fednet.protocol.tasks import LEFT, Leaves
from fednet.wire import messages as m
from tests.protocol.net import PART, Net, Site, spec

ASKED = [(0, LEFT)]


def resolved(net: Net) -> list[tuple[int, str]]:
    return [(r.key.client, r.reason) for r in net.resolved]


def at_work(leaves: Leaves) -> tuple[Net, Site, m.Key]:
    """A client that leaves so has its task."""
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0, leaves=leaves)])
    net.settle()
    (key,) = site.given
    return net, site, key


def bytes_of(net: Net, direction: str) -> list[tuple[str, bool]]:
    """(type, useful) of the payloads in the server's book."""
    return [
        (row["type"], row["useful"])
        for row in net.rows
        if row["direction"] == direction and row["type"] in ("task", "reply")
    ]


def test_at_its_second_its_task_is_called_off_and_what_crossed_was_spent():
    net = Net(2)
    site = net.site("w", [0, 1])
    net.begin([spec(0, leaves=Leaves(at=net.now + 5.0)), spec(1)])
    net.settle()
    key = next(k for k in site.given if k.client == 0)
    net.pass_time(4.9)
    assert resolved(net) == []
    net.pass_time(0.1)
    net.settle()
    assert resolved(net) == ASKED
    assert [k.client for k in site.given] == [1]  # its process was told to cancel it
    assert ("task", False) in bytes_of(net, "down")
    site.answer(key, b"late")  # it does not know yet: of no use
    net.settle()
    assert net.done == {}


@pytest.mark.parametrize("size", [6, 20 * PART])
def test_a_reply_that_was_whole_before_its_second_counts(size):
    net, site, key = at_work(Leaves(at=5.0))
    site.answer(key, bytes(size))
    net.settle()
    net.pass_time(9.0)
    assert resolved(net) == [(0, "")]


def test_a_reply_that_is_whole_before_its_departure_is_noticed_counts():
    net, site, key = at_work(Leaves(at=5.0))
    net.now += 5.1
    site.answer(key, b"answer")
    net.settle()
    assert resolved(net) == [(0, "")]


def test_one_that_no_worker_was_free_for_leaves_too():
    net = Net(1)
    net.begin([spec(0, leaves=Leaves(at=net.now + 5.0))])
    net.pass_time(5.1)
    assert resolved(net) == ASKED


def test_one_that_leaves_before_its_reply_is_called_off_once_its_task_is_there():
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0, 3 * PART, leaves=Leaves(up=0))])
    net.settle()
    assert resolved(net) == ASKED
    (row,) = [r for r in net.rows if r["type"] == "task"]
    assert (sum(row["kinds"].values()), row["useful"]) == (3 * PART, False)
    assert not site.given


@pytest.mark.parametrize("parts", [0, 6])
def test_one_that_leaves_while_its_task_comes_is_sent_no_more_of_it(parts):
    net = Net(1)
    net.site("w", [0])
    net.begin([spec(0, 20 * PART, leaves=Leaves(down=parts))])
    net.settle()
    assert resolved(net) == ASKED
    (row,) = [r for r in net.rows if r["type"] == "task"]
    assert sum(row["kinds"].values()) == parts * PART


def test_one_that_leaves_while_it_sends_is_asked_for_no_more_of_it():
    net, site, key = at_work(Leaves(up=5 * PART + 1))
    site.answer(key, bytes(20 * PART))
    net.settle()
    assert resolved(net) == ASKED
    (row,) = [r for r in net.rows if r["type"] == "reply"]
    assert (sum(row["kinds"].values()), row["useful"]) == (6 * PART, False)


def test_one_whose_reply_is_shorter_than_what_gets_through_completes():
    net, site, key = at_work(Leaves(up=5 * PART))
    site.answer(key, bytes(5 * PART))
    net.settle()
    assert resolved(net) == [(0, "")]
    assert net.done[m.Key(1, 0, 0, 0)] == bytes(5 * PART)

"""One payload for several clients of a process: it crosses once, and both books say so."""

from __future__ import annotations

import pytest

from fednet.protocol import rules as s
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.frames import encode
from tests.protocol.net import PART, Net, form
from tests.protocol.test_pair import agreed, rows

SIZE = 6 * PART + 3


def same(clients, size: int = SIZE, first: int = 0) -> list[s.Job]:
    body = Body([bytes(first + k % 200 for k in range(size))])
    return [s.Job(c, form(size), body, body.check()) for c in clients]


def answer_all(net: Net, *sites) -> None:
    while any(site.given for site in sites):
        for site in sites:
            for key in list(site.given):
                site.answer(key, b"a" * 20)
        net.settle()


def parts_of(net: Net) -> list[m.Part]:
    return [message for message in net.sent if isinstance(message, m.Part)]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_process_is_sent_a_payload_once_and_each_client_gets_all_of_it(slots):
    net = Net(3)
    site = net.site("w", [0, 1, 2], slots=slots)
    net.begin(same([0, 1, 2]))
    net.settle()
    bodies = []
    while site.given:
        bodies += [bytes(given.body) for given in site.given.values()]
        assert all(given.body.readonly for given in site.given.values())
        for key in list(site.given):
            site.answer(key, b"a")
        net.settle()
    assert bodies == [bytes(same([0])[0].body.whole())] * 3
    assert len(parts_of(net)) == 7
    assert len(net.done) == 3


def books(share: bool) -> Net:
    net = Net(5)
    sites = [net.site("a", [0, 1, 2]), net.site("b", [3, 4])]
    for site in sites:
        site.protocol.tasks.share = share
    net.begin(same(range(5)))
    net.settle()
    answer_all(net, *sites)
    down = [r for r in net.rows if r["direction"] == "down" and r["type"] == "task"]
    assert agreed(down, [r for site in sites for r in site.rows if r["type"] == "task"])
    return net


def test_what_did_not_cross_is_booked_as_what_it_would_have_been():
    shared, apart = books(True), books(False)
    here, there = shared.ledger.take(1), apart.ledger.take(1)
    assert here.useful == there.useful == {"up": {"delta": 100}, "down": {"state": 5 * SIZE}}
    assert here.spent["down"] + here.shared == there.spent["down"]
    assert there.shared == 0
    assert here.shared > 3 * SIZE
    crossed = [r for r in rows(shared.rows, "task") if r["kinds"]]
    assert len(crossed) == 2
    assert sum("shared" in r for r in rows(shared.rows, "task")) == 3


def test_another_payload_is_fetched_and_so_is_the_first_when_it_comes_again():
    net = Net(2)
    site = net.site("w", [0, 1])
    for round, first in ((1, 0), (2, 7), (3, 0)):
        net.begin(same([0, 1], first=first), round=round)
        net.settle()
        answer_all(net, site)
    assert len(parts_of(net)) == 3 * 7
    net.begin(same([0, 1], first=0), round=4)  # no word of it since: it is here
    net.settle()
    assert len(parts_of(net)) == 3 * 7


def test_who_waits_for_a_payload_that_is_called_off_asks_for_it():
    net = Net(2)
    site = net.site("w", [0, 1], slots=2)
    net.begin(same([0, 1]))
    while not site.protocol.tasks._payload.waiting:
        net.move(site, "down")
    (key,) = site.protocol.tasks.incoming
    site.receive((encode(m.Cancel(run="run", inc=1, key=key)),))
    net.settle()
    assert [given.client for given in site.given] == [1 - key.client]
    assert bytes(next(iter(site.given.values())).body) == bytes(same([0])[0].body.whole())


def test_a_connection_that_is_cut_amid_a_shared_payload_loses_no_task():
    net = Net(3)
    site = net.site("w", [0, 1, 2], slots=3)
    net.begin(same([0, 1, 2]))
    while not parts_of(net):
        net.move(site, "down")
        net.move(site, "up")
    net.cut(site)
    assert not site.protocol.tasks._payload.waiting
    net.connect(site)
    net.settle()
    answer_all(net, site)
    assert len(net.done) == 3


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("again", [1, 9])
def test_wherever_connections_are_cut_each_clients_payload_is_of_use_once(slots, again):
    for before in range(0, 60, 2):
        net = Net(3)
        site = net.site("w", [0, 1, 2], slots=slots)
        net.begin(same([0, 1, 2]))
        for moves in (before, again):
            for step in range(moves):
                net.move(site, "up" if step % 2 else "down")
            net.cut(site)
            net.connect(site)
        net.settle()
        answer_all(net, site)
        assert net.ledger.take(1).useful == {"up": {"delta": 60}, "down": {"state": 3 * SIZE}}


def test_a_payload_that_was_found_damaged_is_fetched_anew():
    net = Net(2)
    site = net.site("w", [0, 1])
    net.begin(same([0, 1]))
    net.settle()
    (key,) = site.given
    site.given.clear()
    site.do(site.protocol.failed(key, "damaged", True))
    net.settle()
    answer_all(net, site)
    assert len(net.done) == 2
    assert len(parts_of(net)) == 2 * 7


def test_without_sharing_a_client_gets_memory_of_its_own():
    net = Net(1)
    site = net.site("w", [0])
    site.protocol.tasks.share = False
    net.begin(same([0]))
    net.settle()
    assert not next(iter(site.given.values())).body.readonly


def test_payloads_of_their_own_stay_each_clients():
    net = Net(2)
    site = net.site("w", [0, 1])
    net.begin([same([0])[0], same([1], first=3)[0]])
    net.settle()
    answer_all(net, site)
    assert len(parts_of(net)) == 2 * 7
    assert not any("shared" in r for r in net.rows)

"""Which worker gets which task: as by looking at all workers and all tasks at each event, whose
cost it does not have.
"""

from __future__ import annotations

import random
from types import MethodType

import msgspec
import pytest

from fednet.protocol.instructions import Send
from fednet.protocol.table import TaskState
from fednet.protocol.tasks import Rules, _bound_to, _may_try
from fednet.wire import messages as m
from tests.protocol.net import form, job
from tests.protocol.test_server import ready, say, server

CLIENTS = 12
BODY = memoryview(b"abc")


def plainly(tasks, only=None):
    """`Tasks.assign` by looking at everything."""
    roster = tasks._roster
    free = [
        x
        for x in roster.workers.values()
        if x.ready and x.gone_at is None and len(x.queue) <= x.slots
    ]
    order = sorted(tasks.by_client.values(), key=lambda w: (-w.job.cost, w.job.client))
    waiting = [w for w in order if w.status is TaskState.WAITING]
    left, slots = len(waiting), sum(x.slots for x in free)
    for w in waiting:
        able = [
            x
            for x in free
            if w.job.client in x.ids
            and _may_try(w, x, roster)
            and (not w.job.bound or x.name in _bound_to(w, roster, tasks._last))
        ]
        hosts = [x for x in able if len(x.queue) < x.slots]
        if not hosts and left > slots:
            hosts = [x for x in able if len(x.queue) <= x.slots]
        if hosts:
            had = tasks._last.get(w.job.client)
            least = min(hosts, key=lambda x: (len(x.queue) / x.slots, had != x.name, x.name))
            tasks._hand(w, least)
            left -= 1
            free = [x for x in free if len(x.queue) <= x.slots]


class Pair:
    """Two servers that hear the same: one hands out by `plainly`."""

    def __init__(self) -> None:
        self.both = server(CLIENTS), server(CLIENTS)
        tasks = self.both[1].tasks
        tasks.assign = MethodType(plainly, tasks)
        self.handed: list[tuple[bytes, m.Key]] = []  # and not answered

    def do(self, act) -> None:
        tasks = [
            [
                (i.conn, i.message.key)
                for i in act(one)
                if isinstance(i, Send) and isinstance(i.message, m.Task)
            ]
            for one in self.both
        ]
        assert tasks[0] == tasks[1]
        self.handed += tasks[0]
        roster = self.both[0].roster
        assert roster.free_slots == sum(roster.free.values())
        assert set(roster.free) == {
            x.name
            for x in roster.workers.values()
            if x.ready and x.gone_at is None and len(x.queue) <= x.slots
        }
        assert roster.parted() == [x for x in roster.workers.values() if x.conn is None]


@pytest.mark.parametrize("seed", range(50, 62))
def test_the_same_tasks_go_to_the_same_workers_whatever_comes(seed):
    draw, pair = random.Random(seed), Pair()
    here: dict[bytes, str] = {}
    names = [f"w{k}" for k in range(5)]
    count, round, now = 0, 0, 0.0

    def join() -> None:
        nonlocal count
        name = draw.choice(names)
        if name in here.values():
            return
        count += 1
        conn, ids = b"%d" % count, draw.sample(range(CLIENTS), draw.choice([1, 4, CLIENTS]))
        here[conn] = name
        slots = draw.choice([1, 1, 3])
        pair.do(lambda one: ready(one, conn, name, ids, now, slots=slots))

    def begin() -> None:
        nonlocal round
        round += 1
        some = draw.sample(range(CLIENTS), draw.randint(1, CLIENTS))
        bound = draw.random() < 0.3
        jobs = [job(c, cost=draw.randint(1, 3), bound=bound) for c in some]
        rules = Rules(first=draw.choice([None, None, 3]), join=None, closed=20.0)
        pair.do(lambda one: one.begin(round, 0, "train", jobs, rules, now))
        pair.handed = [(conn, key) for conn, key in pair.handed if key.round == round]

    def answer() -> None:
        if not pair.handed:
            return
        conn, key = pair.handed.pop(draw.randrange(len(pair.handed)))
        said = m.Reply(run="r", inc=1, key=key, form=form(3), size=3)
        pair.do(lambda one: say(one, conn, said, now, BODY))
        if draw.random() < 0.8:
            pair.do(lambda one: one.accept(key, now))
        else:
            pair.do(lambda one: one.reject(key, "no", now))

    def fail() -> None:
        if pair.handed:
            conn, key = pair.handed.pop(draw.randrange(len(pair.handed)))
            again, lacks = draw.random() < 0.5, draw.random() < 0.3
            said = m.Failed(run="r", inc=1, key=key, reason="x", again=again, lacks=lacks)
            pair.do(lambda one: say(one, conn, said, now))

    def beat() -> None:
        if here:
            conn = draw.choice(sorted(here))
            said = draw.choice(
                [
                    m.Slots(slots=draw.randint(1, 3)),
                    m.Progress(client=draw.randrange(CLIENTS), phase=m.UPLOADING),
                    m.Alive(),
                ]
            )
            marked = msgspec.structs.replace(said, run="r", inc=1)
            pair.do(lambda one: say(one, conn, marked, now))

    def leave() -> None:
        if here:
            conn = draw.choice(sorted(here))
            del here[conn]
            pair.do(lambda one: one.closed(conn, now))

    def wait() -> None:
        nonlocal now
        now += draw.choice([0.1, 1.0, 8.0])
        pair.do(lambda one: one.tick(now))

    join()
    begin()
    acts = [join] * 3 + [begin] + [answer] * 12 + [fail, beat, beat, leave, wait, wait]
    for _ in range(300):
        draw.choice(acts)()


def test_a_reply_is_no_reason_to_look_at_every_worker_and_every_task(monkeypatch):
    many, one = 200, server(200)
    for k in range(many):
        ready(one, b"%d" % k, f"w{k}", [k])
    one.begin(1, 0, "train", [job(c) for c in range(many)], Rules(), 0.0)

    class Looked(dict):
        def values(self):
            raise AssertionError("all were looked at")

        __iter__ = items = values

    monkeypatch.setattr(one.roster, "workers", Looked(one.roster.workers))
    monkeypatch.setattr(one.tasks, "by_client", Looked(one.tasks.by_client))
    for k in range(many):
        said = m.Reply(run="r", inc=1, key=m.Key(1, 0, 0, k), form=form(3), size=3)
        say(one, b"%d" % k, said, 0.0, BODY)
        one.accept(said.key, 0.0)
    assert all(one.tasks.by_client[k].status is TaskState.DONE for k in range(many))

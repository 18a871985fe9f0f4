"""Which worker gets which task, whatever comes."""

from __future__ import annotations

import random

import msgspec
import pytest

from fednet.protocol.instructions import Send
from fednet.protocol.server import ServerProtocol
from fednet.protocol.table import TaskState
from fednet.protocol.tasks import Rules
from fednet.wire import messages as m
from fednet.wire.body import Body
from tests.protocol.net import form, spec
from tests.protocol.test_server import ready, say, server

CLIENTS = 12
BODY = Body([b"abc"])


def idle(one: ServerProtocol) -> list[tuple[int, str]]:
    """Waiting tasks that a worker with a free slot could do, and that worker."""
    free = [x for x in one.roster.workers.values() if x.ready and len(x.queue) < x.slots]
    return [
        (t.spec.client, x.name)
        for t in one.open_tasks()
        if t.status is TaskState.WAITING and not t.spec.bound
        for x in free
        if t.spec.client in x.ids and x.name not in t.refused_by and t.spec.client not in x.lacks
    ]


@pytest.mark.parametrize("seed", range(6))
def test_no_worker_is_idle_that_could_do_a_waiting_task_and_none_has_more_ahead_than_slots(seed):
    draw = random.Random(seed)
    one = server(CLIENTS)
    here: dict[bytes, str] = {}
    handed: list[tuple[bytes, m.Key]] = []  # and not answered
    count = 0
    round = 0
    now = 0.0

    def do(instructions) -> None:
        for i in instructions:
            if isinstance(i, Send) and isinstance(i.message, m.Task):
                assert i.message.key.client in one.roster.by_conn[i.conn].ids
                handed.append((i.conn, i.message.key))

    def join() -> None:
        nonlocal count
        name = draw.choice([f"w{k}" for k in range(5)])
        if name in here.values():
            return
        count += 1
        conn = b"%d" % count
        ids = draw.sample(range(CLIENTS), draw.choice([1, 4, CLIENTS]))
        here[conn] = name
        do(ready(one, conn, name, ids, now, slots=draw.choice([1, 1, 3])))

    def begin() -> None:
        nonlocal round
        round += 1
        some = draw.sample(range(CLIENTS), draw.randint(1, CLIENTS))
        bound = draw.random() < 0.3
        specs = [spec(c, cost=draw.randint(1, 3), bound=bound) for c in some]
        rules = Rules(join=None, closed=20.0)
        handed.clear()
        do(one.begin(round, 0, "train", specs, rules, now))

    def add() -> None:
        at_work = {t.spec.client for t in one.open_tasks()}
        some = [c for c in draw.sample(range(CLIENTS), 3) if c not in at_work]
        do(one.add(round, [spec(c) for c in some], now))
        assert len({t.key for t in one.open_tasks()}) == len(at_work) + len(some)

    def answer() -> None:
        if not handed:
            return
        conn, key = handed.pop(draw.randrange(len(handed)))
        said = m.Reply(run="r", inc=1, key=key, form=form(3), size=3)
        do(say(one, conn, said, now, BODY))
        if draw.random() < 0.8:
            t = one.tasks.get(key.client)
            counts = t is not None and t.key == key and t.status is TaskState.ARRIVED
            do(one.accept(key, now))
            name = one.roster.worker_of(conn)
            if counts:
                assert [c for c, free in idle(one) if free == name] == []  # at once
        else:
            do(one.reject(key, "no", now))

    def cancel() -> None:
        if draw.random() < 0.2:
            do(one.cancel("enough", now))
            assert one.open_tasks() == []

    def fail() -> None:
        if handed:
            conn, key = handed.pop(draw.randrange(len(handed)))
            again = draw.random() < 0.5
            lacks = draw.random() < 0.3
            said = m.Failed(run="r", inc=1, key=key, reason="x", again=again, lacks=lacks)
            do(say(one, conn, said, now))

    def beat() -> None:
        if here:
            uploading = m.Progress(client=draw.randrange(CLIENTS), stage=m.UPLOADING)
            said = draw.choice([m.Slots(slots=draw.randint(1, 3)), uploading, m.Alive()])
            marked = msgspec.structs.replace(said, run="r", inc=1)
            do(say(one, draw.choice(sorted(here)), marked, now))

    def leave() -> None:
        if here:
            conn = draw.choice(sorted(here))
            del here[conn]
            do(one.closed(conn, now))

    def wait() -> None:
        nonlocal now
        now += draw.choice([0.1, 1.0, 8.0])
        do(one.tick(now))
        assert idle(one) == []
        assert all(len(x.queue) <= 2 * x.slots for x in one.roster.workers.values() if x.slots > 2)
        present = {i for x in one.roster.workers.values() if x.ready for i in x.ids}
        assert one.roster.present() == present
        assert one.roster.free_slots == sum(
            x.slots for x in one.roster.workers.values() if x.ready and len(x.queue) < 2 * x.slots
        )

    join()
    begin()
    acts = [join] * 3 + [begin] + [add] * 3 + [answer] * 12 + [fail, beat, beat, leave, wait, wait]
    acts.append(cancel)
    for _ in range(300):
        draw.choice(acts)()


def test_a_clients_second_task_of_a_round_is_another_attempt():
    one = server(2)
    ready(one, b"0", "w0", [0])
    ready(one, b"1", "w1", [1])
    one.begin(1, 0, "train", [spec(0), spec(1)], Rules(), 0.0)
    for attempt in range(2):
        key = m.Key(1, 0, attempt, 0)
        say(one, b"0", m.Reply(run="r", inc=1, key=key, form=form(3), size=3), 0.0, BODY)
        one.accept(key, 0.0)
        assert [t.spec.client for t in one.open_tasks()] == [1]
        one.add(1, [spec(0)], 0.0)
        assert one.tasks[0].key == m.Key(1, 0, attempt + 1, 0)


@pytest.mark.parametrize("workers", [200, 2])
def test_a_reply_is_no_reason_to_look_at_every_worker_and_every_task(monkeypatch, workers):
    many = 200
    one = server(200)
    each = many // workers
    for k in range(workers):
        ready(one, b"%d" % k, f"w{k}", range(k * each, (k + 1) * each))
    one.begin(1, 0, "train", [spec(c) for c in range(many)], Rules(), 0.0)

    class Looked(dict):
        def values(self):
            raise AssertionError("all were looked at")

        __iter__ = items = values

    class Counted(dict):
        def get(self, client, default=None):
            looks.append(client)
            return super().get(client, default)

    looks = []
    monkeypatch.setattr(one.roster, "workers", Looked(one.roster.workers))
    monkeypatch.setattr(one, "tasks", Looked(one.tasks))
    monkeypatch.setattr(one.roster, "hosting", Counted(one.roster.hosting))
    # The first clients' tasks, which are handed out first, wait for the slowest worker.
    for k in reversed(range(workers)):
        queue = one.roster.by_conn[b"%d" % k].queue
        for _ in range(each):
            said = m.Reply(run="r", inc=1, key=m.Key(1, 0, 0, queue[0]), form=form(3), size=3)
            say(one, b"%d" % k, said, 0.0, BODY)
            one.accept(said.key, 0.0)
    assert all(one.tasks[k].status is TaskState.DONE for k in range(many))
    assert len(looks) <= 2 * many
    looks.clear()
    for k in range(many):  # as in a run without rounds, where each reply leads to a task
        one.add(k + 2, [spec(k)], 0.0)
        said = m.Reply(run="r", inc=1, key=m.Key(k + 2, 0, 0, k), form=form(3), size=3)
        say(one, next(iter(one.roster.hosting[k].values())).conn, said, 0.0, BODY)
        one.accept(said.key, 0.0)
        assert one.tasks[k].status is TaskState.DONE
    assert len(looks) <= 2 * many

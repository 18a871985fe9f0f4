"""Both machines joined by wires in memory: what crosses, what is billed, what faults do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from fednet.protocol.table import (
    ENDED,
    WITH_WORKER,
    ClientState,
    ClientTaskState,
    TaskState,
    WorkerState,
)
from fednet.protocol.tasks import Rules
from fednet.wire import messages as m
from fednet.wire.body import NOTHING, Body
from tests.books import open_accounts, useful
from tests.protocol.net import PART, Net, form, machine, spec
from tests.protocol.test_handing import idle

SAME = (
    "round",
    "client",
    "direction",
    "type",
    "kinds",
    "envelope",
    "bytes",
    "raw_bytes",
    "purpose",
    "phase",
    "attempt",
)


def rows(book, *types) -> list[dict]:
    return [row for row in book if row["type"] in types]


def agreed(a, b) -> bool:
    """Whether two books hold the same rows, in whatever order."""
    return Counter(str([r[f] for f in SAME]) for r in a) == Counter(
        str([r[f] for f in SAME]) for r in b
    )


def test_long_payloads_are_pulled_in_windows_of_two_parts_both_ways():
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0, 8 * 6 + 3)])  # seven parts
    net.settle()
    (key,) = site.given
    assert bytes(site.given[key].body) == bytes(51)
    pulls = [i.message for i in site.seen if isinstance(getattr(i, "message", None), m.Pull)]
    in_turn = [(0, 2), *((first, 1) for first in range(2, 7))]  # another one for each that came
    assert [(p.first, p.count) for p in pulls] == in_turn
    payload = bytes(range(8 * 6 + 1))
    site.answer(key, payload)
    net.settle()
    assert net.done == {key: payload}
    assert [(p.first, p.count) for p in net.sent if isinstance(p, m.Pull)] == in_turn


SIZE = 6 * PART + 3


def of_one_broadcast(net: Net, clients: int, slots: int):
    """A process that hosts all these clients, whose tasks have the same payload."""
    site = net.site("w", list(range(clients)), slots=slots)
    body = Body([bytes(k % 200 for k in range(SIZE))])
    same = {"body": body, "form": form(SIZE), "check": body.digest()}
    net.begin([replace(spec(c), **same) for c in range(clients)])
    return site


def answer_all(net: Net, site) -> list[bytes]:
    """Answers each task, as many times as they come; returns their payloads."""
    bodies = []
    while site.given:
        for key in list(site.given):
            bodies.append(bytes(site.given[key].body))
            site.answer(key, b"a" * 20)
        net.settle()
    return bodies


@pytest.mark.parametrize("slots", [1, 3])
def test_each_client_of_a_process_is_sent_a_payload_of_its_own(slots):
    net = Net(3)
    site = of_one_broadcast(net, 3, slots)
    net.settle()
    assert answer_all(net, site) == [bytes(k % 200 for k in range(SIZE))] * 3
    assert sum(isinstance(message, m.Part) for message in net.sent) == 3 * 7
    assert useful(net.rows) == {"up": {"delta": 60}, "down": {"state": 3 * SIZE}}
    assert agreed(rows(net.rows, "task"), rows(site.rows, "task"))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("again", [1, 9])
def test_wherever_connections_are_cut_each_clients_payload_is_of_use_once(slots, again):
    for before in range(0, 60, 2):
        net = Net(3)
        site = of_one_broadcast(net, 3, slots)
        for moves in (before, again):
            for step in range(moves):
                net.move(site, "up" if step % 2 else "down")
            net.cut(site)
            net.connect(site)
        net.settle()
        answer_all(net, site)
        assert useful(net.rows) == {"up": {"delta": 60}, "down": {"state": 3 * SIZE}}


def test_upload_cut_short_goes_on_after_a_rejoin_with_the_same_attempt():
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0)])
    net.settle()
    (key,) = site.given
    site.answer(key, bytes(60))
    for direction in ("up", "down", "up"):  # announced, granted, the first of two parts
        assert net.move(site, direction)
    net.cut(site)
    # What was sent over a connection that ended is lost in the book of its sender.
    for book, lost, came in ((site.rows, "reply", "pull"), (net.rows, "pull", "reply")):
        (mine,) = rows(book, lost)
        (theirs,) = rows(book, came)
        assert mine["lost"]
        assert "lost" not in theirs
    assert rows(site.rows, "reply")[0]["bytes"] > rows(net.rows, "reply")[0]["bytes"]
    net.connect(site)
    net.settle()
    assert net.done == {key: bytes(60)}
    for book, came in ((net.rows, 8), (site.rows, 16)):
        sent = [(row["useful"], row["kinds"]) for row in rows(book, "reply")]
        assert sent == [(False, {"delta": came}), (True, {"delta": 60})]
    assert net.journal.book.open_accounts == site.journal.book.open_accounts == {}


def test_long_task_asked_for_again_after_a_restart_goes_on_after_a_cut():
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0, 60)])
    net.settle()
    (key,) = site.given
    net.cut(site)
    net.server = machine("run", 2, 1)
    net.begin([spec(0, 60)])
    net.connect(site)
    net.settle()
    assert list(site.given) == [key]
    net.cut(site)
    net.connect(site)
    net.settle()
    site.answer(key, b"answer")
    net.settle()
    assert net.done == {key: b"answer"}
    # Not once more after the cut.
    assert [t.inc for t in net.sent if isinstance(t, m.Task)] == [1, 2]


def test_reply_that_was_refused_is_given_out_three_times_then_dropped():
    net = Net(1)
    net.bad.add(bytes(30))
    site = net.site("w", [0])
    net.begin([spec(0)])
    for attempt in range(3):
        net.settle()
        (key,) = site.given
        assert key.attempt == attempt
        site.answer(key, bytes(30))
    net.settle()
    assert [(r.key.client, r.reason) for r in net.resolved] == [(0, "refused: bad")]
    assert useful(net.rows) == {"up": {}, "down": {}}
    keys = [m.Key(1, 0, attempt, 0) for attempt in range(3)]
    assert [site.protocol.task_state(key) for key in keys] == [ClientTaskState.GONE] * 3


def test_a_task_of_which_a_part_was_lost_on_its_way_is_asked_for_anew():
    net = Net(1)
    site = net.site("w", [0])
    net.begin([spec(0, 5)])
    *header, body = site.down.pop()
    site.down.append((*header, body[:-1]))
    net.settle()
    assert [k.attempt for k in site.given] == [1]
    assert bytes(next(iter(site.given.values())).body) == bytes(5)
    site.answer(next(iter(site.given)), b"answer")
    net.settle()
    assert [r["useful"] for r in rows(net.rows, "task")] == [False, True]
    assert [r["useful"] for r in rows(site.rows, "task")] == [False, True]


def test_client_refused_for_good_is_turned_away_even_when_ready():
    net = Net(1)
    site = net.site("w", [0], join=False)
    site.prepares = False
    net.connect(site)
    net.settle()
    site.do(site.protocol.ready("another layout"))
    net.settle()
    assert site.protocol.state is ClientState.OVER
    assert net.server.roster.present() == frozenset()


class Federation(RuleBasedStateMachine):
    """Random runs: several workers that host the same ids, come, leave and come back with what
    they had or without it, and whose keys are revoked; cuts, silence, lost, doubled and swapped
    messages, replies that are refused or that nobody asked for any more, states that are not
    there, deadlines, first-k and phases that are cancelled. A phase always ends, and the books are
    in order then.
    """

    CLIENTS = 4

    @initialize(
        deadline=st.sampled_from([None, 20.0]),
        first=st.sampled_from([None, None, 2]),
        closed=st.sampled_from([0.0, 3.0]),
        alike=st.booleans(),
        bound=st.booleans(),
        revokes=st.booleans(),
    )
    def start(self, deadline, first, closed, alike, bound, revokes):
        self.revokes = revokes
        self.bound = bound
        self.alike = alike
        self.revoked = set()
        self.was_revoked = False
        self.net = Net(
            self.CLIENTS,
            key_refusal=lambda user, client: "key revoked" if client in self.revoked else "",
        )
        self.net.first = first
        self.rules = Rules(deadline=deadline, closed=closed, silent=10.0, join=30.0)
        self.round = 0
        self.faults = 0
        self.sent = {}
        self.useful = Counter()
        self.all_resolved = []
        self.net.site("a", [0, 1, 2, 3])
        self.net.site("b", [0, 1])
        self.net.site("c", [2, 3], slots=2, join=False)
        self.next_phase()

    def next_phase(self):
        self.round += 1
        self.specs = {
            i: spec(i, size, cost=i, start="1-0-0", bound=self.bound and i < 2)
            for i, size in enumerate((5, 20, 0, 45))
        }
        if self.alike:  # a broadcast, beside one that is a client's own
            body = Body([bytes(range(self.round, self.round + 45))])
            for i in (0, 2, 3):
                self.specs[i] = replace(
                    self.specs[i], form=form(45), body=body, check=body.digest()
                )
        self.net.done.clear()
        self.net.begin(list(self.specs.values()), self.rules, self.round)

    def over(self):
        return not self.net.server.open_tasks()

    # -- what happens ------------------------------------------------------------------------------
    @rule(who=st.integers(0, 2), direction=st.sampled_from(["up", "down"]), n=st.integers(1, 6))
    def move(self, who, direction, n):
        for _ in range(n):
            self.net.move(self.net.sites[who], direction)

    @rule()
    def all_arrives(self):
        self.net.settle()
        self.nobody_works_for_nothing()

    def nobody_works_for_nothing(self):
        """As far as no message was lost and no key was revoked: what a worker has been asked, it
        does, and nothing else, and its replies are whole.
        """
        if self.rules.deadline is not None or self.was_revoked:
            return
        tasks = self.net.server.tasks
        for site in self.net.sites:
            if site.conn and site.protocol.state is ClientState.READY and not site.hushed:
                for key in site.given:
                    assert (tasks[key.client].key, tasks[key.client].worker) == (key, site.name)
                for t in self.net.server.open_tasks():
                    if t.worker == site.name and t.status in WITH_WORKER:
                        assert t.status is TaskState.HANDED
                        assert site.protocol.task_state(t.key) is ClientTaskState.WORKING

    @rule(who=st.integers(0, 2))
    def connect(self, who):
        site = self.net.sites[who]
        if not site.conn and site.protocol.state is not ClientState.OVER:
            self.net.connect(site)

    @rule(who=st.integers(0, 2))
    def cut(self, who):
        self.faults += 1
        self.net.cut(self.net.sites[who])

    @rule(who=st.integers(0, 2), again=st.booleans(), fewer=st.booleans(), back=st.booleans())
    def forget(self, who, again, fewer, back):
        """The process is killed, and another takes its place, perhaps under its name."""
        self.faults += 1
        old = self.net.sites[who]
        self.net.cut(old)
        ids = old.protocol.join.ids
        self.net.sites[who] = type(old)(
            self.net,
            old.name if again else old.name + "'",
            ids[:1] if fewer else ids,
            old.protocol.join.slots,
        )
        if back:
            self.connect(who)
            self.all_arrives()

    @rule(who=st.integers(0, 2))
    def leave(self, who):
        """It ends by itself, and another takes its place."""
        self.faults += 1
        site = self.net.sites[who]
        self.net.settle()
        # None: it has no connection, or was refused over its new one, as where a key is revoked.
        worker = self.net.server.roster.by_conn.get(site.conn)
        site.do(site.protocol.leave("site policy"))
        self.net.settle()
        assert worker is None or not worker.held  # others do what it had
        self.forget(who, again=True, fewer=False, back=False)

    @rule(who=st.integers(0, 2))
    def come_back_over_another_connection(self, who):
        """Before the server knows that the last one has ended."""
        self.faults += 1
        site = self.net.sites[who]
        if site.conn and site.protocol.state is not ClientState.OVER:
            old = site.conn
            site.up.clear()
            site.down.clear()
            site.link.mark_cut(b"")
            site.do(site.protocol.closed())
            site.link.closed(b"")
            del self.net.by_conn[old]
            self.net.connect(site)
            self.net.settle()
            self.net.do(self.net.server.closed(old, self.net.now))
            self.net.link.closed(old, awaited=True)

    @precondition(lambda self: self.revokes)
    @rule(client=st.integers(0, 3), revoked=st.booleans())
    def revoke(self, client, revoked):
        self.faults += 1
        self.was_revoked = True
        (self.revoked.add if revoked else self.revoked.discard)(client)

    @rule(who=st.integers(0, 2), slots=st.integers(1, 3))
    def take_more_at_once(self, who, slots):
        site = self.net.sites[who]
        site.do(site.protocol.slots_changed(slots))

    @rule(who=st.integers(0, 2), client=st.integers(0, 3))
    def upload(self, who, client):
        """A reply is on its way to a slow link."""
        site = self.net.sites[who]
        site.do(site.protocol.uploading(client))

    @rule()
    def cancel(self):
        self.faults += 1
        self.net.do(self.net.server.cancel("enough", self.net.now))
        assert self.over()

    @rule(who=st.integers(0, 2), hushed=st.booleans(), seconds=st.sampled_from([0.0, 0.0, 11.0]))
    def hush(self, who, hushed, seconds):
        self.net.sites[who].hushed = hushed
        self.time_passes(seconds)

    def at_work(self, who):
        """One of the processes that have a task."""
        sites = [site for site in self.net.sites if site.given]
        return sites[who % len(sites)]

    def some_are_at_work(self):
        return any(site.given for site in self.net.sites)

    @precondition(some_are_at_work)
    @rule(
        who=st.integers(0, 2),
        which=st.integers(0, 3),
        size=st.sampled_from([0, 3, 8, 9, 30, 70]),
        bad=st.sampled_from([False, False, False, True]),
    )
    def answer(self, who, which, size, bad):
        site = self.at_work(who)
        key = sorted(site.given)[which % len(site.given)]
        said = b"%d/%d/%d/%s " % (key.round, key.client, key.attempt, site.name.encode())
        payload = (said + bytes(size))[:size]
        if bad and size:
            payload = b"!" + payload[1:]
            self.net.bad.add(payload)
        self.sent[key, site.name] = payload
        site.answer(key, payload)

    @precondition(some_are_at_work)
    @rule(
        who=st.integers(0, 2),
        which=st.integers(0, 3),
        moves=st.integers(1, 20),
        noticed=st.booleans(),
    )
    def answer_over_two_connections(self, who, which, moves, noticed):
        """The first ends when so many messages of a long reply have crossed."""
        self.faults += 1
        site = self.at_work(who)
        self.answer(who, which, 70, bad=False)
        for n in range(moves):
            self.net.move(site, "down" if n % 2 else "up")
        if noticed:
            self.net.cut(site)
            self.connect(self.net.sites.index(site))
        else:
            self.come_back_over_another_connection(self.net.sites.index(site))
        self.all_arrives()

    @precondition(some_are_at_work)
    @rule(who=st.integers(0, 2), again=st.booleans(), lacks=st.booleans())
    def fail(self, who, again, lacks):
        site = self.at_work(who)
        key = min(site.given)
        del site.given[key]
        failed = m.Failed(key=key, reason="broken", again=again, lacks=lacks)
        site.do(site.protocol.finish([(failed, NOTHING)]))

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.0]))
    def time_passes(self, seconds):
        self.net.pass_time(seconds)
        self.net.do(self.net.server.tick(self.net.now))  # of what its clients did then
        self.nothing_waits_without_need()

    def nothing_waits_without_need(self):
        """As far as the server knows when its time has passed."""
        server = self.net.server
        assert idle(server) == []
        workers = server.roster.workers
        for t in server.open_tasks():
            if t.status in WITH_WORKER:
                worker = workers[t.worker]
                assert worker.state is not WorkerState.SILENT
                if worker.here:
                    assert server.now - worker.heard <= self.rules.silent
                else:
                    assert worker.gone_at > server.now - self.rules.closed
                if t.running and self.rules.deadline is not None:
                    assert server.now - t.since < self.rules.deadline

    @precondition(lambda self: self.rules.deadline is not None)
    @rule(
        who=st.integers(0, 2),
        direction=st.sampled_from(["up", "down"]),
        how=st.sampled_from(["lose", "double", "swap", "spoil"]),
    )
    def fault(self, who, direction, how):
        wire = self.net.sites[who].up if direction == "up" else self.net.sites[who].down
        if not wire:
            return
        self.faults += 1
        if how == "lose":
            wire.popleft()
        elif how == "double":
            wire.appendleft(wire[0])
        elif how == "spoil":
            wire[0] = (*wire[0][:-1], wire[0][-1][:-1])
        elif len(wire) > 1:
            wire[0], wire[1] = wire[1], wire[0]

    @precondition(lambda self: self.over())
    @rule()
    def go_on(self):
        self.check_end()
        self.next_phase()

    # -- what must hold ----------------------------------------------------------------------------
    @invariant()
    def each_client_resolves_at_most_once_and_done_is_what_was_sent(self):
        if not hasattr(self, "net"):
            return
        count = Counter(r.key.client for r in self.net.resolved)
        assert not count or max(count.values()) == 1
        for r in self.net.resolved:
            if not r.reason:
                key = r.key
                assert self.net.done[key] in [p for (k, _), p in self.sent.items() if k == key]
        # A slot is taken by an open task only.
        for worker in self.net.server.roster.workers.values():
            for client in worker.queue:
                assert self.net.server.tasks[client].status in WITH_WORKER
            assert len(worker.queue) == len(set(worker.queue))
        # Nobody is asked twice at a time.
        server = self.net.server
        workers = server.roster.workers
        asked = [c for worker in workers.values() for c in worker.queue]
        assert len(asked) == len(set(asked))
        # A worker has the tasks that it was handed and has not answered in full, and no others.
        for name, worker in workers.items():
            mine = [t for t in server.tasks.values() if t.worker == name]
            assert worker.held == {t.spec.client for t in mine if t.status in WITH_WORKER}
            assert set(worker.queue) <= worker.held
            assert worker.held <= worker.ids
            assert all(server.tasks[c].running for c in worker.queue[: worker.slots])
        # What is known of all is what is known of each.
        ready = [worker for worker in workers.values() if worker.ready]
        assert server.roster.present() == {i for worker in ready for i in worker.ids}
        free = [worker.slots for worker in ready if len(worker.queue) < 2 * worker.slots]
        assert server.roster.free_slots == sum(free)
        assert {x.conn: x for x in workers.values() if x.conn is not None} == server.roster.by_conn
        # A client process works on what it was given and has not answered.
        for site in self.net.sites:
            states = [site.protocol.task_state(key) for key in site.given]
            assert set(states) <= {ClientTaskState.WORKING}

    def check_end(self):
        net = self.net
        assert sorted(r.key.client for r in net.resolved) == list(range(self.CLIENTS))
        done = [r for r in net.resolved if not r.reason]
        self.all_resolved += net.resolved
        if net.first is not None:
            assert len(done) <= net.first
        for r in done:
            self.useful["down"] += self.specs[r.key.client].body.size
            self.useful["up"] += len(net.done[r.key])
        assert {d: sum(k.values()) for d, k in useful(net.rows).items()} == {
            "up": self.useful["up"],
            "down": self.useful["down"],
        }
        assert [n for n in open_accounts(net.journal) if isinstance(n[3], m.Key)] == []
        assert all(not w.queue for w in net.server.roster.workers.values())
        server = net.server
        assert all(w.status in ENDED for w in server.tasks.values())
        assert net.spool == {}

    def teardown(self):
        if not hasattr(self, "net"):
            return
        net = self.net
        self.revoked.clear()
        for site in net.sites:
            site.hushed = False
        for _ in range(200):  # all work honestly from here on: the phase must end
            if self.over():
                break
            for site in net.sites:
                if not site.conn and site.protocol.state is not ClientState.OVER:
                    net.connect(site)
            net.settle()
            for site in net.sites:
                for key in list(site.given):
                    self.sent[key, site.name] = b"honest" * 10
                    site.answer(key, b"honest" * 10)
            net.settle()
            net.pass_time(1.0)
        else:
            raise AssertionError(f"the phase does not end: {net.server.waiting()}")
        self.each_client_resolves_at_most_once_and_done_is_what_was_sent()
        self.check_end()
        net.settle()
        if not self.faults and not net.cuts:
            left = [s.protocol.task_state(key) for s in net.sites for key, _ in self.sent]
            assert set(left) <= {ClientTaskState.GONE}
            for site in net.sites:  # all that was sent was received
                net.link.closed(site.conn)
                site.link.closed(b"")
            for direction in ("up", "down"):
                assert net.journal.book.totals[direction] == sum(
                    site.journal.book.totals[direction] for site in net.sites
                )
            if not any(note.event in ("away", "late") for note in net.notes) and not any(
                r.reason for r in self.all_resolved
            ):
                theirs = [row for site in net.sites for row in site.rows if row["type"] != "beat"]
                assert agreed([row for row in net.rows if row["type"] != "beat"], theirs)


class Abandoned(Federation):
    """The same, but at the end nobody comes back: time alone ends the phase."""

    def teardown(self):
        if not hasattr(self, "net"):
            return
        for site in self.net.sites:
            self.net.cut(site)
        for _ in range(4):
            self.net.pass_time(31.0)
        assert self.over()
        self.check_end()
        assert [w for w in self.net.server.roster.workers.values() if w.conn is None] == []


TestFederation = Federation.TestCase
TestAbandoned = Abandoned.TestCase
TestFederation.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAbandoned.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)

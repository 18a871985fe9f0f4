"""Asynchronous runs (`schedule: async` and `semi-sync`): updates in place of rounds.

    async       so many clients train at once; every `buffer` replies, as they come, are an update
    semi-sync   an update every `every` seconds, of the replies so far; then new tasks go out

    tasks go out -> a task ends -> its reply waits, or makes an update with those that wait
    update: accumulate in id order, server_update; new tasks go out; evaluate, record, save

`Schedule` says who is asked when, and what makes an update: events and the time go in, instructions
come out; nothing there sends or waits. Round t is the time in which update t is made: a task given
out in it starts from the model after update t - 1, and its reply may count in a later one. A client
is given one task a round at most, and none while its reply waits to be counted: so a round and a
client name a task. Which event is next, `Updates` finds out on the real clock, on the virtual one,
where `Order` sorts them whatever order replies arrive in, or as another run has it on record. A
checkpoint holds the tasks under way, and what went down with them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from fednet.errors import CannotGoOn
from fednet.experiment import selection
from fednet.experiment.clock import VirtualClock, reply_bytes
from fednet.experiment.faults import Replay
from fednet.protocol.tasks import LEFT, STATE_LOST, TaskSpec, end_of
from fednet.records.manifest import UnderWay
from fednet.server.checkpoint import SentDown
from fednet.server.exchange import (
    POLL_S,
    Asked,
    OpenExchange,
    OpenRound,
    ask,
    begins_again,
    check_states,
    complete_task,
    may_stop,
    new_exchange,
    record_bills,
    waiting_rules,
)
from fednet.server.io import LEFT_OUT
from fednet.server.rounds import Rounds
from fednet.wire.codec import Body
from fednet.wire.messages import Field


@dataclass(slots=True)
class Schedule:
    """training: by client, the round of its task. came: of each reply that waits, in the order in
    which they came, the round of its task. asked: who was given a task in this round.

    at_once: clients that train at a time. buffer: replies that make an update; None: what is there
    every `every` seconds does. order(round): the clients that can be asked in a round, the first
    first. comes(client, at): the second from which on it is there. at: seconds since the run began,
    on the run's clock.
    """

    at_once: int
    buffer: int | None
    every: float | None
    order: Callable[[int], Sequence[int]]
    comes: Callable[[int, float], float] = lambda client, at: at
    round: int = 1
    at: float = 0.0
    training: dict[int, int] = field(default_factory=dict)
    came: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def step(
        self, at: float, client: int | None = None, lost: bool = False
    ) -> tuple[list[int], bool]:
        """Takes an event, and returns the clients that are given a task then, and whether the
        replies that are there make an update, after which `next_round` comes. client: whose task
        ended; None: a round begins, or the second that `wakes` named has come. lost: no reply came
        of its task.
        """
        self.at = at
        if client is not None:
            round = self.training.pop(client)
            if not lost:
                self.came[client] = round
        if self.buffer is None:
            if client is None and self.came:
                return [], True
        elif len(self.came) >= self.buffer:
            return [], True
        given: list[int] = []
        if client is None or self.buffer is not None:  # else tasks go out when a period begins
            for free in self._free():
                if len(self.training) >= self.at_once:
                    break
                if self.comes(free, at) <= at:
                    self.training[free] = self.round
                    self.asked.add(free)
                    given.append(free)
        if self.training:
            return given, False
        # Nobody trains and nobody can be asked now. Where nobody comes later, and no period's end
        # does, what is there, if anything, has to do.
        if self.every is None:
            return [], self.wakes() == math.inf
        return [], not self.came

    def next_round(self) -> None:
        """The update is made; a step without a client comes next."""
        self.round += 1
        self.came, self.asked = {}, set()

    def wakes(self) -> float:
        """When something is to be done although no task ends; infinite: never."""
        if self.every is not None:
            return (math.floor(self.at / self.every) + 1) * self.every
        if len(self.training) >= self.at_once:
            return math.inf
        return min((self.comes(c, self.at) for c in self._free()), default=math.inf)

    def _free(self) -> list[int]:
        """Who might be given a task in this round, if it were there."""
        busy = {*self.training, *self.came, *self.asked}
        return [c for c in self.order(self.round) if c not in busy]


@dataclass(slots=True)
class Order:
    """On the virtual clock: which event is next. Of each task under way `least` is a second before
    which it cannot end, and `ends` the one at which it does, with why it has no reply, once that is
    known. An event is next as soon as nothing that is not known yet can come before it; of two at
    one second the smaller id is first.
    """

    least: dict[int, float] = field(default_factory=dict)
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)

    def given(self, client: int, least: float) -> None:
        self.least[client] = least

    def known(self, client: int, at: float, reason: str = "") -> None:
        """reason: why no reply comes of its task; "" where one does."""
        self.ends[client] = max(at, self.least[client]), reason

    def next(self, wakes: float) -> tuple[float, int | None, str] | None:
        """(second, client, reason); client None: at `wakes`, and no task ends before. None while
        that is not known.
        """
        first = min(((at, c) for c, (at, _) in self.ends.items()), default=(math.inf, -1))
        open = min(
            ((at, c) for c, at in self.least.items() if c not in self.ends),
            default=(math.inf, -1),
        )
        if min(first, open)[0] > wakes:
            return wakes, None, ""
        if not self.ends or open < first:
            return None
        at, client = first
        del self.least[client]
        return at, client, self.ends.pop(client)[1]


class Updates:
    """One server process's part in such a run. `rounds` has the steps that both ways of going on
    have in common.

    tasks: under way, or their replies wait to be counted. opened: the exchange in which the tasks
    of the open round are given out. given: who got one in it, in order. dropped: since the last
    update; restarted: the same, of clients that had lost their state. due: the update can be made.

    Where another run is replayed, the record says of each update the replies as they came, and who
    was given a task in the time before it. By these the run repeats to the bit, whatever the clock
    says now. A task whose reply was never counted is not handed out.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.config, self.io = rounds, rounds.config, rounds.io
        self.session, self.progress, self.carried = rounds.session, rounds.progress, rounds.carried
        self.clock, self.replay = rounds.clock, rounds.faults.replay
        self.tasks: dict[int, Asked] = {}
        self.opened: OpenExchange
        self.given: list[int] = []
        self.dropped: dict[int, str] = {}
        self.restarted: list[int] = []
        self.due = False
        config = self.config
        self.schedule = Schedule(
            config.cohort_size,
            config.buffer,
            config.schedule.every,
            lambda round: selection.order(config, round, selection.available(config, round)),
            self.session.world.comes,
            round=self.progress.round + 1,
            at=self.progress.at,
        )
        self._order = Order()
        self._ended: deque[int] = deque()  # clients whose tasks need not be waited for
        self._here: set[int] = set()  # in a replay: clients whose tasks have ended
        self._counted: set[tuple[int, int]] = set()  # in a replay: (client, round) of tasks
        self._began = time.monotonic() - self.schedule.at
        if self.replay is not None:
            rows = self.replay.rounds
            for row in rows.values():
                for client, stale in zip(row["completed"], row["staleness"]):
                    self._counted.add((client, row["round"] - stale))
            # All that is on record is handed out, as soon as its client is free.
            self.schedule.order = lambda round: rows[round]["selected"] if round in rows else ()
            self.schedule.comes = lambda client, at: at
            self.schedule.every = None
            self.schedule.at_once, self.schedule.buffer = config.clients, config.clients + 1

    # -- the run -----------------------------------------------------------------------------------
    def run(self) -> None:
        """All updates, then the last evaluation."""
        rounds, progress = self.rounds, self.progress
        more = rounds.more(progress.round)
        if more:
            self._take_up()
            self._open()
        while more:
            while not self.due:
                self._wait()
            round = self._made()
            self._save_tasks()
            progress.at = self.schedule.at
            early = rounds.may_open_early(round) and not rounds.too_few()
            if early:
                self._next_round(round)
            rounds.conclude(round)
            more = round.number < self.config.rounds and not progress.stopped
            if more and not early:
                self._next_round(round)
        self.io.cancel("the run ends")
        record_bills(self.session, self.tasks.values(), LEFT_OUT)
        while self.io.outcomes:
            self.io.unused(self.io.outcomes.popleft())
        rounds.end()

    def _next_round(self, before: OpenRound) -> None:
        self.carried = before.after
        self.schedule.next_round()
        self._open()

    def _open(self) -> None:
        """Opens a round: tasks go to those who are free."""
        self.rounds.gather(self.schedule.round)
        self.opened = new_exchange(self.session, self.schedule.round, 0, (), self.carried, 0.0)
        self.given, self._since = [], time.monotonic()
        self._second = self.schedule.at
        self._step(self.schedule.at)

    def _take_up(self) -> None:
        """What an earlier server had under way goes on."""
        session, progress, specs = self.session, self.progress, []
        experiment = session.experiment
        for client, saved in sorted(progress.under_way.items()):
            exchange = new_exchange(session, saved.round, 0, (), self.carried, saved.at)
            exchange.opened -= progress.at - saved.at
            down = self.rounds.sent_down[f"sent-{saved.sent}"]
            assert isinstance(down, SentDown)
            form = tuple(msgspec.json.decode(down.form, type=list[Field]))
            data = down.body.numpy().data
            cut = sum(f.size for f in form[: down.enrol])
            seen = experiment.down.decode(
                experiment.algorithm.exchanges[0].down,
                form[down.enrol :],
                data[cut:],
                experiment.agreed,
                fill=experiment.agreed,
            )
            spec = TaskSpec(
                client,
                form,
                Body([data]),
                bytes.fromhex(saved.sent),
                start=saved.start,
                state=self.carried.states.get(client, ""),
                keep=session.durable.get(client, ""),
                enrol=down.enrol,
                round=saved.round,
            )
            task = exchange.asked[client] = Asked(spec, saved.at)
            complete_task(session, exchange, task, seen)
            task.bytes, task.enrolled = saved.bytes, saved.enrolled
            self.schedule.training[client] = saved.round
            self._under_way(client, task)
            if not task.over:
                specs.append(spec)
        self.io.begin((self.schedule.round, 0, "train"), specs, waiting_rules(session))

    def _save_tasks(self) -> None:
        """A checkpoint has the tasks of clients that train, and what went down with them."""
        rounds, before = self.rounds, self.rounds.sent_down
        self.progress.under_way, rounds.sent_down = {}, {}
        for client in sorted(self.schedule.training):
            task, spec = self.tasks[client], self.tasks[client].spec
            self.progress.under_way[client] = UnderWay(
                round=task.spec.round,
                at=task.at,
                start=spec.start,
                sent=spec.check.hex(),
                bytes=task.bytes,
                enrolled=task.enrolled,
            )
            name = f"sent-{spec.check.hex()}"
            if name in before:
                rounds.sent_down[name] = before[name]
            elif name not in rounds.sent_down:
                form = msgspec.json.encode(list(spec.form)).decode()
                body = torch.frombuffer(bytearray(spec.body.whole()), dtype=torch.uint8)
                down = SentDown(form=form, enrol=spec.enrol, body=body)  # type: ignore[call-arg]
                rounds.sent_down[name] = down

    # -- tasks -------------------------------------------------------------------------------------
    def _step(self, at: float, client: int | None = None, lost: bool = False) -> None:
        """Hands out what the schedule gives after an event, see `Schedule.step`."""
        given, self.due = self.schedule.step(at, client, lost)
        specs = []
        self.opened.before = self.carried  # which a lost state may have changed
        for whom in given:
            self.opened.at, self.opened.opened = at, time.monotonic()
            task = ask(self.session, self.opened, whom)
            self._under_way(whom, task)
            self.given.append(whom)
            if not task.over:
                specs.append(task.spec)
        if given:
            training = sorted(self.schedule.training)
            self.rounds.display.round_started(self.schedule.round, self.config.rounds, training)
        if specs:
            self.io.add(self.schedule.round, specs)

    def _under_way(self, client: int, task: Asked) -> None:
        self.tasks[client] = task
        if self.replay is not None and (client, task.spec.round) not in self._counted:
            task.reason = "not counted"  # the record says when it ended
            return
        if task.over:
            self._ended.append(client)
        if self.replay is None and self.clock is not None:
            lost = task.reason or task.spec.lost
            self._order.given(client, self._end(self.clock, client, 0, lost)[0])

    def _wait(self) -> None:
        """Waits for the next event, and does what follows from it."""
        at, client, reason = self._event()
        if client is None and self.replay is not None:  # all that the record has are there
            self.schedule.at, self.due = at, True
            return
        if client is not None and reason:
            task = self.tasks[client]
            self.dropped[client] = reason
            task.reason = reason
            round, before, residuals = task.spec.round, self.carried, self.opened.residuals
            if begins_again(self.session, round, client, reason, residuals):
                # Its next task starts from an initial state.
                versions = {c: v for c, v in before.versions.items() if c != client}
                states = {c: s for c, s in before.states.items() if c != client}
                self.carried = replace(before, versions=versions, states=states)
                self.restarted.append(client)
            elif reason.startswith(STATE_LOST):
                check_states(self.session, round, self.dropped, len(before.versions))
            self.session.files.event("dropped", round, client, reason=reason)
            record_bills(self.session, [task])
            if reason.startswith("failed"):
                may_stop(self.session, round, client, reason.removeprefix("failed: "))
        self._step(at, client, bool(reason))

    # -- what happens next -------------------------------------------------------------------------
    def _event(self) -> tuple[float, int | None, str]:
        """Waits for the next event: (second, client, why no reply comes of its task); client None:
        no task ends then.
        """
        if self.replay is not None:
            return self._event_on_record(self.replay)
        if self.clock is not None:
            return self._event_on_clock(self.clock)
        while True:
            wakes = self.schedule.wakes()
            client = self._next_ended(min(POLL_S, max(0.0, wakes - self._now())))
            if client is not None:
                return self._now(), client, self.tasks[client].reason
            if self._now() >= wakes:
                return self._now(), None, ""
            self.session.watch.check()

    def _event_on_clock(self, clock: VirtualClock) -> tuple[float, int | None, str]:
        """In the order of the virtual clock, whatever order replies arrive in."""
        while True:
            event = self._order.next(self.schedule.wakes())
            if event is not None:
                return event
            client = self._next_ended(POLL_S)
            if client is not None:
                task = self.tasks[client]
                up = 0 if task.reply is None else reply_bytes(task.reply)
                self._order.known(client, *self._end(clock, client, up, task.reason))
            self.session.watch.check()

    def _event_on_record(self, replay: Replay) -> tuple[float, int | None, str]:
        """In the order that another run has on record. No client: the update is to be made."""
        row = replay.rounds[self.schedule.round]
        for client in self.schedule.training:
            reason = row["dropped"].get(str(client))
            if reason is not None and self.tasks[client].reason:
                return self._now(), client, reason
        left = [c for c in row["completed"] if c not in self.schedule.came]
        if not left:
            return self._now(), None, ""
        client, task = left[0], self.tasks[left[0]]
        while client not in self._here:
            ended = self._next_ended(POLL_S)
            if ended is not None:
                self._here.add(ended)
            self.session.watch.check()
        self._here.remove(client)
        if task.reason:
            raise CannotGoOn(
                f"faults.replay: client {client} completed its task of round {task.spec.round}, "
                f"and here did not: {task.reason}"
            )
        return self._now(), client, ""

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _next_ended(self, timeout_s: float) -> int | None:
        """The next client whose task has ended; None after a while."""
        if self._ended:
            return self._ended.popleft()
        outcome = self.io.wait(timeout_s)
        if outcome is None:
            return None
        key = outcome.key
        task = self.tasks.get(key.client)
        if key.purpose != "train" or task is None or task.spec.round != key.round or task.over:
            self.io.unused(outcome)  # of a task that has ended already
            return None
        task.reply, task.evaluation = outcome.reply, outcome.evaluation
        task.reason = outcome.reason
        return key.client

    def _end(self, clock: VirtualClock, client: int, up: int, lost: str) -> tuple[float, str]:
        """(when a task ends whose reply has so many bytes, why it does not count). A client that is
        lost is awaited for as long as one may be, and one that says that it lost its state is not.
        """
        task, deadline = self.tasks[client], self.config.round.deadline
        if lost.startswith(STATE_LOST):
            return task.at, lost
        if lost and lost != LEFT:
            return task.at + clock.patience, lost
        slow, delay = self.rounds.faults.time(task.spec.round, 0, client)
        took = clock.seconds(client, task.spec.cost, task.bytes, up, slow, delay, at=task.at)
        latest = math.inf if deadline is None else task.at + deadline
        end = math.inf if lost else task.at + sum(took.values())
        return end_of(end, task.at + task.leaves_s, latest)

    # -- an update ---------------------------------------------------------------------------------
    def _made(self) -> OpenRound:
        """Aggregates what came, as a round does with its replies."""
        rounds, came, at = self.rounds, self.schedule.came, self.schedule.at
        number, cohort = self.schedule.round, tuple(sorted(came))
        residuals, at_opened = self.opened.residuals, self.opened.at
        exchange = OpenExchange(
            number, 0, "train", cohort, self.carried, residuals, self._since, at_opened
        )
        for client in cohort:
            task = exchange.asked[client] = self.tasks.pop(client)
            task.staleness = number - came[client]
        exchange.restarted, self.restarted = self.restarted, []
        round = OpenRound.begun(exchange)
        record = round.record
        record.selected = self.given
        here = self.session.world.here(self._second)
        if here is not None:
            record.set(second=self._second, here=sum(here))
        if not rounds.aggregate(round, exchange.done.items()):
            # Its clients are free again: by the record a replay knows that, too.
            round.dropped |= dict.fromkeys(exchange.done, "the update was discarded")
        record.completed = [c for c in came if c in record.completed]
        record.staleness = [number - came[c] for c in record.completed]
        round.dropped, self.dropped = {**self.dropped, **round.dropped}, {}
        round.virtual = at - self.progress.at
        return round


def run_updates(rounds: Rounds) -> None:
    """All updates, then the last evaluation."""
    Updates(rounds).run()

"""Asynchronous runs (`schedule: async` and `semi-sync`): updates in place of rounds.

    async       so many clients train at once; every `buffer` replies, as they come, are an update
    semi-sync   an update every `every` seconds, of the replies so far; then new tasks go out

    tasks go out -> a task ends -> its reply waits, or makes an update with those that wait
    update: accumulate in id order, server_update; new tasks go out; evaluate, record, save

`Schedule` says who is asked when, and what makes an update: events and the time go in, instructions
come out; nothing there sends or waits. Round t is the time in which update t is made: a task given
out in it starts from the model after update t - 1, and its reply may count in a later one. A client
is given one task a round at most, and none while its reply waits to be counted: so a round and a
client name a task. `Arrivals` says which event is next: on the real clock, on the virtual one,
where `Order` sorts them whatever order replies arrive in, or as another run has it on record. A
checkpoint holds the tasks under way, and what went down with them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from fednet.algorithms.state import State
from fednet.errors import CannotGoOn
from fednet.experiment import selection
from fednet.experiment.clock import VirtualClock, reply_bytes
from fednet.experiment.faults import Faults, Replay
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT, STATE_LOST, Job
from fednet.records.manifest import UnderWay
from fednet.server.checkpoint import SentDown
from fednet.server.exchange import POLL_S, Asked, Exchange
from fednet.server.io import LEFT_OUT, Outcome, ServerIO
from fednet.server.round import OpenRound, may_overlap
from fednet.server.rounds import Rounds
from fednet.wire.codec import Body
from fednet.wire.messages import Field, Key


@dataclass(frozen=True, slots=True)
class Give:
    """A task for a client. at: seconds since the run began, on the run's clock."""

    client: int
    round: int
    at: float


@dataclass(frozen=True, slots=True)
class Update:
    """The replies that are there make an update: `came` has the round of each one's task. The
    caller answers with `next_round`.
    """

    round: int
    came: Mapping[int, int]
    at: float

    def staleness(self, client: int) -> int:
        """Updates made since the model that the client's reply started from."""
        return self.round - self.came[client]


@dataclass(slots=True)
class Schedule:
    """training: by client, the round of its task. came: of each reply that waits, in the order in
    which they came. asked: who was given a task in this round.

    at_once: clients that train at a time. buffer: replies that make an update; None: what is there
    every `every` seconds does. order(round): the clients that can be asked in a round, the first
    first. comes(client, at): the second from which on it is there.
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

    def begin(self) -> list[Give | Update]:
        """A round begins: tasks go to those who are free."""
        return self._fill()

    def replied(self, client: int, at: float) -> list[Give | Update]:
        self.at = at
        self.came[client] = self.training.pop(client)
        if self.buffer is not None and len(self.came) >= self.buffer:
            return [self._update()]
        return self._fill() if self.buffer is not None else self._stuck()

    def lost(self, client: int, at: float) -> list[Give | Update]:
        """No reply will come of the client's task."""
        self.at = at
        del self.training[client]
        return self._fill() if self.buffer is not None else self._stuck()

    def tick(self, at: float) -> list[Give | Update]:
        """The time that `wakes` named has come."""
        self.at = at
        if self.buffer is None and self.came:
            return [self._update()]
        return self._fill()

    def close(self, at: float) -> list[Give | Update]:
        """Makes the update of the replies that are there, where a recorded run did. at: the second
        of the run.
        """
        self.at = at
        return [self._update()]

    def next_round(self) -> None:
        """The update is made; `begin` comes next."""
        self.round += 1
        self.came, self.asked = {}, set()

    def wakes(self) -> float:
        """When something is to be done although no task ends; infinite: never."""
        if self.every is not None:
            return (math.floor(self.at / self.every) + 1) * self.every
        if len(self.training) >= self.at_once:
            return math.inf
        return min((self.comes(c, self.at) for c in self._free()), default=math.inf)

    # -- what follows ------------------------------------------------------------------------------
    def _free(self) -> list[int]:
        """Who might be given a task in this round, if it were there."""
        busy = {*self.training, *self.came, *self.asked}
        return [c for c in self.order(self.round) if c not in busy]

    def _fill(self) -> list[Give | Update]:
        gives: list[Give | Update] = []
        for client in self._free():
            if len(self.training) >= self.at_once:
                break
            if self.comes(client, self.at) <= self.at:
                self.training[client] = self.round
                self.asked.add(client)
                gives.append(Give(client, self.round, self.at))
        return gives or self._stuck()

    def _stuck(self) -> list[Give | Update]:
        """Nobody trains and nobody can be asked any more: what is there, if anything, has to do."""
        if self.training or (self.every is None and self.wakes() < math.inf):
            return []
        if self.every is not None and self.came:
            return []  # the period's end will come
        return [self._update()]

    def _update(self) -> Update:
        return Update(self.round, dict(self.came), self.at)


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


Event = tuple[float, int | None, str]
"""(second, client, why no reply comes of its task); client None: no task ends then."""


class Arrivals:
    """Events as they happen. check_stop(): called meanwhile; raises where the run is to stop."""

    def __init__(
        self,
        io: ServerIO,
        tasks: Mapping[int, Asked],
        schedule: Schedule,
        check_stop: Callable[[], None],
    ) -> None:
        self.io, self.tasks, self.schedule = io, tasks, schedule
        self.check_stop = check_stop
        self._over: deque[tuple[int, str]] = deque()  # tasks that need not be waited for
        self._began = time.monotonic() - schedule.at

    def given(self, client: int) -> None:
        task = self.tasks[client]
        if not task.wanted:
            self._over.append((client, task.reason))

    def due(self, at: float) -> Sequence[Give | Update]:
        """What follows where `next` named no client."""
        return self.schedule.tick(at)

    def next(self) -> Event:
        while True:
            wakes = self.schedule.wakes()
            ended = self._ended(min(POLL_S, max(0.0, wakes - self._now())))
            if ended is not None:
                return self._now(), *ended
            if self._now() >= wakes:
                return self._now(), None, ""
            self.check_stop()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _ended(self, timeout_s: float) -> tuple[int, str] | None:
        """The next client whose task has ended, and why without a reply; None after a while."""
        if self._over:
            return self._over.popleft()
        outcome = self.io.wait(timeout_s)
        if outcome is None:
            return None
        key = outcome.key
        task = self.tasks.get(key.client)
        known = task is not None and task.round == key.round and task.wanted
        if key.purpose != "train" or task is None or not known:
            self.io.unused(outcome)  # of a task that has ended already
            return None
        task.outcome = outcome
        return key.client, outcome.reason


class VirtualArrivals(Arrivals):
    """Events in the order of the virtual clock. A client that is lost is awaited for as long as one
    may be.
    """

    def __init__(
        self,
        io: ServerIO,
        tasks: Mapping[int, Asked],
        schedule: Schedule,
        check_stop: Callable[[], None],
        clock: VirtualClock,
        faults: Faults,
    ) -> None:
        super().__init__(io, tasks, schedule, check_stop)
        self._clock, self._faults, self._order = clock, faults, Order()

    def given(self, client: int) -> None:
        super().given(client)
        task = self.tasks[client]
        self._order.given(client, self._end(client, task, 0, task.reason or task.job.lost)[0])

    def next(self) -> Event:
        while True:
            event = self._order.next(self.schedule.wakes())
            if event is not None:
                return event
            ended = self._ended(POLL_S)
            if ended is not None:
                client, reason = ended
                task = self.tasks[client]
                up = 0 if task.reply is None else reply_bytes(task.reply)
                self._order.known(client, *self._end(client, task, up, reason))
            self.check_stop()

    def _end(self, client: int, task: Asked, up: int, lost: str) -> tuple[float, str]:
        """(when a task ends whose reply has so many bytes, why it does not count)."""
        if lost and lost != LEFT:
            return task.at + self._clock.patience, lost
        took = self._clock.seconds(
            client,
            task.job.cost,
            task.bytes,
            up,
            *self._faults.time(task.round, 0, client),
            at=task.at,
        )
        deadline = self._clock.config.round.deadline
        latest = math.inf if deadline is None else task.at + deadline
        end = math.inf if lost else task.at + sum(took.values())
        leaves = task.at + task.leaves_s
        if min(end, leaves) > latest:
            return latest, "deadline"
        return (leaves, LEFT) if end > leaves else (end, "")


class Replayed(Arrivals):
    """Events in the order that another run has on record: of each update the replies as they came,
    and who was given a task in the time before it. By these the run repeats to the bit, whatever
    the clock says now. A task whose reply was never counted is not handed out.
    """

    def __init__(
        self,
        io: ServerIO,
        tasks: Mapping[int, Asked],
        schedule: Schedule,
        check_stop: Callable[[], None],
        replay: Replay,
    ) -> None:
        super().__init__(io, tasks, schedule, check_stop)
        self._rows = replay.rounds
        self._counted = {
            (client, row["round"] - stale)
            for row in self._rows.values()
            for client, stale in zip(row["completed"], row["staleness"])
        }
        self._here: dict[int, str] = {}

    def selected(self, round: int) -> list[int]:
        return list(self._rows[round]["selected"]) if round in self._rows else []

    def given(self, client: int) -> None:
        task = self.tasks[client]
        if (client, task.round) in self._counted:
            return super().given(client)
        # The record says when it ended: `next` returns that.
        key = Key(task.round, 0, 0, client)
        task.outcome = Outcome(key, "not counted", task.reply)

    def due(self, at: float) -> Sequence[Give | Update]:
        return self.schedule.close(at)

    def next(self) -> Event:
        row: JsonDict = self._rows[self.schedule.round]
        for client in self.schedule.training:
            reason = row["dropped"].get(str(client))
            if reason is not None and self.tasks[client].reason:
                return self._now(), client, reason
        left = [c for c in row["completed"] if c not in self.schedule.came]
        if not left:
            return self._now(), None, ""
        while left[0] not in self._here:
            ended = self._ended(POLL_S)
            if ended is not None:
                self._here[ended[0]] = ended[1]
            self.check_stop()
        reason = self._here.pop(left[0])
        if reason:
            raise CannotGoOn(
                f"faults.replay: client {left[0]} completed its task of round "
                f"{self.tasks[left[0]].round}, and here did not: {reason}"
            )
        return self._now(), left[0], ""


class Updates:
    """One server process's part in such a run. `rounds` has the steps that both ways of going on
    have in common.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.config, self.io = rounds, rounds.config, rounds.io
        self.progress = rounds.progress
        self.carried = rounds.carried
        self.exchanges = rounds.exchanges
        self.tasks: dict[int, Asked] = {}  # under way, or their replies wait to be counted
        self.opened: Exchange  # in which the tasks of the open round are given out
        self.schedule = Schedule(
            self.config.cohort_size,
            self.config.buffer,
            self.config.schedule.every,
            self._order,
            rounds.exchanges.world.comes,
            round=self.progress.round + 1,
            at=self.progress.at,
        )
        self.arrivals = self._arrivals()
        self.given: list[int] = []  # in this round, in order
        self.dropped: dict[int, str] = {}  # since the last update
        self.restarted: list[int] = []  # the same, of clients that had lost their state

    def _arrivals(self) -> Arrivals:
        rounds, schedule = self.rounds, self.schedule
        common = self.io, self.tasks, schedule, rounds.watch.check
        if rounds.faults.replay is not None:
            replayed = Replayed(*common, rounds.faults.replay)
            # All that is on record is handed out, as soon as its client is free.
            schedule.order, schedule.every = replayed.selected, None
            schedule.comes = lambda client, at: at
            schedule.at_once, schedule.buffer = self.config.clients, self.config.clients + 1
            return replayed
        if rounds.clock is not None:
            return VirtualArrivals(*common, rounds.clock, rounds.faults)
        return Arrivals(*common)

    def _order(self, round: int) -> list[int]:
        return selection.order(self.config, round, selection.available(self.config, round))

    # -- the run -----------------------------------------------------------------------------------
    def run(self) -> None:
        """All updates, then the last evaluation."""
        rounds, progress = self.rounds, self.progress
        more = rounds.more(progress.round)
        update = self._take_up() if more else None
        while more:
            while update is None:
                update = self._act(self._event())
            round = self._made(update)
            progress.under_way, rounds.sent = saved(self.tasks, self.schedule.training, rounds.sent)
            progress.at = update.at
            more = update.round < self.config.rounds
            join = rounds.clients_join(round)
            early = more and may_overlap(self.config) and not rounds.attendance.short()
            early = early and not join
            update = self._next_round(round) if early else None
            rounds.conclude(round)
            more = more and not progress.stopped
            if more and not early:
                update = self._next_round(round)
        self._cancel()
        rounds.end()

    def _cancel(self) -> None:
        """Cancels the tasks under way; replies that are in no update are booked as not useful."""
        self.io.cancel("the run ends")
        self._not_counted(self.tasks.values())
        while self.io.outcomes:
            self.io.unused(self.io.outcomes.popleft())

    def _take_up(self) -> Update | None:
        """What an earlier server had under way goes on, and the round's tasks go out."""
        jobs = []
        for client, saved in sorted(self.progress.under_way.items()):
            task = self.tasks[client] = self._resumed(client, saved)
            self.schedule.training[client] = task.round
            self.arrivals.given(client)
            jobs += [task.job] if task.wanted else []
        rules = self.exchanges.rules()

        self.io.begin((self.schedule.round, 0, "train"), jobs, rules)
        return self._opened()

    def _next_round(self, before: OpenRound) -> Update | None:
        self.carried = before.after
        self.schedule.next_round()
        return self._opened()

    def _opened(self) -> Update | None:
        self.rounds.attendance.gather(self.schedule.round)
        residuals = dict(self.carried.residuals)
        self.opened = self.exchanges.prepared(self.schedule.round, 0, (), residuals)
        self.given, self._since = [], time.monotonic()
        self._second = self.schedule.at
        return self._act(self.schedule.begin())

    # -- tasks -------------------------------------------------------------------------------------
    def _act(self, instructions: Sequence[Give | Update]) -> Update | None:
        """Hands out what is given; returns the update that is to be made."""
        tasks = [self._give(i) for i in instructions if isinstance(i, Give)]
        jobs = [task.job for task in tasks if task.wanted]
        round = self.schedule.round
        if tasks:
            training = sorted(self.schedule.training)
            self.rounds.display.round_started(round, self.config.rounds, training)
        if jobs:
            self.io.add(round, jobs)
        return next((i for i in instructions if isinstance(i, Update)), None)

    def _of(self, client: int) -> tuple[str, str, str]:
        """What is known of a client's state: the version that is used next, its SHA-256, and the
        version that the last checkpoint has.
        """
        carried, durable = self.carried, self.rounds.durable
        return (
            carried.versions.get(client, ""),
            carried.states.get(client, ""),
            durable.get(client, ""),
        )

    def _give(self, give: Give) -> Asked:
        self.opened.at, self.opened.opened = give.at, time.monotonic()
        known = self._of(give.client)
        task = self.exchanges.ask(self.opened, give.client, self.carried.server, *known)
        self._under_way(give.client, task)
        self.given.append(give.client)
        self.arrivals.given(give.client)
        return task

    def _resumed(self, client: int, saved: UnderWay) -> Asked:
        """A task that an earlier server gave out."""
        exchange = self.exchanges.prepared(saved.round, 0, (), {}, saved.at)
        exchange.opened -= self.progress.at - saved.at
        down = self.rounds.sent[f"sent-{saved.sent}"]
        assert isinstance(down, SentDown)
        form = tuple(msgspec.json.decode(down.form, type=list[Field]))
        data = down.body.numpy().data
        cut = sum(f.size for f in form[: down.enrol])
        experiment = self.rounds.experiment
        seen = experiment.down.decode(
            experiment.algorithm.exchanges[0].down,
            form[down.enrol :],
            data[cut:],
            experiment.agreed,
            fill=experiment.agreed,
        )
        _, state, keep = self._of(client)
        job = Job(
            client,
            form,
            Body([data]),
            bytes.fromhex(saved.sent),
            start=saved.start,
            state=state,
            keep=keep,
            enrol=down.enrol,
        )
        task = self.exchanges.ask_again(exchange, job, seen)
        task.bytes, task.enrolled = saved.bytes, saved.enrolled
        self._under_way(client, task)
        return task

    def _under_way(self, client: int, task: Asked) -> None:
        self.tasks[client] = task
        task.job.round = task.round

    def _event(self) -> Sequence[Give | Update]:
        """Waits for what is next, and returns what follows from it."""
        at, client, reason = self.arrivals.next()
        if client is None:
            return self.arrivals.due(at)
        if not reason:
            return self.schedule.replied(client, at)
        task = self.tasks[client]
        self.dropped[client] = reason
        if reason.startswith(STATE_LOST):
            self._state_lost(task.round, client, reason)
        self.rounds.directory.event("dropped", task.round, client, reason=reason)
        self._not_counted([task], reason)
        if reason.startswith("failed"):
            self.exchanges.may_stop(task.round, client, reason.removeprefix("failed: "))
        return self.schedule.lost(client, at)

    def _state_lost(self, round: int, client: int, reason: str) -> None:
        """A client no longer has the state that its task started from: its next task starts from
        an initial one, or the run may end.
        """
        exchanges, carried = self.exchanges, self.carried
        if not exchanges.restarts(reason):
            lost = {c: r for c, r in self.dropped.items() if r.startswith(STATE_LOST)}
            return exchanges.check_states(round, lost, len(carried.versions))
        exchanges.forget(client, self.opened.residuals)
        self.carried = replace(
            carried,
            versions={c: v for c, v in carried.versions.items() if c != client},
            states={c: s for c, s in carried.states.items() if c != client},
        )
        self.restarted.append(client)
        exchanges.note_restarted(round, client, reason)

    # -- an update ---------------------------------------------------------------------------------
    def _made(self, update: Update) -> OpenRound:
        """Aggregates what came, as a round does with its replies."""
        rounds, exchange = self.rounds, self._exchange(update)
        round = OpenRound.begun(self.carried, exchange)
        record = round.record
        record.selected = self.given
        here = self.exchanges.world.here(self._second)
        if here is not None:
            record.set(second=self._second, here=sum(here))
        aggregation = rounds.aggregation(round)
        for client, reply in exchange.done.items():
            aggregation.add(client, reply)
            if reply.message.reported:
                round.reports[client] = dict(reply.message.reported)
        if not rounds.finish(round, aggregation):
            # Its clients are free again: by the record a replay knows that, too.
            round.dropped |= dict.fromkeys(exchange.done, "the update was discarded")
        record.completed = [c for c in update.came if c in record.completed]
        record.staleness = [update.staleness(c) for c in record.completed]
        round.evaluated = self.exchanges.evaluations(exchange)
        round.reported, round.warnings = dict(rounds.host.reported), list(rounds.host.warnings)
        round.dropped, self.dropped = {**self.dropped, **round.dropped}, {}
        round.virtual = update.at - self.progress.at
        for client in update.came:
            del self.tasks[client]
        return round

    def _exchange(self, update: Update) -> Exchange:
        """The replies that came, as the exchange of a round."""
        cohort = tuple(sorted(update.came))
        exchange = Exchange(
            update.round, 0, "train", cohort, self.opened.residuals, self._since, self.opened.at
        )
        for client in cohort:
            task = exchange.asked[client] = self.tasks[client]
            task.staleness = update.staleness(client)
        exchange.restarted, self.restarted = self.restarted, []
        return exchange

    def _not_counted(self, tasks: Iterable[Asked], reason: str = LEFT_OUT) -> None:
        """Books what crossed for replies that no update is made of."""
        for task in tasks:
            if task.reply is not None:
                self.exchanges.record_bill(task.reply, reason, task.staleness)


def saved(
    tasks: Mapping[int, Asked], training: Collection[int], before: Mapping[str, State]
) -> tuple[dict[int, UnderWay], dict[str, State]]:
    """(the tasks of clients that train, what a checkpoint keeps of what went down with them, by
    name). before: what it kept until now.
    """
    under_way: dict[int, UnderWay] = {}
    sent: dict[str, State] = {}
    for client in sorted(training):
        task, job = tasks[client], tasks[client].job
        under_way[client] = UnderWay(
            round=task.round,
            at=task.at,
            start=job.start,
            sent=job.check.hex(),
            bytes=task.bytes,
            enrolled=task.enrolled,
        )
        name = f"sent-{job.check.hex()}"
        if name in before:
            sent[name] = before[name]
        elif name not in sent:
            form = msgspec.json.encode(list(job.form)).decode()
            body = torch.frombuffer(bytearray(job.body.whole()), dtype=torch.uint8)
            sent[name] = SentDown(form=form, enrol=job.enrol, body=body)  # type: ignore[call-arg]
    return under_way, sent


def run_updates(rounds: Rounds) -> None:
    """All updates, then the last evaluation."""
    Updates(rounds).run()

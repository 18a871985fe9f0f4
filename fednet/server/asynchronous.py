"""Asynchronous runs (`schedule: async` and `semi-sync`): updates in place of rounds.

    async       so many clients train at once; every `buffer` replies, as they come, are an update
    semi-sync   an update every `every` seconds, of the replies so far; then new tasks go out

    tasks go out -> a task ends -> its reply waits, or makes an update with those that wait
    update: accumulate in id order, server_update; new tasks go out; evaluate, record, save

Who is asked when, and what makes an update, says the schedule (`Buffer` or `Period`). Which event
is next, its source says (sources.py), or the record of another run (`RecordedEvents`). A checkpoint
holds the tasks under way, and what went down with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

import msgspec
import torch

from fednet.errors import CannotGoOn
from fednet.experiment import selection
from fednet.journal.book import LEFT_OUT
from fednet.protocol.tasks import STATE_LOST
from fednet.records.manifest import UnderWay
from fednet.server.checkpoint import SentDown
from fednet.server.exchanges import Exchanges
from fednet.server.faults import Replay
from fednet.server.faulty_protocol import FaultySpec
from fednet.server.open_round import OpenExchange, OpenRound, RunState
from fednet.server.rounds import Rounds
from fednet.server.schedule import Buffer, Period, RecordedUpdates
from fednet.server.sources import POLL_S, AskedClient, RealTime, ScheduleEvent, SimulatedTime
from fednet.server.watch import ServerOptions
from fednet.wire.body import Body
from fednet.wire.messages import Field


class Updates(Rounds):
    """One server process's part in such a run.

    Where another run is replayed, the record says of each update the replies as they came, and who
    was given a task in the time before it. By these the run repeats to the bit, whatever the clock
    says now. A task whose reply was never counted is not handed out.
    """

    schedule: Buffer

    def __init__(self, exchanges: Exchanges, how: ServerOptions) -> None:
        super().__init__(exchanges, how)
        self.tasks: dict[int, AskedClient] = {}  # under way, or their replies wait to be counted
        self.latest: RunState  # after the last update; `open` sets it
        self.opened: OpenExchange  # in which the tasks of the open round are given out
        self._since = 0.0  # when that round began, on the monotonic clock
        self._second = 0.0  # the second of the run at which it began
        self.given: list[int] = []  # who got a task in the exchange that is open, in order
        self.dropped: dict[int, str] = {}  # since the last update
        self.restarted: list[int] = []  # since the last update: clients that had lost their state
        self._counted: set[tuple[int, int]] = set()  # in a replay: (client, round) of tasks

    # -- the run -----------------------------------------------------------------------------------
    def open(self, after: OpenRound | None) -> None:
        """Tasks go to those who are free."""
        if after is None:
            self._begin()
        else:
            self.latest = after.after
            self.schedule.next_round()
        schedule = self.schedule
        self.await_enough_clients(schedule.round)
        self.opened = self.exchanges.new(schedule.round, 0, (), self.latest, 0.0)
        self.given = []
        self._since = time.monotonic()
        self._second = schedule.at
        self._give(schedule.at, schedule.take_event(schedule.at))

    def can_begin(self, round: OpenRound) -> bool:
        return True

    def close(self) -> OpenRound:
        round = self._make_update()
        self._save_tasks()
        self.progress.at = self.schedule.at
        return round

    def end(self) -> None:
        self.clients.cancel("the run ends")
        self.exchanges.record_verdict(self.tasks.values(), LEFT_OUT)
        self.clients.discard_all()
        super().end()

    # -- what an earlier server left ---------------------------------------------------------------
    def _begin(self) -> None:
        """The run's clock goes on, and with it the tasks that were under way."""
        progress = self.progress
        replay = self.faults.replay
        self.latest = self.carried
        self.schedule = self._schedule(progress.round + 1, progress.at)
        real = RealTime(self.clients, self.tasks, time.monotonic() - progress.at)
        self.source = real
        if replay is not None:
            for row in replay.rounds.values():
                for client, stale in zip(row["completed"], row["staleness"]):
                    self._counted.add((client, row["round"] - stale))
            self.source = RecordedEvents(replay, self.schedule, real)
        elif self.clock is not None:
            self.source = SimulatedTime(real, self._end)
        self._take_up()

    def _schedule(self, round: int, at: float) -> Buffer:
        config = self.config
        replay = self.faults.replay
        if replay is not None:
            rows = replay.rounds
            # All that is on record is handed out, as soon as its client is free.
            return RecordedUpdates(
                config.clients + 1,
                config.clients,
                lambda round: rows[round]["selected"] if round in rows else (),
                round=round,
                at=at,
            )

        def order(round: int) -> list[int]:
            return selection.order(config, round, selection.available(config, round))

        comes = self.conditions.world.comes
        every = config.schedule.every
        if every is not None:
            return Period(0, config.cohort_size, order, comes, round, at, every=every)
        assert config.buffer is not None
        return Buffer(config.buffer, config.cohort_size, order, comes, round, at)

    def _take_up(self) -> None:
        """What an earlier server had under way goes on."""
        progress = self.progress
        specs = list[FaultySpec]()
        experiment = self.setup.experiment
        for client, saved in sorted(progress.under_way.items()):
            exchange = self.exchanges.new(saved.round, 0, (), self.latest, saved.at)
            exchange.opened -= progress.at - saved.at
            down = self.sent_down[f"sent-{saved.sent}"]
            assert isinstance(down, SentDown)
            form = tuple(msgspec.json.decode(down.form, type=list[Field]))
            body = Body([down.body.numpy().data])
            _, broadcast = body.split(form, down.enrol)
            seen = experiment.down.decode(
                experiment.algorithm.exchanges[0].down,
                form[down.enrol :],
                broadcast,
                experiment.initial_shared,
                fill=experiment.initial_shared,
            )
            spec = FaultySpec(
                client,
                form,
                body,
                bytes.fromhex(saved.sent),
                start=saved.start,
                state=self.latest.states.get(client, ""),
                keep=self.records.durable.get(client, ""),
                enrol=down.enrol,
                round=saved.round,
            )
            task = exchange.asked[client] = AskedClient(spec, saved.at)
            self.exchanges.fill_in(exchange, task, seen)
            task.bytes = saved.bytes
            task.enrolled = saved.enrolled
            self.schedule.training[client] = saved.round
            self._under_way(client, task)
            if not task.over:
                specs.append(spec)
        self.clients.open((self.schedule.round, 0, "train"), specs, self.exchanges.deadline_s())

    def _save_tasks(self) -> None:
        """A checkpoint has the tasks of clients that train, and what went down with them."""
        before = self.sent_down
        self.sent_down = {}
        self.progress.under_way = {}
        for client in sorted(self.schedule.training):
            task = self.tasks[client]
            spec = task.spec
            self.progress.under_way[client] = UnderWay(
                round=spec.round,
                at=task.at,
                start=spec.start,
                sent=spec.check.hex(),
                bytes=task.bytes,
                enrolled=task.enrolled,
            )
            name = f"sent-{spec.check.hex()}"
            if name in before:
                self.sent_down[name] = before[name]
            elif name not in self.sent_down:
                form = msgspec.json.encode(list(spec.form)).decode()
                body = torch.frombuffer(bytearray(spec.body.to_bytes()), dtype=torch.uint8)
                down = SentDown(form=form, enrol=spec.enrol, body=body)  # type: ignore[call-arg]
                self.sent_down[name] = down

    # -- tasks -------------------------------------------------------------------------------------
    def _give(self, at: float, clients: list[int]) -> None:
        """Hands out their tasks."""
        specs = []
        self.opened.before = self.latest  # which a lost state may have changed
        for client in clients:
            self.opened.at = at
            self.opened.opened = time.monotonic()
            task = self.exchanges.ask(self.opened, client)
            self._under_way(client, task)
            self.given.append(client)
            if not task.over:
                specs.append(task.spec)
        if clients:
            training = sorted(self.schedule.training)
            self.display.round_started(self.schedule.round, self.config.rounds, training)
        if specs:
            self.clients.add(self.schedule.round, specs)

    def _under_way(self, client: int, task: AskedClient) -> None:
        self.tasks[client] = task
        if self.faults.replay is not None and (client, task.spec.round) not in self._counted:
            task.reason = "not counted"  # the record says when it ended
        else:
            self.source.expect([client])

    def take_event(self, event: ScheduleEvent) -> None:
        """What follows from an event: a task has ended, or the second of the schedule has come."""
        at, client, reason = event
        if client is not None and reason:
            task = self.tasks[client]
            self.dropped[client] = reason
            task.reason = reason
            round = task.spec.round
            before = self.latest
            residuals = self.opened.residuals
            if self.exchanges.begin_again(round, client, reason, residuals):
                # Its next task starts from an initial state.
                versions = {c: v for c, v in before.versions.items() if c != client}
                states = {c: s for c, s in before.states.items() if c != client}
                self.latest = replace(before, versions=versions, states=states)
                self.restarted.append(client)
            elif reason.startswith(STATE_LOST):
                self.exchanges.check_lost(round, self.dropped, len(before.versions))
            self.records.files.event("dropped", round, client, reason=reason)
            self.exchanges.record_verdict([task])
            if reason.startswith("failed"):
                self.exchanges.may_stop(round, client, reason.removeprefix("failed: "))
        self._give(at, self.schedule.take_event(at, client, reason))

    def _end(self, client: int, up: int | None) -> tuple[float, str]:
        """When a task ends on the virtual clock, and why it has no reply then, see
        `SimulatedTime`.
        """
        assert self.clock is not None
        task = self.tasks[client]
        if up is None:  # a second before which it does not end
            lost = task.reason or task.spec.lost
            return self.exchanges.end_on(task, 0, task.at, 0, lost)
        return self.exchanges.end_on(task, 0, task.at, up, task.reason)

    # -- an update ---------------------------------------------------------------------------------
    def _make_update(self) -> OpenRound:
        """Aggregates what came, as a round does with its replies."""
        came = self.schedule.came
        at = self.schedule.at
        number = self.schedule.round
        cohort = tuple(sorted(came))
        residuals = self.opened.residuals
        at_opened = self.opened.at
        exchange = OpenExchange(
            number, 0, "train", cohort, self.latest, residuals, self._since, at_opened
        )
        for client in cohort:
            task = exchange.asked[client] = self.tasks.pop(client)
            task.staleness = number - came[client]
        exchange.restarted = self.restarted
        self.restarted = []
        round = OpenRound.of(exchange)
        record = round.record
        record.selected = self.given
        here = self.conditions.world.here(self._second)
        if here is not None:
            record.set(second=self._second, here=sum(here))
        if not self.aggregate(round):
            # Its clients are free again: by the record a replay knows that, too.
            round.dropped |= dict.fromkeys(exchange.done, "the update was discarded")
        record.completed = [c for c in came if c in record.completed]
        record.staleness = [number - came[c] for c in record.completed]
        round.dropped = {**self.dropped, **round.dropped}
        self.dropped = {}
        round.virtual = at - self.progress.at
        return round


class RecordedEvents:
    """The events of another run's updates, in the order of its record. An event without a client:
    the update is to be made.
    """

    def __init__(self, replay: Replay, schedule: Buffer, real: RealTime) -> None:
        self._replay = replay
        self._schedule = schedule
        self._real = real
        self._here: set[int] = set()  # clients whose tasks have ended

    def expect(self, clients: Iterable[int]) -> None:
        self._real.expect(clients)

    def next(self, wakeup: float) -> ScheduleEvent:
        row = self._replay.rounds[self._schedule.round]
        tasks = self._real.tasks
        real = self._real
        for client in self._schedule.training:
            reason = row["dropped"].get(str(client))
            if reason is not None and tasks[client].reason:
                return ScheduleEvent(real.now(), client, reason)
        left = [c for c in row["completed"] if c not in self._schedule.came]
        if not left:
            return ScheduleEvent(real.now(), None)
        client = left[0]
        task = tasks[client]
        while client not in self._here:
            ended = real.next_ended(POLL_S)
            if ended is not None:
                self._here.add(ended)
            real.clients.watch.check()
        self._here.remove(client)
        if task.reason:
            raise CannotGoOn(
                f"faults.replay: client {client} completed its task of round {task.spec.round}, "
                f"and here did not: {task.reason}"
            )
        return ScheduleEvent(real.now(), client)

"""A run that waits for nobody (`schedule: async` and `semi-sync`): updates in place of rounds.

    tasks go out -> a task ends -> its reply waits, or makes an update with those that wait
    update: fold in id order, finish; tasks go out anew; judge, record, checkpoint

Who is asked when, and what makes an update, is `schedule`'s to say; which event is next
is `arrivals`'. A checkpoint holds the tasks under way, and what went down with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fednet.config import Config
from fednet.experiment import selection
from fednet.protocol.instructions import Instruction
from fednet.protocol.tasks import STATE_LOST
from fednet.server.asking import Phase
from fednet.server.io import Outcome
from fednet.server.ongoing.arrivals import Arrivals, Replayed, VirtualArrivals
from fednet.server.ongoing.schedule import Give, Schedule, Update
from fednet.server.ongoing.underway import PendingTask, PendingTasks
from fednet.server.round import Round, may_overlap, reached

if TYPE_CHECKING:
    from fednet.server.rounds import Rounds


class Updates:
    """One server process's part in such a run. `rounds` has the steps that both ways of going on
    have in common.
    """

    def __init__(self, rounds: Rounds) -> None:
        self.rounds, self.config, self.io = rounds, rounds.config, rounds.io
        self.parts, self.progress = rounds.parts, rounds.progress
        self.carried = rounds.carried
        self.tasks = PendingTasks(rounds.phases.asking, self.progress.at)
        self.schedule = Schedule(
            self.config.cohort_size,
            self.config.buffer,
            self.config.schedule.every,
            self._order,
            rounds.phases.asking.world.comes,
            round=self.progress.round + 1,
            at=self.progress.at,
        )
        self.arrivals = self._arrivals()
        self.unasked = None if self.parts.faults.replay is not None else Unasked(self.config)
        self.given: list[int] = []  # in this round, in order
        self.dropped: dict[int, str] = {}  # since the last update
        self.restarted: list[int] = []  # the same, of clients that had lost their state

    def _arrivals(self) -> Arrivals:
        parts, schedule = self.parts, self.schedule
        common = self.io, self.tasks, schedule, parts.watch.check
        if parts.faults.replay is not None:
            replayed = Replayed(*common, parts.faults.replay)
            # All that is on record is handed out, as soon as its client is free.
            schedule.order, schedule.every = replayed.selected, None
            schedule.comes = lambda client, at: at
            schedule.at_once, schedule.buffer = self.config.clients, self.config.clients + 1
            return replayed
        if parts.clock is not None:
            return VirtualArrivals(*common, parts.clock, parts.faults)
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
            progress.under_way, rounds.sent = self.tasks.saved(self.schedule.training, rounds.sent)
            progress.at = update.at
            more = update.round < self.config.rounds
            early = more and may_overlap(self.config) and not rounds.attendance.short()
            update = self._next_round(round) if early else None
            rounds.conclude(round)
            rounds.give_up(round)
            progress.stopped = reached(self.config, progress) or ""
            more = more and not progress.stopped
            if more and not early:
                update = self._next_round(round)
        self.io.call(self._over)
        rounds.end()

    def _over(self, now: float) -> list[Instruction]:
        """What is under way is called off; what came, and is in no update, was of no use."""
        protocol = self.io.protocol
        called_off = protocol.cancel("the run ends", now)
        return [*called_off, *protocol.decide(dict.fromkeys(protocol.work, False))]

    def _take_up(self) -> Update | None:
        """What an earlier server had under way goes on, and the round's tasks go out."""
        jobs = []
        for client, saved in sorted(self.progress.under_way.items()):
            task = self.tasks.resume(client, saved, self.rounds.sent, *self._of(client)[1:])
            self.schedule.training[client] = task.round
            self.arrivals.given(client)
            jobs += [task.job] if task.wanted else []
        rules = self.rounds.phases.rules()

        self.io.begin((self.schedule.round, 0, "train"), jobs, rules)
        return self._opened()

    def _next_round(self, before: Round) -> Update | None:
        self.carried = before.after
        self.schedule.next_round()
        return self._opened()

    def _opened(self) -> Update | None:
        self.rounds.attendance.gather(self.schedule.round)
        self.tasks.open(self.schedule.round, dict(self.carried.residuals))
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

    def _give(self, give: Give) -> PendingTask:
        task = self.tasks.give(give.client, give.at, self.carried.server, *self._of(give.client))
        self.given.append(give.client)
        self.arrivals.given(give.client)
        return task

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
        self.parts.directory.event("dropped", task.round, client, reason=reason)
        self._settle({client: False}, {}, reason)
        if reason.startswith("failed"):
            self.rounds.phases.may_stop(task.round, client, reason.removeprefix("failed: "))
        return self.schedule.lost(client, at)

    def _state_lost(self, round: int, client: int, reason: str) -> None:
        """A client no longer has the state that its task started from: its next task starts from
        an initial one, or the run may end.
        """
        phases, carried, phase = self.rounds.phases, self.carried, self.tasks.phase
        if not phases.restarts(reason):
            lost = {c: r for c, r in self.dropped.items() if r.startswith(STATE_LOST)}
            return phases.check_states(round, lost, len(carried.versions))
        assert phase is not None
        phases.forget(client, phase.residuals)
        self.carried = replace(
            carried,
            versions={c: v for c, v in carried.versions.items() if c != client},
            states={c: s for c, s in carried.states.items() if c != client},
        )
        self.restarted.append(client)
        phases.say_restarted(round, client, reason)

    # -- an update ---------------------------------------------------------------------------------
    def _made(self, update: Update) -> Round:
        """Folds what came, as a round does with its replies."""
        rounds, phase = self.rounds, self._phase(update)
        round = Round.begun(self.carried, phase)
        record = round.record
        record.selected = self.given
        here = rounds.phases.asking.world.here(self._second)
        if here is not None:
            record.set(second=self._second, here=sum(here))
        aggregation = rounds.aggregation(round)
        for client in phase.cohort:
            reply = phase.outcomes[client].reply
            assert reply is not None  # an update is made of replies
            phase.done[client] = reply
            aggregation.add(client, reply)
            if reply.reported:
                round.reports[client] = dict(reply.reported)
        if not rounds.finish(round, aggregation):
            # Its clients are free again: by the record a replay knows that, too.
            round.dropped |= dict.fromkeys(phase.done, "the update was void")
        record.completed = [c for c in update.came if c in record.completed]
        record.staleness = [update.staleness(c) for c in record.completed]
        round.judged = rounds.phases.judged(phase)
        round.reported, round.warnings = dict(rounds.host.reported), list(rounds.host.warnings)
        self._look_for_unasked(update, round)
        round.dropped, self.dropped = {**self.dropped, **round.dropped}, {}
        round.virtual = update.at - self.progress.at
        stale = {c: update.staleness(c) for c in update.came}
        self._settle({c: c in phase.done for c in update.came}, stale)
        for client in update.came:
            del self.tasks[client]
        return round

    def _look_for_unasked(self, update: Update, round: Round) -> None:
        """Says so where a client that is there is asked nothing any more: a mistake of this
        server's, which nobody would notice otherwise.
        """
        if self.unasked is None:
            return
        protocol, schedule = self.io.protocol, self.schedule

        def look() -> tuple[frozenset[int], set[int]]:
            return protocol.present(), {work.job.client for work in protocol.open()}

        here, busy = self.io.ask(look)
        busy |= self.io.ended() | {client for client, task in self.tasks.items() if task.over}
        free = [
            c for c in schedule.order(update.round) if schedule.comes(c, update.at) <= update.at
        ]
        limit = self.unasked.limit
        for client in self.unasked.counted(here.intersection(free) - busy):
            text = f"client {client} is there, and was asked nothing in {limit} updates"
            self.parts.directory.event("not_asked", update.round, client, updates=limit)
            self.rounds.display.note(f"round {update.round}: {text}")
            round.warnings.append(text)

    def _phase(self, update: Update) -> Phase:
        """The replies that came, as the exchange of a round."""
        of_round, cohort = self.tasks.phase, tuple(sorted(update.came))
        assert of_round is not None
        tasks = {c: self.tasks[c] for c in cohort}
        phase = Phase(
            update.round,
            0,
            "train",
            cohort,
            {c: t.job.start for c, t in tasks.items()},
            {c: t.seen for c, t in tasks.items()},
            of_round.residuals,
            self._since,
        )
        phase.restarted, self.restarted = self.restarted, []
        phase.enrolled = {c for c, t in tasks.items() if t.enrolled}
        phase.staleness = {c: update.staleness(c) for c in cohort}
        for client, task in tasks.items():
            phase.outcomes[client] = Outcome(phase.name, client, "", task.reply, task.verdict)
        return phase

    def _settle(self, useful: dict[int, bool], staleness: dict[int, int], reason: str = "") -> None:
        """What crossed for these clients goes into the book. reason: why it is of no use."""

        self.io.settle(useful, staleness)
        for client in useful:
            reply = self.tasks[client].reply
            if reply is not None:
                why = reason or ("" if useful[client] else "left out")
                self.parts.accounts.replay(reply.key, why if reply.earlier else "sent again")


class Unasked:
    """Counts for how many updates in a row each client was free and asked nothing. limit: so many
    are a mistake.

    Where all clients train at once, whoever is free is asked in the next round. Else a free client
    is drawn with a chance of at least b / N, of N clients where an update frees the places of b:
    to be passed over in 20 N / b rounds in a row has a chance of exp(-20).
    """

    def __init__(self, config: Config) -> None:
        self.limit = 3
        if config.cohort_size < config.clients:
            self.limit = math.ceil(20 * config.clients / (config.buffer or 1))
        self._rows: dict[int, int] = {}

    def counted(self, free: Collection[int]) -> list[int]:
        """free: those who had nothing to do as an update was made. Returns for whom it is one too
        many: each once, until it is asked again.
        """
        self._rows = {client: self._rows.get(client, 0) + 1 for client in sorted(free)}
        return [client for client, row in self._rows.items() if row == self.limit]

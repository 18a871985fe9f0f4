"""A run in rounds, top to bottom, and the steps that it is made of.

    open: select the cohort, broadcast
    exchange: collect the replies, add them up in id order, make the next server state
    conclude: evaluate, record, checkpoint

The next round's broadcast leaves before this round is evaluated and checkpointed, so that the
clients train meanwhile; the records and the bits are the same either way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence

from fednet import records
from fednet.algorithms.base import State, Tensors
from fednet.buffers import collect_in_time
from fednet.errors import CannotGoOn, ClientsJoin, Stopped
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock
from fednet.experiment.faults import Faults
from fednet.experiment.rundir import RunDirectory
from fednet.experiment.store import on_disk
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.records import reading
from fednet.records.manifest import RunProgress
from fednet.server import exports
from fednet.server.aggregation import Aggregation, filling
from fednet.server.checkpoint import Checkpoints, Memories, Residuals, kept
from fednet.server.evaluation import Evaluator, client_lines
from fednet.server.exchange import Exchange, Exchanges, RunState
from fednet.server.growth import Joining
from fednet.server.inbox import Inbox
from fednet.server.io import ServerIO
from fednet.server.resources import Resources
from fednet.server.round import OpenRound, add_exchange, fitted, may_overlap, predict, reached
from fednet.server.watch import Attendance, Watch
from fednet.training.hosts import ServerHost
from fednet.wire.ledger import Tally, add_kinds


def run_rounds(rounds: Rounds) -> None:
    """All rounds, then the last evaluation."""
    config, progress = rounds.config, rounds.progress
    number = progress.round + 1
    round = rounds.open(number, rounds.carried) if rounds.more(progress.round) else None
    while round is not None:
        rounds.exchange(round)
        join = rounds.clients_join(round)
        early = round.number < config.rounds and may_overlap(config) and not join
        early = early and rounds.attendance.ready(rounds.second(round.virtual))
        ahead = None
        if early:
            ahead = rounds.open(round.number + 1, round.after, round.virtual)
        rounds.conclude(round)
        if ahead is None and rounds.more(round.number):
            ahead = rounds.open(round.number + 1, round.after)
        round = ahead
    rounds.end()


class Rounds:
    """One server process's part in a run, as steps that a driver (`run_rounds`, or `run_updates` in
    asynchronous.py) takes in its order. clock: None where time is real. callbacks: take each
    record.
    """

    def __init__(
        self,
        run_id: str,
        *,
        experiment: Experiment,
        directory: RunDirectory,
        io: ServerIO,
        checkpoints: Checkpoints,
        inbox: Inbox,
        host: ServerHost,
        faults: Faults,
        clock: VirtualClock | None,
        watch: Watch,
        exchanges: Exchanges,
        evaluator: Evaluator,
        resources: Resources,
        joining: Joining,
        callbacks: Sequence[Callable[[records.Round], None]] = (),
    ) -> None:
        self.experiment, self.config = experiment, experiment.config
        self.method, self.host, self.faults, self.clock = experiment.algorithm, host, faults, clock
        self.directory, self.io, self.checkpoints = directory, io, checkpoints
        self.inbox = inbox
        self.watch, self.display, self.callbacks = watch, watch.display, callbacks
        self.exchanges, self.evaluator, self.resources = exchanges, evaluator, resources
        self._joining, self._clients_then = joining, self.config.clients
        self.progress = RunProgress(run=run_id, clients=self.config.clients)
        self.carried: RunState  # once begun
        self.durable: dict[int, str] = {}  # versions of the clients' states in the last checkpoint
        key, drawn = checkpoints.folder / "noise.key", checkpoints.exists
        self._noise = privacy.noise_of(self.config, "server", key, drawn)
        self._accountant = privacy.Accountant(self.config) if self.config.privacy.noise else None
        self._memories = Memories(checkpoints.rows)
        self._lost: dict[int, int] = {}  # by client whose state is lost: the round it was missed in
        self.sent: dict[str, State] = {}  # what tasks under way need for a resume, by name
        self.attendance = Attendance(self.config, exchanges.world, watch, faults.replay)
        self._recorded = time.monotonic()
        self._concluding = False

    # -- the run -----------------------------------------------------------------------------------
    def begin(
        self,
        resumed: tuple[State, RunProgress, Residuals | None] | None,
        added: Sequence[int] = (),
    ) -> None:
        """Fresh state, or what a checkpoint holds. added: clients that join the run now."""
        if resumed is None:
            first = self.method.init_server(
                self.experiment.setting.initial.select(self.experiment.shared)
            )
            server = on_disk(self.method.prepare(first, self.host), self.checkpoints.rows)
            self.carried = RunState(server, {}, {}, {})
        else:
            server, progress, more = resumed
            self.progress = progress
            residuals = self._memories.read(more) if more is not None else {}
            self.carried = RunState(server, progress.versions, progress.states, residuals)
            self.durable = dict(progress.versions)
            self.sent = kept(self.checkpoints, progress.under_way)
            progress.finished = progress.finished and not self.more(progress.round)
        if self.config.round.open is not None:  # an error now, rather than when a client asks
            n = self.config.training_clients
            self.method.with_more_clients(self.carried.server, n, n + 1)
        if added:
            self.progress.new += len(added)
            # Before the checkpoint: after a crash in between it is written once more
            self.directory.event("clients_added", self.progress.round, clients=list(added))
            self.display.note(f"client(s) {as_text(added)} join the run")
        for event in reading.events(self.directory.path, "blamed"):
            self.exchanges.blamed.setdefault(event["client"], (event["round"], event["reason"]))
        self.save()

    def run(self, drive: Callable[[Rounds], None]) -> None:
        """All that is left of the run. drive: takes the steps in its order. Raises Stopped, or
        CannotGoOn, with everything saved.
        """
        try:
            if not self.progress.finished:
                self._await_clients()
                self.resources.since(self.io.client_processes())  # what it took until now
                drive(self)
        except Stopped:
            if not self._concluding:  # else the last checkpoint holds all that is finished
                self.save()
            raise

    def _await_clients(self) -> None:
        """Waits for clients before the run begins, and for those that have just joined it. After
        another resume each task waits for its own client.
        """
        progress, section, n = self.progress, self.config.round, self.config.clients
        if not progress.round:
            start = n if section.start == "all" else section.start
            self.watch.await_clients(start, section.join_s(self.attendance.alone))
        elif progress.new:
            new = range(n - progress.new, n)
            self.watch.await_clients(len(new), section.join_s(), progress.round + 1, new)

    def more(self, done: int) -> bool:
        """Whether there is another round to do after so many."""
        return done < self.config.rounds and reached(self.config, self.progress) is None

    def _give_up(self, round: OpenRound) -> None:
        """Raises CannotGoOn where no further round is tried."""
        if reason := round.abort_reason(self.config, self.progress.void):
            self.io.cancel("the run ends")
            self.save()
            raise CannotGoOn(f"{reason.rstrip('.')}; the last checkpoint is intact.")

    def clients_join(self, round: OpenRound) -> bool:
        """Decides whether clients join the run after this round, which nothing may overlap then."""
        self._clients_then = self._joining.clients(round.after.server)
        return self._clients_then > self.config.clients

    def _grow(self, round: OpenRound) -> None:
        """Raises ClientsJoin where clients join before the next round."""
        if self._clients_then > self.config.clients and self.more(round.number):
            raise ClientsJoin(self.config.clients, self._clients_then)

    def end(self) -> None:
        """The last evaluation."""
        if self._lost:
            self.display.warn(
                f"the run goes to its end without client(s) {as_text(self._lost)}, whose state was "
                f"lost (since round {min(self._lost.values())})"
            )
        lines = self.evaluator.last(self.progress, self.carried, self.durable)
        self.progress.finished = True
        self.save({"clients": lines})

    # -- a round's exchanges -----------------------------------------------------------------------
    def open(self, number: int, carried: RunState, ahead: float = 0.0) -> OpenRound:
        """Selects a round's cohort, once there are clients, and opens its first exchange. ahead:
        virtual seconds of a round that is not recorded yet.
        """
        self.attendance.gather(number)
        base = self.second(ahead)
        at = self.attendance.wait(base)
        if math.isinf(at):
            self.save()
            raise CannotGoOn(self.attendance.never(base))
        cohort, here = self.attendance.cohort(number, at)
        self.display.round_started(number, self.config.rounds, cohort)
        self.exchanges.sent.fill = filling(self.experiment, carried.server)
        round = OpenRound.begun(carried, self._opened(number, 0, cohort, carried, at))
        if here is not None:
            round.record.set(second=at, here=here)
        if self.clock is not None:
            round.base, round.virtual = base, at - base
        return round

    def second(self, ahead: float = 0.0) -> float:
        """The second of the run, on the run's clock."""
        if self.clock is not None:
            return self.progress.virtual + ahead
        return self.progress.seconds + time.monotonic() - self._recorded

    def _opened(
        self, number: int, index: int, cohort: Sequence[int], carried: RunState, at: float
    ) -> Exchange:
        return self.exchanges.open(number, index, cohort, carried, self.durable, at)

    def exchange(self, round: OpenRound) -> None:
        """All exchanges of a round whose first is open."""
        last, main = len(self.method.exchanges) - 1, self.method.main_exchange
        going = True
        while going:
            going = self.finish(round, self.collect(round)) and round.exchange.index < last
            if round.exchange.index == main:
                round.evaluated = self.exchanges.evaluations(round.exchange)
            if going:
                completed, index = sorted(round.exchange.done), round.exchange.index + 1
                at = self.second() if self.clock is None else round.base + round.virtual
                round.exchange = self._opened(round.number, index, completed, round.after, at)
                if index == main:
                    round.main = round.exchange
        round.reported, round.warnings = dict(self.host.reported), list(self.host.warnings)

    def collect(self, round: OpenRound) -> Aggregation:
        """Waits for the open exchange's replies and folds them as they come."""
        exchange, aggregation = round.exchange, self.aggregation(round)
        for client, reply in self.exchanges.replies(exchange):
            aggregation.add(client, reply)
            reported = reply.message.reported
            if reported:
                round.reports.setdefault(client, {}).update(reported)
        took = time.monotonic() - exchange.opened
        add_exchange(round.seconds, took, exchange.encoding, exchange.done.values())
        round.add_times(self.clock)
        return aggregation

    def finish(self, round: OpenRound, aggregation: Aggregation) -> bool:
        """Makes the next server state of the replies. Returns False if there are too few results:
        the round is void then.
        """
        least, began = self.config.round.min_results, time.monotonic()
        if len(round.exchange.done) >= least:
            self.faults.at("aggregating", round.number)
        server, exchange = aggregation.result(least), round.exchange
        self.exchanges.record_bills(exchange)
        if self.method.in_memory:
            self.blame(round.number, aggregation.left_out | self.host.blamed)
        completed = sorted(exchange.done)
        predict(self.experiment, exchange, round.after.server, completed, round.predicted)
        round.runs |= aggregation.runs
        round.add_result(server)
        if server is not None:
            for client, images in aggregation.condensed.items():
                exports.keep_condensed(self.directory.path, client, images)
            round.seconds["aggregating"] += time.monotonic() - began
        return server is not None

    def blame(self, round: int, named: Mapping[int, str]) -> None:
        """Records who broke the protocol of secure aggregation, and is left out from now on."""
        for client, why in sorted(named.items()):
            if client not in self.exchanges.blamed:
                self.exchanges.blamed[client] = round, why
                self.directory.event("blamed", round, client, reason=why)
                self.host.warn(f"client {client} broke the protocol of secure aggregation: {why}")

    def aggregation(self, round: OpenRound) -> Aggregation:
        """What adds up the replies of the exchange that is open."""
        before, server = round.before.server, round.after.server
        return Aggregation(self.exchanges, round.exchange, before, server, self._noise)

    # -- its end -----------------------------------------------------------------------------------
    def conclude(self, round: OpenRound) -> None:
        """Evaluates a round, records it, and checkpoints where that is due. Raises CannotGoOn where
        no further round is tried, and ClientsJoin where clients join before the next one.
        """
        self._concluding, began = True, time.monotonic()
        progress = self.progress
        self.carried, after = round.after, round.after
        progress.versions, progress.states = dict(after.versions), dict(after.states)
        progress.void = progress.void + 1 if round.record.void else 0
        model = self.evaluator.evaluate(round, self.durable)
        self.faults.at("evaluating", round.number)
        evaluated_at = time.monotonic()
        round.seconds["evaluating"] += evaluated_at - began
        self.record(round, model, evaluated_at)
        self.evaluator.stopped(round, progress)
        each = self.config.record.clients == "each"
        clients = client_lines(round, self.config) if each else []
        lines = {"rounds": [round.record.line()], "clients": clients}
        due = round.number % self.config.checkpoint.every == 0 or round.number == self.config.rounds
        due = due or self._clients_then > self.config.clients
        keep = self.save if due or self.watch.requested else self._append
        keep(lines)
        self.directory.event("round", round.number, completed=len(round.record.completed))
        self._concluding = False
        self.faults.at("between", round.number)
        self.io.book_round(round.number)
        self._show(round)
        collect_in_time()
        self._give_up(round)
        self._grow(round)
        progress.stopped = reached(self.config, progress) or ""

    def record(self, round: OpenRound, model: Tensors | None, evaluated_at: float) -> None:
        """Completes the round's record. model: as it was evaluated, at `evaluated_at`."""
        progress, record = self.progress, round.record
        hashes = self.evaluator.hashes(round.after, model)
        tally = self.take_tally(round.number, progress.tasks())
        for direction, kinds in round.predicted.items():
            add_kinds(progress.predicted.setdefault(direction, {}), kinds)
        now = time.monotonic()
        # Rounds overlap: what passed before the last one's end was counted there.
        elapsed = now - max(round.started, self._recorded)
        early = max(0.0, self._recorded - round.started)
        self._recorded = now
        round.seconds["recording"] = now - evaluated_at
        progress.seconds += elapsed
        progress.virtual += round.virtual
        if self._accountant is not None:
            round.reported |= self._accountant.spent(round.number)
        record.set(
            dropped={str(c): reason for c, reason in sorted(round.dropped.items())},
            seconds=elapsed,
            seconds_virtual=round.virtual if self.clock else None,
            seconds_by_phase=fitted(round.seconds, elapsed, early),
            seconds_virtual_by_phase=round.virtual_split or None,
            resources=self.resources.since(self.io.client_processes()),
            **tally.columns(),
            useful=tally.useful,
            predicted=round.predicted if self.experiment.predictable else None,
            **hashes,
            algorithm=round.reported | ({"warnings": round.warnings} if round.warnings else {}),
        )
        progress.round, progress.new = round.number, 0
        self.evaluator.best(progress, record, model)

    def take_tally(self, round: int, under_way: Container[tuple[int, int]] = ()) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's
        sums. under_way: tasks (round, client) that may still be answered.
        """
        tally, progress = self.io.tally(round, under_way), self.progress
        for direction, n in tally.spent.items():
            progress.totals[direction] = progress.totals.get(direction, 0) + n
            add_kinds(progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally

    def _show(self, round: OpenRound) -> None:
        self.display.round_done(round.record)
        for client, reason in round.states_lost().items():
            if client not in self._lost:
                self.display.warn(
                    f"round {round.number} continues without client {client}: {reason}"
                )
            self._lost.setdefault(client, round.number)
        for client in round.record.completed:
            self._lost.pop(client, None)
        for text in round.notes():
            self.display.note(text)
        for callback in self.callbacks:
            callback(round.record)

    # -- saving ------------------------------------------------------------------------------------
    def save(self, lines: dict[str, list[JsonDict]] | None = None) -> None:
        """Checkpoint first, with the records in it; then the records to their files, and what is
        spooled may go.
        """
        others, residuals = dict(self.sent), dict(self.carried.residuals)
        if residuals:
            others["extra"] = self._memories.written(residuals)
        self.progress.lengths = self.directory.flush(self.config.checkpoint.fsync)
        self.progress.records = lines or {}
        self.checkpoints.save(
            self.carried.server,
            self.progress,
            others,
            lambda point: self.faults.at(point, self.progress.round),
        )
        self.durable = dict(self.progress.versions)
        self._append(lines or {})

    def _append(self, lines: dict[str, list[JsonDict]]) -> None:
        self.directory.append(lines)
        self.directory.flush()
        under_way = () if self.progress.finished else self.progress.tasks()
        # Its files are the next round's.
        with self.io:
            self.inbox.clear(self.progress.round, under_way)

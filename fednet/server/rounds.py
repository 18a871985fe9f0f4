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
from collections.abc import Callable, Container, Iterable, Sequence

import torch

from fednet.algorithms.base import State, Tensors
from fednet.buffers import collect_in_time
from fednet.errors import CannotGoOn, ClientsJoin, Stopped
from fednet.experiment import privacy
from fednet.experiment.store import on_disk
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.protocol.tasks import STATE_LOST
from fednet.records import reading
from fednet.records.manifest import RunProgress
from fednet.server import exports
from fednet.server.aggregation import Aggregation, filling
from fednet.server.evaluation import Evaluator, client_lines
from fednet.server.exchange import Exchanges, RunState
from fednet.server.growth import clients_from_next_round
from fednet.server.inbox import Reply
from fednet.server.round import OpenRound, add_exchange, fitted, predict, reached
from fednet.server.session import Session
from fednet.server.watch import Attendance
from fednet.wire.ledger import Tally, add_kinds
from fednet.wire.messages import clean

SHOWN = 3  # clients left out whose reasons are shown for a round


def run_rounds(rounds: Rounds) -> None:
    """All rounds, then the last evaluation."""
    progress = rounds.progress
    round = None
    if rounds.more(progress.round):
        round = rounds.open(progress.round + 1, rounds.carried)
    while round is not None:
        rounds.exchange(round)
        ahead = None
        early = rounds.may_open_early(round)
        if early and rounds.attendance.ready(rounds.second(round.virtual)):
            ahead = rounds.open(round.number + 1, round.after, round.virtual)
        rounds.conclude(round)
        if ahead is None and rounds.more(round.number):
            ahead = rounds.open(round.number + 1, round.after)
        round = ahead
    rounds.end()


class Rounds:
    """One server process's part in a run, as steps that a driver (`run_rounds`, or `run_updates` in
    asynchronous.py) takes in its order.

    carried: the state after the last round that is over; `begin` sets it. durable: versions of the
    clients' states in the last checkpoint. sent_down: in a run without rounds, what went down with
    the tasks under way, by the name that it has in a checkpoint. callbacks: take each record.
    """

    def __init__(self, session: Session, exchanges: Exchanges, evaluator: Evaluator) -> None:
        self.experiment, self.config = session.experiment, session.config
        self.method, self.host = session.experiment.algorithm, session.host
        self.directory, self.checkpoints = session.files, session.checkpoints
        self.io, self.faults, self.clock = session.io, session.faults, session.clock
        self.watch, self.display = session.watch, session.watch.display
        self.exchanges, self.evaluator = exchanges, evaluator
        self.resources, self.callbacks = session.resources, session.callbacks
        self.progress = RunProgress(run=session.run_id, clients=self.config.clients)
        self.carried: RunState
        self.durable: dict[int, str] = {}
        self.sent_down: dict[str, State] = {}
        self.attendance = Attendance(
            self.config, self.exchanges.world, self.watch, self.faults.replay
        )
        self.attendance.alone = self.exchanges.alone
        key, drawn = self.checkpoints.folder / "noise.key", self.checkpoints.exists
        self._noise = privacy.noise_of(self.config, "server", key, drawn)
        self._accountant = privacy.Accountant(self.config) if self.config.privacy.noise else None
        self._lost: dict[int, int] = {}  # by client whose state is lost: the round it was missed in
        self._clients_then = self.config.clients  # from the next round on
        self._recorded = time.monotonic()
        self._concluding = False

    # -- the run -----------------------------------------------------------------------------------
    def begin(
        self,
        resumed: tuple[State, RunProgress, dict[str, torch.Tensor]] | None,
        added: Sequence[int],
    ) -> None:
        """Fresh state, or what a checkpoint holds. added: clients that join the run now."""
        if resumed is None:
            first = self.method.init_server(
                self.experiment.setting.initial.select(self.experiment.shared)
            )
            server = on_disk(self.method.prepare(first, self.host), self.checkpoints.rows)
            self.carried = RunState(server, {}, {}, {})
        else:
            server, progress, residuals = resumed
            self.progress = progress
            self.carried = RunState(server, progress.versions, progress.states, residuals)
            self.sent_down = self.checkpoints.sent(progress.under_way)
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
        progress, section, n = self.progress, self.config.round, self.config.clients
        if progress.finished:
            return
        try:
            # Before the run begins, or clients that have just joined it take part. After another
            # resume each task waits for its own client.
            if not progress.round:
                start = n if section.start == "all" else section.start
                self.watch.await_clients(start, section.join_s(self.attendance.alone))
            elif progress.new:
                new = range(n - progress.new, n)
                self.watch.await_clients(len(new), section.join_s(), progress.round + 1, new)
            self.resources.since(self.io.client_processes())  # what it took until now
            drive(self)
        except Stopped:
            if not self._concluding:  # else the last checkpoint holds all that is finished
                self.save()
            raise

    def more(self, done: int) -> bool:
        """Whether there is another round to do after so many."""
        return done < self.config.rounds and reached(self.config, self.progress) is None

    def may_open_early(self, round: OpenRound) -> bool:
        """Whether the next round may start before this one is evaluated: not if clients join the
        run after it (which is decided here), if the result may end the run, or if the clients are
        asked for the evaluation in an exchange of its own.
        """
        self._clients_then = clients_from_next_round(self.io, self.config, round.after.server)
        stop, evaluate = self.config.stop, self.config.evaluate
        return (
            round.number < self.config.rounds
            and self._clients_then == self.config.clients
            and stop.accuracy is None
            and stop.patience is None
            and stop.megabytes is None
            and stop.seconds is None
            and not (evaluate.every and evaluate.clients == "all")
        )

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
        first = self.exchanges.open(number, 0, cohort, carried, self.durable, at)
        round = OpenRound.begun(carried, first)
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

    def exchange(self, round: OpenRound) -> None:
        """All exchanges of a round whose first is open."""
        last, going = len(self.method.exchanges) - 1, True
        while going:
            aggregation = self.aggregate(round, self.exchanges.replies(round.exchange))
            add_exchange(round.seconds, round.exchange)
            round.add_times(self.clock)
            going = self.finish(round, aggregation) and round.exchange.index < last
            if going:
                completed, index = sorted(round.exchange.done), round.exchange.index + 1
                at = self.second() if self.clock is None else round.base + round.virtual
                round.exchange = self.exchanges.open(
                    round.number, index, completed, round.after, self.durable, at
                )
                if index == self.method.main_exchange:
                    round.main = round.exchange

    def aggregate(self, round: OpenRound, replies: Iterable[tuple[int, Reply]]) -> Aggregation:
        """Adds up the replies to the exchange that is open, as they come."""
        before, server = round.before.server, round.after.server
        aggregation = Aggregation(self.exchanges, round.exchange, before, server, self._noise)
        for client, reply in replies:
            aggregation.add(client, reply)
            reported = reply.message.reported
            if reported:
                round.reports.setdefault(client, {}).update(reported)
        return aggregation

    def finish(self, round: OpenRound, aggregation: Aggregation) -> bool:
        """Makes the next server state of the replies. Returns False if there are too few results:
        the round is void then.
        """
        exchange, host = round.exchange, self.host
        least, began = self.config.round.min_results, time.monotonic()
        if len(exchange.done) >= least:
            self.faults.at("aggregating", round.number)
        server = aggregation.result(least)
        self.exchanges.record_bills(exchange.asked.values())
        if self.method.in_memory:  # who broke its protocol is left out from now on
            for client, why in sorted((aggregation.left_out | host.blamed).items()):
                if client not in self.exchanges.blamed:
                    self.exchanges.blamed[client] = round.number, why
                    self.directory.event("blamed", round.number, client, reason=why)
                    host.warn(f"client {client} broke the protocol of secure aggregation: {why}")
        predict(self.experiment, exchange, round.after.server, round.predicted)
        round.runs |= aggregation.runs
        round.add_result(server)
        if server is not None:
            for client, images in aggregation.condensed.items():
                exports.keep_condensed(self.directory.path, client, images)
            round.seconds["aggregating"] += time.monotonic() - began
        if exchange.index == self.method.main_exchange:
            round.evaluated = self.exchanges.evaluations(exchange)
        round.reported, round.warnings = dict(host.reported), list(host.warnings)
        return server is not None

    # -- its end -----------------------------------------------------------------------------------
    def conclude(self, round: OpenRound) -> None:
        """Evaluates a round, records it, and checkpoints where that is due. Raises CannotGoOn where
        no further round is tried, and ClientsJoin where clients join before the next one.
        """
        self._concluding, began = True, time.monotonic()
        progress, after = self.progress, round.after
        self.carried = after
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
        join = self._clients_then > self.config.clients
        due = round.number % self.config.checkpoint.every == 0 or round.number == self.config.rounds
        if due or join or self.watch.requested:
            self.save(lines)
        else:
            self._append(lines)
        self.directory.event("round", round.number, completed=len(round.record.completed))
        self._concluding = False
        self.faults.at("between", round.number)
        self.io.book_round(round.number)
        self._show(round)
        collect_in_time()
        if reason := round.abort_reason(self.config, progress.void):
            self.io.cancel("the run ends")
            self.save()
            raise CannotGoOn(f"{reason.rstrip('.')}; the last checkpoint is intact.")
        if join and self.more(round.number):
            raise ClientsJoin(self.config.clients, self._clients_then)
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
            bytes_up=tally.spent["up"],
            bytes_down=tally.spent["down"],
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
        """Shows the record, and in sentences whose state was lost, the first of the clients that
        failed and how many more there are, and who began again.
        """
        name = f"round {round.number}"
        self.display.round_done(round.record)
        for client, reason in sorted(round.dropped.items()):
            if reason.startswith(STATE_LOST):
                if client not in self._lost:
                    why = clean(reason.removeprefix(STATE_LOST))
                    self.display.warn(f"{name} continues without client {client}: {why}")
                self._lost.setdefault(client, round.number)
        for client in round.record.completed:
            self._lost.pop(client, None)
        failures = round.failures()
        for text in failures[:SHOWN]:
            self.display.note(f"{name}: {text}")
        if len(failures) > SHOWN:
            self.display.note(f"{name}: and {len(failures) - SHOWN} more clients")
        if again := round.record.restarted:
            text = f"client(s) {as_text(again)} had lost their state and began again"
            self.display.note(f"{name}: {text}")
        for callback in self.callbacks:
            callback(round.record)

    # -- saving ------------------------------------------------------------------------------------
    def save(self, lines: dict[str, list[JsonDict]] | None = None) -> None:
        """Checkpoint first, with the records in it; then the records to their files, and what is
        spooled may go.
        """
        self.progress.lengths = self.directory.flush(self.config.checkpoint.fsync)
        self.progress.records = lines or {}
        self.checkpoints.save(
            self.carried.server,
            self.progress,
            self.carried.residuals,
            self.sent_down,
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
            self.io.inbox.clear(self.progress.round, under_way)

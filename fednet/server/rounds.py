"""A run in rounds: the steps that the driver (driver.py) takes.

    open: select the cohort, broadcast
    take: each event of the exchange that is open; replies are added up in id order
    close: make the next server state, and open the round's next exchange
    conclude: evaluate, record, checkpoint

If `may_open_early` allows it, the next round's broadcast leaves before this round is evaluated and
checkpointed, so that the clients train meanwhile. The records and the bits are the same either way.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Mapping

from fednet.algorithms.base import State
from fednet.algorithms.making import is_secure
from fednet.buffers import collect_in_time
from fednet.capacity import give_back_freed
from fednet.config import Config
from fednet.config.schema import JOIN_S
from fednet.errors import CannotGoOn, ClientsJoin, Stopped
from fednet.experiment import privacy, selection
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import SPLIT
from fednet.ids import as_text
from fednet.journal.book import Kinds, add_kinds
from fednet.journal.events import Tally
from fednet.models.start import BASE
from fednet.plain import JsonDict
from fednet.protocol.tasks import STATE_LOST
from fednet.records.manifest import Candidate, RunProgress
from fednet.server import candidates, exports
from fednet.server.aggregation import Aggregation, filling
from fednet.server.conditions import Conditions
from fednet.server.driver import drive
from fednet.server.evaluation import Evaluator
from fednet.server.exchanges import Exchanges
from fednet.server.inbox import ReceivedReply
from fednet.server.open_round import OpenExchange, OpenRound, RunState
from fednet.server.resources import Resources
from fednet.server.rows import on_disk
from fednet.server.schedule import Schedule
from fednet.server.sources import POLL_S, ScheduleEvent, Source
from fednet.server.tracking import Trackers
from fednet.server.watch import ServerOptions
from fednet.wire.messages import clean

# Between two looks for memory that messages have left free: bytes of messages, and seconds.
TRIM_BYTES = 32 << 20
TRIM_S = 5.0
SHOWN = 3  # clients left out whose reasons are shown for a round


class Rounds:
    """One server process's part in a run. `Updates` (asynchronous.py) has other ways to open, take
    and close, and the same to conclude.
    """

    schedule: Schedule
    """Of the exchange that is open, see driver.py."""
    source: Source
    """Of the exchange that is open, see driver.py."""

    def __init__(self, exchanges: Exchanges, how: ServerOptions) -> None:
        self.exchanges = exchanges
        self.callback = how.callback
        self.display = how.display
        self.setup = exchanges.setup
        self.conditions = exchanges.conditions
        self.clients = exchanges.clients
        self.records = exchanges.records
        self.config = self.setup.config
        self.method = self.setup.method
        self.faults = self.conditions.faults
        self.clock = self.conditions.clock
        self.tracker = Trackers(self.config, self.records.files.path, self.display.note)
        self.resources = Resources(gpus=self.setup.host.device.type == "cuda")
        self.evaluator = Evaluator(
            self.setup.experiment,
            self.setup.host,
            self.records.files,
            self.display.warn,
            exchanges.evaluated_by_clients,
        )
        self.progress = RunProgress(run=self.records.run_id, clients=self.config.clients)
        self.carried: RunState  # the state after the last round that is over; `begin` sets it
        # In a run without rounds, what went down with the tasks under way, by the name that it has
        # in a checkpoint.
        self.sent_down: dict[str, State] = {}
        self._open: OpenRound  # the round whose exchange is open
        self._aggregation: Aggregation | None = None  # of its replies
        self._accountant = privacy.Accountant(self.config) if self.config.privacy.noise else None
        self._lost: dict[int, int] = {}  # by client whose state is lost: the round it was missed in
        self._clients_then = self.config.clients  # from the next round on
        self._recorded = time.monotonic()  # when the last round was
        self._crossed = 0  # bytes of messages since memory was given back
        self._given_back = -math.inf  # when that was
        self._concluding = False

    # -- the run -----------------------------------------------------------------------------------
    def begin(self) -> None:
        """Fresh state, or what a checkpoint holds."""
        resumed = self.records.resumed
        checkpoints = self.records.checkpoints
        if resumed is None:
            first = self.method.init_server(self.setup.experiment.initial_shared)
            server = on_disk(self.method.prepare(first, self.setup.host), checkpoints.rows)
            self.carried = RunState(server, {}, {}, {})
        else:
            self.progress = progress = resumed.progress
            self.carried = RunState(
                resumed.server,
                progress.versions,
                progress.states,
                resumed.residuals,
                progress.candidates,
            )
            self.sent_down = checkpoints.load_sent(progress.under_way)
            progress.finished = progress.finished and not self.has_next_round()
        if self.config.round.open is not None:  # an error now, rather than when a client asks
            n = self.config.training_clients
            self.method.with_more_clients(self.carried.server, n, n + 1)
        self.clients.watch.completed = self.progress.round
        if not self.records.added:
            self.save()

    def run(self) -> None:
        """All that is left of the run. Raises Stopped, or CannotGoOn, with everything saved."""
        progress = self.progress
        section = self.config.round
        n = self.config.clients
        if progress.finished:
            return
        if self.records.added:
            self._add_clients(self.records.added)
        try:
            # Before the run begins. After a resume each task waits for its own client.
            if not progress.round:
                start = n if section.start == "all" else section.start
                join_s = section.join_s(self.clients.external)
                self.clients.watch.await_clients(start, join_s)
            # Processor time until now belongs to no round.
            self.resources.since(self.clients.processes())
            drive(self)
        except Stopped:
            if not self._concluding:  # else the last checkpoint holds all that is finished
                self.save()
            raise

    def _add_clients(self, added: range) -> None:
        """Waits for clients that are new in the run, and saves the first checkpoint that has them.
        Raises ClientsJoin where one of them asked to join and is gone, and Stopped.
        """
        config = self.config
        round = self.progress.round
        asked = config.round.open is not None and self.clients.external
        join_s = config.round.join_s()
        if asked and join_s is None:
            join_s = JOIN_S  # a stranger who asks and goes would hold up the run for ever
        self.clients.watch.await_clients(len(added), join_s, round + 1, added)
        clients = self.clients.clients_after_join(added) if asked else config.clients
        if clients < config.clients:
            gone = list(range(clients, config.clients))
            self.records.files.event("not_joined", round, clients=gone)
            raise ClientsJoin(config.clients, clients)
        # Before the checkpoint: after a crash in between it is written once more.
        self.records.files.event("clients_added", round, clients=list(added))
        self.display.note(f"client(s) {as_text(added)} join the run")
        self.save()

    def has_next_round(self) -> bool:
        """Whether there is another round to do."""
        done = self.progress.round
        config = self.config
        return done < config.rounds and stop_reason(config, self.progress) is None

    def admit(self, round: OpenRound) -> None:
        """Decides which clients join the run after this round; the others that ask to are told
        why they cannot.
        """
        self._clients_then = self.clients.admit(self.config, round.after.server)

    def may_open_early(self, round: OpenRound) -> bool:
        """Whether the next round may start before this one is evaluated: not if clients join the
        run after it, if the result may end the run, if the clients are asked for the evaluation in
        an exchange of its own, or if clients have to be waited for: this round would be recorded
        late.
        """
        stop = self.config.stop
        evaluate = self.config.evaluate
        limits = stop.accuracy, stop.patience, stop.megabytes, stop.seconds
        return (
            round.number < self.config.rounds
            and self._clients_then == self.config.clients
            and all(limit is None for limit in limits)
            and not (evaluate.every and evaluate.clients == "all")
            and not self.too_few()
            and self.can_begin(round)
        )

    def can_begin(self, round: OpenRound) -> bool:
        """Whether the round after this one can begin now, by the traces."""
        at = self.second(round.virtual)
        return self.begins_at(at) <= at

    def end(self) -> None:
        """The last evaluation."""
        if self._lost:
            self.display.warn(
                f"the run goes to its end without client(s) {as_text(self._lost)}, whose state was "
                f"lost (since round {min(self._lost.values())})"
            )
        lines = self.evaluator.evaluate_run(self.progress, self.carried)
        self.progress.finished = True
        self.save({"clients": lines})

    # -- when a round begins -----------------------------------------------------------------------
    def second(self, ahead: float = 0.0) -> float:
        """The second of the run, on the run's clock. ahead: virtual seconds of a round that is not
        recorded yet.
        """
        if self.clock is not None:
            return self.progress.virtual + ahead
        return self.progress.seconds + time.monotonic() - self._recorded

    def begins_at(self, second: float) -> float:
        """The second from this one on at which as many clients are available as a round needs, by
        their traces; infinite: never.
        """
        if self.faults.replay is not None:
            return second
        return self.conditions.world.when(self.config.round.min_results, second)

    def too_few(self) -> bool:
        """Whether fewer clients are connected than a round needs, and `round.join` sets no limit:
        then they are waited for, or the round would be void, and a few void rounds end a run.
        """
        section = self.config.round
        bound = section.join_s(self.clients.external)
        return bound is None and self.clients.watch.present() < section.min_results

    def await_enough_clients(self, round: int) -> None:
        """Waits while there are too few for that round."""
        if self.too_few():
            least = self.config.round.min_results
            self.clients.watch.await_clients(least, None, round=round)

    def open(self, after: OpenRound | None) -> None:
        """Selects the next round's cohort, once there are clients, and opens its first exchange.
        after: the round before it in this process, which may not be recorded yet.
        """
        number = self.progress.round + 1
        carried = self.carried
        ahead = 0.0
        if after is not None:
            number = after.number + 1
            carried = after.after
            if after.number > self.progress.round:
                ahead = after.virtual
        self.await_enough_clients(number)
        base = self.second(ahead)
        began = time.monotonic()
        at = self.begins_at(base)
        if math.isinf(at):
            self.save()
            raise CannotGoOn(
                f"after second {base:g} of the run there are never {self.config.round.min_results} "
                f"clients at once (availability.trace)."
            )
        if self.config.link.clock == "real":
            while (left := at - base - (time.monotonic() - began)) > 0:
                self.clients.watch.check()
                time.sleep(min(POLL_S, left))
        here = self.conditions.world.here(at)
        experiment = self.setup.experiment
        if self.faults.replay is not None and not selection.is_planned(self.config):
            cohort = self.faults.replay.selected_clients(number)
        elif candidates.selects(experiment):
            known = carried.candidates
            cohort = candidates.cohort(experiment, carried.server, number, here, known)
        else:
            cohort = selection.cohort(self.config, number, here)
        self.display.round_started(number, self.config.rounds, cohort)
        self.clients.sent.fill = filling(experiment, carried.server)
        exchange, self.source = self.exchanges.open(number, 0, cohort, carried, at)
        self._open = round = OpenRound.of(exchange)
        self.schedule = exchange.schedule
        if here is not None:
            round.record.set(second=at, here=sum(here))
        if self.clock is not None:
            round.virtual_start = base
            round.virtual = at - base

    # -- a round's exchanges -----------------------------------------------------------------------
    def take_event(self, event: ScheduleEvent) -> None:
        """What follows from an event of the exchange that is open."""
        exchange = self._open.exchange
        self.exchanges.take_event(exchange, event)
        # In simulated time nobody is known to count before the exchange closes. Replies to tasks
        # that are over already are added up together.
        if self.clock is None and not self.clients.has_outcome:
            self._add_up(self._open)

    def close(self) -> OpenRound | None:
        """Makes the next state of the exchange that is closed, and opens the round's next one;
        returns the round where there is none, or where it is void.
        """
        round = self._open
        if round.exchange.index == self.method.main_exchange:
            round.main = round.exchange
        self.exchanges.check_states(round.exchange)
        last = len(self.method.exchanges) - 1
        if not self.aggregate(round) or round.exchange.index == last:
            return round
        completed = sorted(round.exchange.done)
        at = self.second() if self.clock is None else round.virtual_start + round.virtual
        index = round.exchange.index + 1
        round.exchange, self.source = self.exchanges.open(
            round.number, index, completed, round.after, at
        )
        self.schedule = round.exchange.schedule
        return None

    def _add_up(self, round: OpenRound) -> Aggregation:
        """Adds up the replies whose turn has come, in ascending order of the clients."""
        exchange = round.exchange
        if self._aggregation is None:
            self._aggregation = Aggregation(self.exchanges, exchange, round.before.server)
        replies: list[tuple[int, ReceivedReply]] = []
        while exchange.added_up < len(exchange.cohort):
            client = exchange.cohort[exchange.added_up]
            task = exchange.asked[client]
            if not task.over:
                break
            exchange.added_up += 1
            if task.reply is None or task.reason:
                continue
            replies.append((client, task.reply))
            reported = task.reply.message.reported
            if reported:
                round.reports.setdefault(client, {}).update(reported)
        self._aggregation.add(replies)
        return self._aggregation

    def aggregate(self, round: OpenRound) -> bool:
        """Makes the next `round.after` of the replies to the exchange that is open, and adds to the
        round what came of the exchange. Returns False if there are too few results: the round is
        void then.
        """
        exchange = round.exchange
        record = round.record
        host = self.setup.host
        aggregation = self._add_up(round)
        self._aggregation = None
        if self.config.schedule.mode == "sync":
            add_times(self.conditions, round)
        least = self.config.round.min_results
        began = time.monotonic()
        if len(exchange.done) >= least:
            self.faults.crash_server_at("aggregating", round.number)
        server = aggregation.result(least)
        self.exchanges.record_verdict(exchange.asked.values())
        # Secure aggregation: a reply is known only in the sum, and who broke the protocol is left
        # out from now on.
        if not self.method.exchanges[exchange.index].summation.known:
            self._blame(round.number, aggregation.left_out | host.blamed)
        predict(self.setup.experiment, exchange, round.predicted)
        round.runs |= aggregation.runs
        round.dropped |= exchange.dropped
        if exchange.restarted:
            record.restarted = sorted({*(record.restarted or ()), *exchange.restarted})
        completed = sorted(exchange.done)
        record.completed_by_phase = [*record.completed_by_phase, completed]
        if server is None:
            # A void round changes nothing: its clients go back to their states before it, and the
            # residuals of its broadcast go with them.
            record.set(void=True, completed=[])
            round.spoiled = aggregation.spoiled
            round.after = round.before
        else:
            if exchange is round.main:
                record.completed = completed
            round.after = self._state_after(round, server)
            for client, images in aggregation.condensed.items():
                exports.keep_condensed(self.records.files.path, client, images)
            round.seconds["aggregating"] += time.monotonic() - began
        if exchange.index == self.method.main_exchange:
            round.evaluated = self.exchanges.evaluations(exchange)
        record.algorithm = dict(host.reported)
        if host.warnings:
            record.algorithm["warnings"] = list(host.warnings)
        return server is not None

    def _blame(self, round: int, reasons: Mapping[int, str]) -> None:
        """Clients broke the protocol of secure aggregation in this round. reasons: by client."""
        blamed = self.conditions.blamed
        for client, why in sorted(reasons.items()):
            if client not in blamed:
                blamed[client] = round, why
                self.records.files.event("blamed", round, client, reason=why)
                self.setup.host.warn(
                    f"client {client} broke the protocol of secure aggregation: {why}"
                )

    def _state_after(self, round: OpenRound, server: State) -> RunState:
        """The state of the run after the open exchange. server: the method's next state. What
        compressors remember goes with the clients' new states.
        """
        exchange = round.exchange
        versions = dict(round.after.versions)
        states = dict(round.after.states)
        residuals = dict(exchange.residuals)
        for client, reply in exchange.done.items():
            if reply.message.kept:
                versions[client] = reply.key.version
                states[client] = reply.message.state
                residuals |= exchange.asked[client].memory
        return RunState(server, versions, states, residuals, self._candidates(round))

    def _candidates(self, round: OpenRound) -> dict[int, Candidate]:
        """What each client replied last, after an exchange of a round."""
        experiment = self.setup.experiment
        known = dict(round.after.candidates)
        if not candidates.selects(experiment):
            return known
        for client in round.exchange.done:
            before = round.before.candidates.get(client) or candidates.candidate(experiment, client)
            seconds = None
            if self.clock is not None:
                seconds = sum(round.exchange.asked[client].times.values())
                if round.exchange.index:
                    seconds += known[client].seconds or 0.0
            run = round.runs.get(client)
            reported = round.reports.get(client, {})
            known[client] = candidates.after_reply(before, round.number, run, reported, seconds)
        return known

    # -- its end -----------------------------------------------------------------------------------
    def conclude(self, round: OpenRound) -> None:
        """Evaluates a round, records it, and checkpoints where that is due. Raises CannotGoOn where
        no further round is tried, and ClientsJoin where clients join before the next one.
        """
        self._concluding = True
        began = time.monotonic()
        config = self.config
        progress = self.progress
        after = round.after
        record = round.record
        self.carried = after
        if not record.void:
            progress.void = 0
        elif not round.spoiled:  # else a client could end the run, and nobody would know which
            progress.void += 1
        model = self.evaluator.evaluate(round)
        self.faults.crash_server_at("evaluating", round.number)
        evaluated_at = time.monotonic()
        round.seconds["evaluating"] += evaluated_at - began

        hashes = self.evaluator.hashes(after, model)
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
            record.algorithm |= self._accountant.spent(round.number)
        record.set(
            dropped={str(c): reason for c, reason in sorted(round.dropped.items())},
            seconds=elapsed,
            seconds_virtual=round.virtual if self.clock else None,
            seconds_by_phase=fit_seconds(round.seconds, elapsed, early),
            seconds_virtual_by_phase=round.virtual_split or None,
            resources=self.resources.since(self.clients.processes()),
            bytes_up=tally.spent["up"],
            bytes_down=tally.spent["down"],
            useful=tally.useful,
            predicted=round.predicted if self.setup.experiment.predictable else None,
            **hashes,
        )
        progress.round = round.number
        self.clients.watch.completed = round.number
        self.evaluator.note_best(progress, record, model)
        if stop_reason(config, progress) is not None:
            self.evaluator.evaluate_last(round, progress)
        lines = {"rounds": [record.line()], "clients": list[JsonDict]()}
        if config.record.clients == "each":
            lines["clients"] = self.evaluator.client_lines(round)
        join = self._clients_then > config.clients
        due = round.number % config.checkpoint.every == 0 or round.number == config.rounds
        if due or join or self.clients.watch.requested:
            self.save(lines)
        else:
            self._append(lines)
        self.records.files.event("round", round.number, completed=len(record.completed))
        self._concluding = False
        self.faults.crash_server_at("between", round.number)
        self.clients.record_heartbeats(round.number)
        self._show(round)
        collect_in_time()
        if not self.clients.io.inline:
            self._give_back(sum(tally.spent.values()))
        if reason := abort_reason(config, round, progress.void, self.clients.over_network):
            self.clients.cancel("the run ends")
            self.save()
            raise CannotGoOn(f"{reason.rstrip('.')}; the last checkpoint is intact.")
        if join and self.has_next_round():
            raise ClientsJoin(config.clients, self._clients_then)
        progress.stopped = stop_reason(config, progress) or ""

    def _give_back(self, nbytes: int) -> None:
        """Gives the system what malloc keeps free where messages were, in gaps of different sizes.
        To look for it takes a while. nbytes: of the round's messages.
        """
        self._crossed += nbytes
        now = time.monotonic()
        if self._crossed >= TRIM_BYTES and now - self._given_back >= TRIM_S:
            self._crossed = 0
            self._given_back = now
            give_back_freed()

    def take_tally(self, round: int, under_way: Iterable[tuple[int, int]] = ()) -> Tally:
        """What the books have since the last round's record, up to this round; added to the run's
        sums. under_way: tasks (round, client) that may still be answered.
        """
        tally = self.clients.end(round, under_way)
        progress = self.progress
        for direction, n in tally.spent.items():
            progress.totals[direction] = progress.totals.get(direction, 0) + n
            add_kinds(progress.useful.setdefault(direction, {}), tally.useful[direction])
        return tally

    def _show(self, round: OpenRound) -> None:
        """Shows the record, and in sentences who lost its state, failed, or began again."""
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
        failures = round.failures
        for text in failures[:SHOWN]:
            self.display.note(f"{name}: {text}")
        if len(failures) > SHOWN:
            self.display.note(f"{name}: and {len(failures) - SHOWN} more clients")
        if again := round.record.restarted:
            text = f"client(s) {as_text(again)} had lost their state and began again"
            self.display.note(f"{name}: {text}")
        self.tracker.round(round.record)
        if self.callback is not None:
            self.callback(round.record)

    # -- saving ------------------------------------------------------------------------------------
    def save(self, lines: dict[str, list[JsonDict]] | None = None) -> None:
        """Checkpoint first, with the records in it; then the records to their files, and what is
        spooled may go.
        """
        progress = self.progress
        carried = self.carried
        progress.journal = self.clients.journal_position()
        progress.lengths = self.records.files.flush(self.config.checkpoint.fsync)
        progress.records = lines or {}
        progress.versions = dict(carried.versions)
        progress.states = dict(carried.states)
        progress.candidates = dict(carried.candidates)
        self.records.checkpoints.save(
            carried.server,
            progress,
            carried.residuals,
            self.sent_down,
            lambda point: self.faults.crash_server_at(point, progress.round),
        )
        self.records.durable = progress.versions
        self._append(lines or {})

    def _append(self, lines: dict[str, list[JsonDict]]) -> None:
        self.records.files.append(lines)
        self.records.files.flush()
        under_way = () if self.progress.finished else self.progress.tasks()
        # Its files are the next round's.
        self.clients.forget(self.progress.round, under_way)


def predict(experiment: Experiment, open: OpenExchange, sums: Kinds) -> None:
    """Adds what an exchange's messages amount to by the declarations, of who completed it."""
    if not experiment.predictable:
        return
    method = experiment.algorithm
    clients = sorted(open.done)
    exchange = method.exchanges[open.index]
    if experiment.base is not None and open.index == 0:
        first = sum(1 for c in clients if not open.asked[c].spec.start)
        if first:
            raw = sum(field.raw for field in experiment.base.form)
            add_kinds(sums["down"], {BASE: first * raw})
    # Where no payload depends on its client, all are alike, and the first stands for them.
    alike = not experiment.sized_by_client
    for client in clients[:1] if alike else clients:
        counted = clients if alike else [client]
        exact = None
        if is_secure(method):
            exact = method.exact(open.before.server, open.round, client)
        enrolled = sum([open.asked[c].enrolled for c in counted])
        evaluated = sum([open.asked[c].spec.evaluates for c in counted])
        for way, kind, times, sizes in (
            ("down", exchange.down, len(counted), exact),
            ("up", exchange.up, len(counted), exact),
            ("up", experiment.evaluation_reply, evaluated, None),
            ("down", method.Enrolment, enrolled, None),
        ):
            if kind is not None and times:
                each = experiment.payload_bytes(kind, way, client, sizes)
                add_kinds(sums[way], {name: times * n for name, n in each.items()})


def add_times(conditions: Conditions, round: OpenRound) -> None:
    """Adds how long the open exchange took until now. The time before its tasks went out is
    encoding. The rest is split by the reply that came last: its client reports how long it trained,
    evaluated and encoded; what else passed between hand-out and arrival is sending, down and up;
    all other time is waiting. Then adds its time on the virtual clock, and how long the clients'
    devices trained.
    """
    exchange = round.exchange
    seconds = round.seconds
    took = time.monotonic() - exchange.opened
    seconds["encoding"] += exchange.encoding
    left = max(0.0, took - exchange.encoding)
    timed = [r for r in exchange.done.values() if r.message.split]
    last = max(timed, key=operator.attrgetter("arrived"), default=None)
    if last is not None:
        shares = dict(zip(SPLIT, last.message.split))
        shares["sending"] = last.record.taken_s - last.message.seconds
        left -= take_time(seconds, shares, left)
    seconds["waiting"] += left

    step_s = conditions.world.step_s
    if step_s is not None:
        trained = [step_s[c] * exchange.asked[c].spec.cost for c in exchange.done]
        if trained:
            round.record.training_s = (round.record.training_s or 0.0) + sum(trained)
    if conditions.clock is not None:
        schedule = exchange.schedule
        split = {"sending": 0.0, "training": 0.0}
        if schedule.replied:
            split = exchange.asked[schedule.replied[-1]].times
        waiting = max(0.0, schedule.at - sum(split.values()))
        round.virtual += schedule.at
        for name, part in {**split, "waiting": waiting}.items():
            round.virtual_split[name] = round.virtual_split.get(name, 0.0) + part


def take_time(into: dict[str, float], shares: dict[str, float], limit: float) -> float:
    """Adds shares of a time, none below 0 and no more than `limit` together; a client says what it
    likes. Returns their sum.
    """
    total = 0.0
    for name, share in shares.items():
        part = min(max(share, 0.0), limit - total) if math.isfinite(share) else 0.0
        into[name] += part
        total += part
    return total


def fit_seconds(seconds: dict[str, float], elapsed: float, early: float) -> dict[str, float]:
    """The split of a round that began `early` seconds before it counts: what its clients had the
    time for then is left out, first of waiting.
    """
    out = dict(seconds)
    for name in ("waiting", "sending", "training", "encoding", "evaluating"):
        cut = min(early, out[name])
        out[name] -= cut
        early -= cut
    out["waiting"] = max(0.0, out["waiting"] + elapsed - sum(out.values()))
    return out


def abort_reason(config: Config, round: OpenRound, void: int, over_network: bool) -> str:
    """Why another try could not help, after so many void rounds in a row; "" where it could.
    over_network: see `Endpoint`.
    """
    failures = round.failures
    selected = len(round.record.selected)
    everybody = round.record.void and len(failures) == selected > 0
    # One client that fails whenever it is asked alone must not end a federation of many.
    if everybody and (selected > 1 or config.clients == 1):
        return f"no client could do its task in round {round.number}: {failures[0]}"
    if round.spoiled or void < config.round.void_limit(over_network):
        return ""
    if len(round.exchange.done) >= config.round.min_results:
        why = round.record.algorithm["warnings"][-1]
        return f"{void} rounds in a row had no result; the last one: {why}"
    few = f"{void} rounds in a row had fewer than {config.round.min_results} results"
    return few + "".join(f" ({first})" for first in failures[:1])


def stop_reason(config: Config, progress: RunProgress) -> str | None:
    """Why the run need not go on; None where it must."""
    stop = config.stop
    spent = sum(progress.totals.get(way, 0) for way in ("up", "down"))
    if stop.accuracy is not None and progress.best is not None and progress.best >= stop.accuracy:
        return f"{progress.best_of} accuracy {progress.best:.4f} reached".lstrip()
    if stop.patience is not None:
        since = progress.round - progress.best_round
        if since >= stop.patience and progress.best is None:
            return f"no finite {stop.metric} in {progress.round} rounds"
        if since >= stop.patience:
            return f"no better {stop.metric} than in round {progress.best_round}"
    if stop.megabytes is not None and spent >= stop.megabytes * 1e6:
        return f"{spent / 1e6:.4g} MB spent"
    seconds = progress.virtual if config.link.clock == "virtual" else progress.seconds
    if stop.seconds is not None and seconds >= stop.seconds:
        return f"{seconds:.4g} s spent"
    return None

"""What the server does in an exchange: each is a broadcast, and the replies to it. An evaluation by
the clients is an exchange too.

    open            encode what goes to each client, and hand the tasks out
    take_event      what follows from the next event: a task is over, or the exchange closes
    record_verdict  record in the books which replies were useful

Which event is next says its source (sources.py), and who is in time its schedule (schedule.py).
What the replies are added to is the caller's.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from msgspec import structs

from fednet import seeds
from fednet.algorithms.base import Algorithm, Payload
from fednet.errors import CannotGoOn, RemoteProtocolError, StateError
from fednet.experiment.build import Experiment
from fednet.experiment.evaluations import EvaluationReply
from fednet.ids import as_text
from fednet.journal.book import LEFT_OUT
from fednet.protocol.tasks import LEFT, STATE_LOST, Leaves, end_of
from fednet.server.client_evaluation import counts_by_model, evaluated_clients, evaluation_due
from fednet.server.clients import Clients
from fednet.server.clock import task_bytes
from fednet.server.conditions import Conditions
from fednet.server.decoding import evaluation_in
from fednet.server.faults import drops
from fednet.server.faulty_protocol import FaultySpec
from fednet.server.inbox import ReceivedReply
from fednet.server.open_round import Broadcast, OpenExchange, RunState
from fednet.server.records import Records
from fednet.server.schedule import Cohort
from fednet.server.setup import Setup
from fednet.server.sources import (
    AskedClient,
    RealTime,
    ScheduleEvent,
    SimulatedTime,
    Source,
    collect,
)
from fednet.training.evaluation import Counts
from fednet.training.samples import batch_count
from fednet.wire.body import Body
from fednet.wire.codec import Compression, cut
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Fault, Key
from fednet.wire.payload import weights_of

log = logging.getLogger(__name__)


class Exchanges:
    """The exchanges of a run, one after the other."""

    def __init__(
        self, setup: Setup, conditions: Conditions, clients: Clients, records: Records
    ) -> None:
        self.setup = setup
        self.conditions = conditions
        self.clients = clients
        self.records = records
        self.config = setup.config
        self.method = setup.method
        self.experiment = setup.experiment

    # -- opening -----------------------------------------------------------------------------------
    def open(
        self, round: int, index: int, cohort: Sequence[int], before: RunState, at: float
    ) -> tuple[OpenExchange, Source]:
        """Encodes each client's task of an exchange and hands them to the protocol. at: the second
        of the run. Returns the exchange, and where its events come from.
        """
        exchange = self.new(round, index, cohort, before, at)
        for client in cohort:
            self.ask(exchange, client)
        for client, reply in list(exchange.earlier.items()):
            if client not in exchange.asked:
                why = "clients joined, and this one is not in the round any more"
                self.clients.verdict([(reply.key, why, None)])
                del exchange.earlier[client]
        exchange.encoding = time.monotonic() - exchange.opened
        if self.conditions.faults.replay is None:  # in a replay the record says who counts
            exchange.schedule.first = self.config.first
        source = self._source(exchange)
        # Replies that an earlier server received, in the order in which they came, are the first.
        source.expect([*exchange.earlier, *[c for c in cohort if c not in exchange.earlier]])
        if isinstance(source, RealTime):  # if these close the exchange, nobody else is asked
            while (over := source.next_known()) is not None:
                self.take_event(exchange, ScheduleEvent(0.0, over, exchange.asked[over].reason))
        specs = [a.spec for a in exchange.asked.values() if not a.over]
        self.clients.open((round, index, "train"), specs, self.deadline_s())
        return exchange, source

    def new(
        self, round: int, index: int, cohort: Sequence[int], before: RunState, at: float
    ) -> OpenExchange:
        """An exchange in which nobody is asked yet."""
        config = self.config
        residuals = dict(before.residuals)
        self.setup.host.begin(round, index, cohort)
        if config.schedule.mode == "sync":
            self.clients.sent.clear()
        self.clients.sent.remembered = residuals
        opened = time.monotonic()
        schedule = Cohort(tuple(cohort))
        exchange = OpenExchange(
            round, index, "train", tuple(cohort), before, residuals, opened, at, schedule=schedule
        )
        if config.evaluate.clients == "auto" and index == self.method.main_exchange:
            exchange.evaluates = evaluation_due(config, round)
        exchange.earlier = self.clients.earlier_replies(round, index)
        return exchange

    def deadline_s(self) -> float | None:
        """After how many seconds of this process's time a reply is late; None: that decides
        nothing.
        """
        if self.conditions.clock is not None or self.conditions.faults.replay is not None:
            return None
        return self.config.round.deadline

    # -- a client's task ---------------------------------------------------------------------------
    def ask(self, exchange: OpenExchange, client: int, again: bool = False) -> AskedClient:
        """Asks a client: encodes its task, once for clients in a row that get the same. again: it
        has lost its state, and starts from its initial one.
        """
        exp = self.experiment
        method = self.method
        before = exchange.before
        spec = FaultySpec(client, round=exchange.round)
        if not again:
            spec.start = before.versions.get(client, "")
            spec.state = before.states.get(client, "")
            spec.keep = self.records.durable.get(client, "")
        asked = exchange.asked[client] = AskedClient(spec, exchange.at)
        _, encoded, spec.check = self._broadcast(exchange, client)
        spec.form = encoded.form
        spec.body = encoded.body
        training = exchange.purpose == "train"
        first = is_first(exchange, spec)
        if training and first and method.Enrolment is not None:
            enrolment = method.enroll(before.server, client, self.setup.host)
            if enrolment is not None:
                asked.enrolled = True
                given = exp.down.encode(enrolment)
                spec.form = [*given.form, *encoded.form]
                spec.enrol = len(given.form)
                spec.body = Body([*given.body.segments, *encoded.body.segments])
                spec.check = spec.body.digest()
        if first and exp.base_comes:
            spec = asked.spec = with_base(exp, spec, exchange.based)
        if training:
            self.fill_in(exchange, asked, encoded.seen)
        else:
            spec.cost = self._cost(client, method.main_exchange)
            spec.evaluates = exchange.evaluates
            self._may_lack_base(exchange, spec)
        return asked

    def _broadcast(self, exchange: OpenExchange, client: int) -> Broadcast:
        """What a client is sent; encodes it, unless the client asked before it got the same."""
        exp = self.experiment
        method = self.method
        index = exchange.index
        last = exchange.last
        if last is not None and exchange.purpose == "evaluate":
            return last
        if last is not None and type(method).broadcast is Algorithm.broadcast:
            down = last.down  # it sends the same to each client
        else:
            down = method.broadcast(exchange.before.server, index, client)
        # Where bytes depend on what a client remembers, each has its own.
        if last is not None and not exp.down.shared:
            values = vars(down).values()
            if down is last.down or all(map(operator.is_, vars(last.down).values(), values)):
                return last
        how = Compression(
            lambda name: seeds.rng(
                self.config.seed, f"compress/down/{index}/{name}", exchange.round
            ),
            Memory(exchange.residuals, exchange.residuals, f"{index}/"),
            exchange.past(client, "down"),
            exp.initial_shared,
            exchange.cache,
        )
        encoded = exp.down.encode(down, how)
        exchange.last = Broadcast(down, encoded, encoded.body.digest())
        return exchange.last

    def _may_lack_base(self, exchange: OpenExchange, spec: FaultySpec) -> None:
        """A worker may say that it lacks the model that training starts from."""
        exp = self.experiment
        if exp.base_comes and not is_first(exchange, spec):
            spec.with_base = functools.partial(with_base, exp, spec, exchange.based)

    def fill_in(self, exchange: OpenExchange, asked: AskedClient, seen: Payload) -> None:
        """Adds to a task what its exchange asks for, the reply that an earlier server received, and
        what disturbs it. seen: the broadcast as the client decodes it.
        """
        spec = asked.spec
        client = spec.client
        index = exchange.index
        if (weights := weights_of(seen)) is not None:
            self.clients.sent[client] = weights
        spec.cost = self._cost(client, index)
        spec.evaluates = exchange.evaluates
        spec.bound = self.method.exchanges[index].summation.bound
        self._may_lack_base(exchange, spec)
        if exchange.earlier:
            self._use_earlier_reply(exchange, asked)
        if self.conditions.may_disturb or self.conditions.blamed:
            self._disturb(exchange, asked)

    def _use_earlier_reply(self, exchange: OpenExchange, asked: AskedClient) -> None:
        """A task is over to which an earlier server received the reply. Its reply to another task
        of this client is not used.
        """
        spec = asked.spec
        reply = exchange.earlier.get(spec.client)
        if reply is None:
            return
        if reply.record.task == (spec.check, spec.start):
            asked.reply = reply
        else:
            self.clients.verdict([(reply.key, "the answer to another task", None)])
            del exchange.earlier[spec.client]

    def _disturb(self, exchange: OpenExchange, asked: AskedClient) -> None:
        """Adds to a task how long it takes, the faults planned for it, when its client leaves, and
        the reason for which a client is not asked.
        """
        spec = asked.spec
        clock = self.conditions.clock
        faults = self.conditions.faults
        client = spec.client
        round = exchange.round
        index = exchange.index
        if self.conditions.world.step_s is not None and clock is None:
            # The device waits for the rest of its time.
            spec.pace = [Fault("pace", self.conditions.world.step_s[client] * spec.cost)]
        if clock is not None:
            asked.bytes = task_bytes(self.records.run_id, Key(round, index, 0, client), spec)
        blamed_in, why = self.conditions.blamed.get(client, (round, ""))
        fault = faults.out(round, index, [client]).get(client, "")
        asked.reason = f"blamed in round {blamed_in}: {why}" if blamed_in < round else fault

        # A client that leaves in the middle of its task; who is gone already is not asked.
        until = self.conditions.world.until(client, exchange.at)
        asked.leaves_s = 0.0 if until is None else until - exchange.at
        leaves = None
        if math.isfinite(asked.leaves_s) and faults.replay is None:
            if not asked.leaves_s and not asked.over:
                asked.reason = LEFT
            if clock is None:
                leaves = Leaves(at=exchange.opened + asked.leaves_s)
            else:
                slow, delay = faults.time(round, index, client)
                leaves = clock.leaving(client, spec.cost, asked.bytes, exchange.at, slow, delay)
        if not asked.over:
            spec.leaves = leaves
            spec.faults = faults.of(round, index, client)
            spec.lost = drops(spec.faults)

    def _cost(self, client: int, index: int) -> int:
        """SGD steps of the client's task: the longest are handed out first."""
        train = self.config.train_of(client)
        method = self.method
        if not method.exchanges[index].summation.trains:
            return 0
        if train.steps is not None:
            return train.steps
        n = self.clients.sizes.own(client) or 0
        return train.epochs * batch_count(n, train.batch_size)

    # -- collecting --------------------------------------------------------------------------------
    def _source(self, exchange: OpenExchange) -> Source:
        """Where the events of an exchange come from, in seconds from its beginning."""
        again = functools.partial(self._ask_again, exchange)
        which = exchange.index, exchange.purpose
        real = RealTime(self.clients, exchange.asked, exchange.opened, which, again)
        if self.conditions.clock is None or exchange.purpose == "evaluate":
            return real

        def end(client: int, up: int | None) -> tuple[float, str]:
            # Until all ends are known none is next: each reply counts among the bytes.
            if up is None:
                return 0.0, ""
            task = exchange.asked[client]
            return self.end_on(task, exchange.index, 0.0, up, task.reason)

        return SimulatedTime(real, end)

    def end_on(
        self, task: AskedClient, index: int, began: float, up: int, lost: str
    ) -> tuple[float, str]:
        """When a task that began at that second is over on the virtual clock, and why it has no
        reply then. up: bytes of its reply; lost: why none came. A client that is lost is waited for
        as long as one may be; one that says that it lost its state is not.
        """
        clock = self.conditions.clock
        assert clock is not None
        if lost.startswith(STATE_LOST):
            return began, lost
        if lost and lost != LEFT:
            return began + clock.patience, lost
        client = task.spec.client
        cost = task.spec.cost
        deadline = self.config.round.deadline
        slow, delay = self.conditions.faults.time(task.spec.round, index, client)
        task.times = clock.seconds(client, cost, task.bytes, up, slow, delay, at=task.at)
        comes = math.inf if lost else began + sum(task.times.values())
        latest = math.inf
        if deadline is not None and self.conditions.faults.replay is None:
            latest = began + deadline
        return end_of(comes, began + task.leaves_s, latest)

    def _ask_again(self, exchange: OpenExchange, client: int) -> bool:
        """Asks a client again whose task has just ended, if it has lost its state and may begin
        again from its initial one; not in a later exchange, which needs what the client kept of
        this round. Returns whether its task is under way again.
        """
        reason = exchange.asked[client].reason
        residuals = exchange.residuals
        later = exchange.purpose == "train" and exchange.index > 0
        if later or not exchange.asked[client].spec.start:
            return False
        if not self.begin_again(exchange.round, client, reason, residuals):
            return False
        exchange.restarted.append(client)
        asked = self.ask(exchange, client, again=True)
        if asked.over:
            return False
        self.clients.add(exchange.round, [asked.spec])
        return True

    def take_event(self, exchange: OpenExchange, event: ScheduleEvent) -> None:
        """A client's task is over. Where the exchange closes by it, the tasks of the others are
        called off, and what has come of them in the same moment is left out.
        """
        schedule = exchange.schedule
        asked = exchange.asked
        at, client, reason = event
        assert client is not None
        asked[client].reason = reason
        if reason:
            self._note_dropped(exchange, client)
        schedule.take_event(at, client, reason)
        if not schedule.closed:
            return
        under_way = ""
        for late, why in schedule.dropped.items():
            task = asked[late]
            under_way = under_way or ("" if task.over else why)
            if task.reason in ("", LEFT):  # else it is known what happened to it
                task.reason = why
            self._note_dropped(exchange, late)
        if under_way:
            self.clients.cancel(under_way)
        self.clients.discard_all()

    def _note_dropped(self, exchange: OpenExchange, client: int) -> None:
        """Raises CannotGoOn where the client could not do its task and the configuration says to
        stop.
        """
        reason = exchange.asked[client].reason
        if client in exchange.noted:
            return
        exchange.noted.add(client)
        self.records.files.event("dropped", exchange.round, client, reason=reason)
        if reason.startswith("failed"):
            self.may_stop(exchange.round, client, reason.removeprefix("failed: "))

    # -- clients that have lost their state --------------------------------------------------------
    def begin_again(
        self, round: int, client: int, reason: str, residuals: dict[str, torch.Tensor]
    ) -> bool:
        """Lets a client that was dropped for that reason begin again, if it has lost its state and
        the configuration says so; returns whether it does. What compressors remember of earlier
        messages with it no longer holds, and is removed from residuals.
        """
        if not reason.startswith(STATE_LOST) or self.config.round.state_lost != "restart":
            return False
        with self.clients.io:  # nothing comes in meanwhile: replies are decoded with them
            for name in [n for n in residuals if n.startswith(f"client {client}/")]:
                del residuals[name]
        reason = reason.removeprefix(STATE_LOST)
        self.records.files.event("restarted", round, client, reason=reason)
        log.warning("round %d: client %d begins again: %s", round, client, reason)
        return True

    def check_states(self, exchange: OpenExchange) -> None:
        """Raises StateError where the run ends because clients of an exchange that is closed have
        lost their states, see `check_lost`.
        """
        started = sum(1 for task in exchange.asked.values() if task.spec.start)
        self.check_lost(exchange.round, exchange.dropped, started)

    def check_lost(self, round: int, dropped: Mapping[int, str], started: int) -> None:
        """Raises StateError where the run ends because clients have lost their states. started: how
        many were to start from one. Where others start the clients, a few that say so are not
        believed: a single false report would end the run.
        """
        lost = {c: why for c, why in dropped.items() if why.startswith(STATE_LOST)}
        few = 2 * len(lost) <= started or len(lost) == 1 < self.config.clients
        if not lost or (self.clients.external and few):
            return
        first = lost[min(lost)].removeprefix(STATE_LOST).rstrip(".")
        raise StateError(
            f"round {round}: {len(lost)} of the {started} clients that start from a state of their "
            f"own have lost it: clients {as_text(lost)}. {first}. Was the server restored from an "
            f"older copy? Then restore the clients' states of the same time, or let these clients "
            f"start again with --set round.state_lost=restart (the results differ)."
        )

    # -- its end -----------------------------------------------------------------------------------
    def leave_out(self, exchange: OpenExchange, client: int, reason: str) -> None:
        """A reply that was accepted turned out to be unusable: the client counts as one that did
        not complete the exchange, and a resume asks it again.
        """
        asked = exchange.asked[client]
        asked.reason = f"refused: {reason}"
        self._note_dropped(exchange, client)
        if asked.reply is not None:
            self.clients.withdraw(asked.reply.key)
        self.may_stop(exchange.round, client, reason)

    def may_stop(self, round: int, client: int, reason: str) -> None:
        """Raises CannotGoOn where one client that cannot go on ends the run."""
        if self.config.round.on_error == "stop":
            raise CannotGoOn(f"client {client} could not do its task in round {round}: {reason}")

    def record_verdict(self, all: Iterable[AskedClient], left_out: str = "") -> None:
        """Records in the books which replies, and their tasks, were useful, now that this is known.
        left_out: if it is not empty, none was useful, for this reason unless the client has one of
        its own. The book has that reason only of a reply that an earlier server received, else
        `LEFT_OUT`.
        """
        replies = []
        for asked in all:
            reply = asked.reply
            reason = asked.reason or left_out
            if reply is not None:
                if reason and not reply.earlier:
                    reason = LEFT_OUT
                replies.append((reply.key, reason, asked.staleness))
        self.clients.verdict(replies)

    # -- evaluations by clients --------------------------------------------------------------------
    def evaluations(self, exchange: OpenExchange) -> dict[int, dict[str, Counts]]:
        """What the clients that completed an exchange found in evaluating their models, of those
        that were asked to. In a training exchange the model that came down is the one before the
        round: what they found for it is named `received`, where that of an evaluation is `global`.
        """
        exp = self.experiment
        training = exchange.purpose == "train"
        if training and not exchange.evaluates:
            return {}
        found = {}
        for client, reply in exchange.done.items():
            counts = reply.evaluation if training else reply.take_payload()
            if counts is None:
                counts = self._evaluation_on_disk(client, reply)
            if counts is None:
                continue
            assert isinstance(counts, EvaluationReply)
            by_model = counts_by_model(counts, exp.setting.more)
            if training and "global" in by_model:
                by_model = {"received": by_model.pop("global"), **by_model}
            found[client] = by_model
        return found

    def _evaluation_on_disk(self, client: int, reply: ReceivedReply) -> EvaluationReply | None:
        """The evaluation in a reply, where it is not in memory; None where there is none that can
        be used.
        """
        exp = self.experiment
        form = reply.message.form
        key = reply.key
        tested = self.clients.sizes.test_labels(client)
        if key.purpose == "evaluate":  # it was checked when it came
            return evaluation_in(exp, form, reply.body(), tested)
        own = len(exp.algorithm.exchanges[key.phase].up.fields)
        if reply.evaluation_refused or len(form) == own:
            return None
        _, evaluation = cut(form, reply.body(), own)
        try:
            return evaluation_in(exp, *evaluation, tested)
        except RemoteProtocolError:  # as when it came, of which there is an event
            return None

    def evaluated_by_clients(
        self, round: int, down: Payload, before: RunState, final: bool
    ) -> dict[int, dict[str, Counts]]:
        """Asks the `evaluated_clients` to evaluate their models, and the one in `down`, and waits
        for them.
        """
        encoded = self.experiment.exact.encode(down)
        clients = tuple(evaluated_clients(self.config, round))
        index = len(self.method.exchanges)
        exchange = OpenExchange(round, index, "evaluate", clients, before, {}, time.monotonic())
        exchange.last = Broadcast(down, encoded, encoded.body.digest())
        exchange.evaluates = final
        exchange.schedule = Cohort(clients)
        for client in clients:
            self.ask(exchange, client)
        specs = [asked.spec for asked in exchange.asked.values()]
        self.clients.open((round, index, "evaluate"), specs, final=final)
        source = self._source(exchange)
        collect(exchange.schedule, source, functools.partial(self.take_event, exchange))
        self.check_states(exchange)
        self.record_verdict(exchange.asked.values())
        if exchange.dropped:
            self.records.files.event("not_evaluated", round, clients=sorted(exchange.dropped))
        return self.evaluations(exchange)


def is_first(exchange: OpenExchange, spec: FaultySpec) -> bool:
    """Whether the task is one with which a client gets what each gets once: it starts from no state
    of its own, nor from what an earlier exchange of the round left there.
    """
    later = exchange.purpose == "train" and exchange.index > 0
    return not spec.start and not later


def with_base(
    experiment: Experiment, spec: FaultySpec, based: dict[bytes, FaultySpec]
) -> FaultySpec:
    """The task with the model that training starts from before its payload. based: of tasks with
    the same payload, by its digest, so that it is put together once; a task that held its exchange
    would keep a round's models until the garbage collector next runs.
    """
    base = experiment.base
    assert base is not None
    made = based.get(spec.check)
    if made is None:
        body = Body([*base.body.segments, *spec.body.segments])
        form = (*base.form, *spec.form)
        enrol = spec.enrol + len(base.form)
        made = based[spec.check] = FaultySpec(spec.client, form, body, body.digest(), enrol=enrol)
    return structs.replace(
        spec, form=made.form, body=made.body, check=made.check, enrol=made.enrol, with_base=None
    )

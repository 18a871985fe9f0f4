"""Exchanges of a round: a broadcast, and the replies to it.

    ask      encode what goes to each client, and make its task
    open     hand the tasks to the protocol
    replies  wait, and yield each reply that counts, in ascending client id
    record_bills   record in the books which replies were useful

What the replies are added to is the caller's. An evaluation by all clients is an exchange too.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec import structs

from fednet import seeds
from fednet import world as worlds
from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.errors import CannotGoOn, StateError
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, reply_bytes, task_bytes
from fednet.experiment.evaluations import EvaluationReply, counts_by_model, evaluation_due
from fednet.experiment.evaluations import evaluated_clients as asked_to_evaluate
from fednet.experiment.faults import drops
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT, STATE_LOST, Job, Leaves, Rules
from fednet.server.endpoint import waiting_rules
from fednet.server.inbox import Reply
from fednet.server.io import LEFT_OUT, Outcome
from fednet.server.session import Session
from fednet.training.evaluation import Counts
from fednet.training.hosts import ServerHost
from fednet.training.samples import batch_count
from fednet.wire.codec import Body, Encoded
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Fault, Field, Key, Purpose
from fednet.wire.payload import weights_of

log = logging.getLogger(__name__)

POLL_S = 0.2  # how often a request to stop is looked for


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds. versions, states: by client, of its state that was
    last used, and its SHA-256. residuals: what compressed broadcasts have left out so far, by
    field, and, by client, what compressors remember at both ends.
    """

    server: State
    versions: Mapping[int, str]
    states: Mapping[int, str]
    residuals: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Asked:
    """What one client is asked, and what became of it.

    round: of its task. at: the second of the run at which it was asked. bytes: of the task, on the
    virtual clock. leaves_s: seconds after which the client is gone. training_s: where devices have
    a pace. staleness: updates since the model that it starts from, where training waits for nobody.
    memory: what compressors remember of messages with it once its reply counts. over: its part is
    over; reply, evaluation: what came of it; reason: why its reply does not count, "" as long as it
    does. took_s: on the virtual clock; times: the same, by what it was spent on.
    """

    round: int
    job: Job
    at: float = 0.0
    bytes: int = 0
    leaves_s: float = math.inf
    training_s: float | None = None
    enrolled: bool = False
    staleness: int | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    over: bool = False
    reply: Reply | None = None
    evaluation: Reply | None = None
    reason: str = ""
    took_s: float | None = None
    times: dict[str, float] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        self.over = True
        self.reply, self.evaluation = outcome.reply, outcome.evaluation
        self.reason = outcome.reason

    def drop(self, reason: str) -> None:
        """Its part is over, and its reply, if there is one, does not count."""
        self.over = True
        self.reason = reason


@dataclass
class Exchange:
    """cohort: in ascending order. asked: by client, in that order once all are asked. residuals:
    what compressed broadcasts have left out, and what compressors remember. opened: on the
    monotonic clock; at: the second of the run. found: replies that earlier servers received, by
    client and purpose. restarted: clients that had lost their state, and were asked again from an
    initial one. evaluated: the clients also evaluate what they trained.
    """

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    residuals: dict[str, torch.Tensor]
    opened: float
    at: float = 0.0
    asked: dict[int, Asked] = field(default_factory=dict)
    found: dict[tuple[int, str], Reply] = field(default_factory=dict)
    encoding: float = 0.0
    evaluated: bool = False
    restarted: list[int] = field(default_factory=list)
    # The task of a client whose state is lost, from its initial state; None: it cannot have one.
    # It is given the exchange: if it held it, the round's models would stay until the garbage
    # collector next runs, which is seldom.
    initial_task: Callable[[Exchange, int], Job] | None = None
    last: tuple[Payload, Encoded, bytes] | None = None  # what was encoded last, and its digest
    cache: JsonDict = field(default_factory=dict)

    @property
    def done(self) -> dict[int, Reply]:
        """The replies that count, by client."""
        return {c: a.reply for c, a in self.asked.items() if a.reply is not None and not a.reason}

    @property
    def dropped(self) -> dict[int, str]:
        """By client: why it did not complete the exchange."""
        return {client: asked.reason for client, asked in self.asked.items() if asked.reason}

    def past(self, client: int, way: str, round: int) -> Memory:
        """What is remembered with a client of earlier messages that way."""
        memory = self.asked[client].memory
        return Memory(self.residuals, memory, f"client {client}/{way}/{self.index}/", round)


class Exchanges:
    """Opens exchanges, one after the other, and waits for their replies.

    sent: filled with the weights that each client was sent with its last task. blamed: who broke a
    protocol of secure aggregation: by client, in which round, and how.
    """

    def __init__(self, session: Session) -> None:
        self.experiment, self.config = session.experiment, session.config
        self.method = session.experiment.algorithm
        self.host: ServerHost = session.host
        self.directory, self.io, self.watch = session.files, session.io, session.watch
        self.run, self.samples, self.sent = session.run_id, session.samples, session.sent
        self.faults, self.clock = session.faults, session.clock
        self.world = worlds.of(self.config) if self.clock is None else self.clock.world
        self.alone = session.endpoint.alone
        self.blamed: dict[int, tuple[int, str]] = {}

    # -- opening -----------------------------------------------------------------------------------
    def open(
        self,
        round: int,
        index: int,
        cohort: Sequence[int],
        before: RunState,
        keep: Mapping[int, str],
        at: float,
    ) -> Exchange:
        """Encodes each client's task of an exchange and hands them to the protocol. before: what it
        starts from. keep: by client, the version of its state that it must not delete yet. at: the
        second of the run.
        """
        exchange = self.prepared(round, index, cohort, dict(before.residuals), at)
        for client in cohort:
            known = before.versions.get(client, ""), before.states.get(client, "")
            self.ask(exchange, client, before.server, *known, keep.get(client, ""))
        if index == 0:  # a later exchange needs what the client kept of this round
            exchange.initial_task = lambda e, c: self.ask(e, c, before.server, "", "", "").job
        for (client, purpose), reply in exchange.found.items():
            if client not in exchange.asked and purpose == "train":
                why = "clients joined, and this one is not in the round any more"
                self.io.record_bill(reply.bill, False, why)
        rules, jobs = self.rules(), [a.job for a in exchange.asked.values() if not a.over]
        exchange.encoding = time.monotonic() - exchange.opened
        here = sum(1 for a in exchange.asked.values() if a.reply is not None)
        if rules.first is not None and here:  # what an earlier server received is among the first
            rules = dataclasses.replace(rules, first=max(1, rules.first - here))
            if here >= (self.config.first or 0):
                for job in jobs:
                    exchange.asked[job.client].drop(f"not among the first {self.config.first}")
                jobs = []
        self.io.begin((round, index, "train"), jobs, rules)
        return exchange

    def prepared(
        self,
        round: int,
        index: int,
        cohort: Sequence[int],
        residuals: dict[str, torch.Tensor],
        at: float,
    ) -> Exchange:
        """An exchange in which nobody is asked yet."""
        self.host.begin(round, index, cohort)
        if self.config.schedule.mode == "sync":
            self.sent.clear()
        self.sent.remembered = residuals
        exchange = Exchange(round, index, "train", tuple(cohort), residuals, time.monotonic(), at)
        if self.config.evaluate.clients == "auto" and index == self.method.main_exchange:
            exchange.evaluated = evaluation_due(self.config, round)
        with self.io:
            exchange.found = self.io.inbox.found(round, index)
        return exchange

    def rules(self) -> Rules:
        """How long is waited for whom."""
        section = self.config.round
        # Then who counts is not for the clock here to say.
        virtual = self.clock is not None or self.faults.replay is not None
        # A client that trains in this very thread sends no heartbeat.
        silent = None if self.io.inline else section.lost.silent
        return dataclasses.replace(
            waiting_rules(self.config),
            deadline=None if virtual else section.deadline,
            silent=silent,
            first=None if virtual else self.config.first,
        )

    # -- a client's task ---------------------------------------------------------------------------
    def ask(
        self, exchange: Exchange, client: int, server: State, start: str, state: str, keep: str
    ) -> Asked:
        """Asks a client, also for the second time: encodes its task, once for clients in a row that
        get the same. start, state, keep: see `Job`.
        """
        round, index = exchange.round, exchange.index
        asked = exchange.asked[client] = Asked(round, Job(client), exchange.at)
        down, last = self.method.broadcast(server, index, client), exchange.last
        # Where bytes depend on what a client remembers, each has its own.
        if (
            last is not None
            and not self.experiment.down.shared
            and all(getattr(last[0], name) is getattr(down, name) for name in down.fields)
        ):
            _, encoded, check = last
        else:
            encoded = self.experiment.down.encode(
                down,
                lambda name: seeds.rng(self.config.seed, f"compress/down/{index}/{name}", round),
                exchange.residuals,
                self.experiment.agreed,
                exchange.cache,
                slot=f"{index}/",
                past=exchange.past(client, "down", round),
            )
            check = encoded.body.check()
            exchange.last = down, encoded, check
        form: Sequence[Field] = encoded.form
        enrol, body = 0, encoded.body
        enrolment = self.method.enroll(server, client, self.host) if not (start or index) else None
        if enrolment is not None:
            asked.enrolled = True
            given = self.experiment.down.encode(enrolment)
            form = [*given.form, *encoded.form]
            enrol = len(given.form)
            body = Body([*given.body.segments, *encoded.body.segments])
            check = body.check()
        job = Job(client, form, body, check, start=start, state=state, keep=keep, enrol=enrol)
        if self.experiment.base_comes and not (start or index):
            job = with_base(self.experiment, job, {})
        self.complete_task(exchange, asked, job, encoded.seen)
        return asked

    def complete_task(self, exchange: Exchange, asked: Asked, job: Job, down: Payload) -> None:
        """Adds to a task how long it takes, the faults planned for it and when its client leaves;
        finds the reply that an earlier server received. down: what the client is sent.
        """
        client, round, index = job.client, exchange.round, exchange.index
        asked.job = job
        weights = weights_of(down)
        if weights is not None:
            self.sent[client] = weights
        job.cost = self.cost(client, index)
        job.judge = exchange.evaluated
        job.bound = self.method.in_memory and index > 0
        if self.world.step_s is not None:
            asked.training_s = self.world.step_s[client] * job.cost
            if self.clock is None:  # the device waits for the rest of its time
                job.pace = [Fault("pace", asked.training_s)]
        reply = exchange.found.get((client, "train"))
        if reply is not None and reply.record.task == (job.check, job.start):
            asked.over = True
            asked.reply, asked.evaluation = reply, exchange.found.get((client, "evaluate"))
        elif reply is not None:
            self.io.record_bill(reply.bill, False, "the answer to another task")
            exchange.found.pop((client, "train"))
            exchange.found.pop((client, "evaluate"), None)
        if self.clock is not None:
            asked.bytes = task_bytes(self.run, Key(round, index, 0, client), job)
        since, why = self.blamed.get(client, (round, ""))
        out = self.faults.out(round, index, [client]).get(client)
        if since < round:
            asked.drop(f"blamed in round {since}: {why}")
        elif out is not None:
            asked.drop(out)

        # A client that leaves in the middle of its task; who is gone already is not asked.
        until = self.world.until(client, exchange.at)
        asked.leaves_s = 0.0 if until is None else until - exchange.at
        leaves = None
        if math.isfinite(asked.leaves_s) and self.faults.replay is None:
            if not asked.leaves_s and not asked.over:
                asked.drop(LEFT)
            if self.clock is None:
                leaves = Leaves(at=exchange.opened + asked.leaves_s)
            else:
                slow, delay = self.faults.time(round, index, client)
                leaves = self.clock.leaving(client, job.cost, asked.bytes, exchange.at, slow, delay)
        if not asked.over:
            job.leaves = leaves
            job.faults = self.faults.of(round, index, client)
            job.lost = drops(job.faults)
        if self.experiment.base_comes and (index or job.start):
            job.with_base = lambda: with_base(self.experiment, job, {})

    def cost(self, client: int, index: int) -> int:
        """SGD steps of the client's task: the longest are handed out first."""
        train, method = self.config.train_of(client), self.method
        if method.in_memory and index != method.main_exchange:
            return 0
        if train.steps is not None:
            return train.steps
        federation = self.experiment.federation
        n = len(federation.parts[client]) if federation is not None else self.samples(client)
        return train.epochs * batch_count(n or 0, train.batch_size)

    # -- collecting --------------------------------------------------------------------------------
    def replies(self, exchange: Exchange) -> Iterator[tuple[int, Reply]]:
        """Waits for all of an exchange. Yields each client whose reply counts, in ascending id, as
        soon as its turn has come; on the virtual clock once all are there. Raises CannotGoOn where
        a client could not do its task and the configuration says to stop.
        """
        for client in sorted(exchange.dropped):
            self._note_dropped(exchange, client)
        clock = self.clock if exchange.purpose == "train" else None
        if clock is not None:
            for client in exchange.cohort:
                self._wait_for(exchange, client)
            self._check_states(exchange)
            self._decide(exchange, clock)
        for client in exchange.cohort:
            self._wait_for(exchange, client)
            asked = exchange.asked[client]
            if asked.reply is not None and not asked.reason:
                yield client, asked.reply
            elif asked.reason.startswith("failed"):
                self.may_stop(exchange.round, client, asked.reason.removeprefix("failed: "))
        if clock is None:
            self._check_states(exchange)

    def _wait_for(self, exchange: Exchange, client: int) -> None:
        """Waits until that client's part is over, and takes what comes of others meanwhile."""
        name = exchange.round, exchange.index, exchange.purpose
        while not exchange.asked[client].over:
            outcome = self.io.wait(POLL_S)
            if outcome is not None:
                key = outcome.key
                if (key.round, key.phase, key.purpose) != name:
                    self.io.unused(outcome)
                elif not (outcome.reason and self._restarts(exchange, key.client, outcome.reason)):
                    exchange.asked[key.client].take(outcome)
                    if outcome.reason:
                        self._note_dropped(exchange, key.client)
            self.watch.check()

    def _note_dropped(self, exchange: Exchange, client: int) -> None:
        reason = exchange.asked[client].reason
        self.directory.event("dropped", exchange.round, client, reason=reason)

    def _decide(self, exchange: Exchange, clock: VirtualClock) -> None:
        """On the virtual clock: who was in time."""
        for client, asked in exchange.asked.items():
            if asked.reply is not None and not asked.reason:
                asked.times = clock.seconds(
                    client,
                    self.cost(client, exchange.index),
                    asked.bytes,
                    reply_bytes(asked.reply),
                    *self.faults.time(exchange.round, exchange.index, client),
                    at=exchange.at,
                )
                asked.took_s = sum(asked.times.values())
            elif asked.reason == LEFT:
                asked.took_s = math.inf
        if self.faults.replay is not None:
            return
        leaves = {c: a.leaves_s for c, a in exchange.asked.items()}
        for client, reason in clock.late(virtual_times(exchange), leaves).items():
            if exchange.asked[client].reason != reason:
                exchange.asked[client].drop(reason)
                self._note_dropped(exchange, client)

    # -- clients that have lost their state --------------------------------------------------------
    def _restarts(self, exchange: Exchange, client: int, reason: str) -> bool:
        """Whether a client whose state is lost got its task again, from its initial state."""
        again = exchange.initial_task
        if again is None or not exchange.asked[client].job.start:
            return False
        if not self.begins_again(exchange.round, client, reason, exchange.residuals):
            return False
        exchange.restarted.append(client)
        self.io.add(exchange.round, [again(exchange, client)])
        return True

    def begins_again(
        self, round: int, client: int, reason: str, residuals: dict[str, torch.Tensor]
    ) -> bool:
        """Whether a client that was dropped for that reason begins again. What compressors remember
        of earlier messages with it no longer holds, and is removed from residuals.
        """
        if not reason.startswith(STATE_LOST) or self.config.round.state_lost != "restart":
            return False
        with self.io:  # replies are decoded with them
            for name in [n for n in residuals if n.startswith(f"client {client}/")]:
                del residuals[name]
        reason = reason.removeprefix(STATE_LOST)
        self.directory.event("restarted", round, client, reason=reason)
        log.warning("round %d: client %d begins again: %s", round, client, reason)
        return True

    def _check_states(self, exchange: Exchange) -> None:
        started = sum(1 for a in exchange.asked.values() if a.job.start)
        self.check_states(exchange.round, exchange.dropped, started)

    def check_states(self, round: int, dropped: Mapping[int, str], started: int) -> None:
        """Raises StateError where the run ends because clients have lost their states. started:
        how many were to start from one. Where others start the clients, a few that say so are not
        believed: a single false report would end the run.
        """
        lost = {c: why for c, why in dropped.items() if why.startswith(STATE_LOST)}
        if not lost:
            return
        if self.alone and (2 * len(lost) <= started or len(lost) == 1 < self.config.clients):
            return
        first = lost[min(lost)].removeprefix(STATE_LOST).rstrip(".")
        raise StateError(
            f"round {round}: {len(lost)} of the {started} clients that start from a state of their "
            f"own have lost it: clients {as_text(lost)}. {first}. Was the server "
            f"restored from an older copy? Then restore the clients' states of the same time, or "
            f"let these clients start again with --set round.state_lost=restart (the results "
            f"differ)."
        )

    # -- its end -----------------------------------------------------------------------------------
    def leave_out(self, exchange: Exchange, client: int, reason: str) -> None:
        """A reply that was accepted turned out to be unusable: the client counts as one that did
        not complete the exchange, and a resume asks it again.
        """
        asked = exchange.asked[client]
        asked.drop(f"refused: {reason}")
        self._note_dropped(exchange, client)
        if asked.reply is not None:
            with self.io:
                self.io.inbox.revoke(asked.reply.message.key)
        self.may_stop(exchange.round, client, reason)

    def may_stop(self, round: int, client: int, reason: str) -> None:
        """Raises CannotGoOn where one client that cannot go on ends the run."""
        if self.config.round.on_error == "stop":
            raise CannotGoOn(f"client {client} could not do its task in round {round}: {reason}")

    def record_bills(self, all: Iterable[Asked], left_out: str = "") -> None:
        """Records in the books which replies, and tasks, were useful, now that this is known.
        left_out: why none is that has no reason of its own. The book has the reason only of a reply
        that an earlier server received.
        """
        with self.io:
            for asked in all:
                reply, reason = asked.reply, asked.reason or left_out
                if reply is not None:
                    why = reason if reply.earlier else LEFT_OUT
                    self.io.record_bill(reply.bill, not reason, why, asked.staleness)

    # -- evaluations by clients --------------------------------------------------------------------
    def evaluations(self, exchange: Exchange) -> dict[int, dict[str, Counts]]:
        """What the clients that completed an exchange found in evaluating their models, of those
        that were asked to. In a training exchange the model that came down is the one before the
        round: what they found for it is named `received`, where that of an evaluation is `global`.
        """
        found = {}
        for client, reply in exchange.done.items():
            training = exchange.purpose == "train"
            evaluation = exchange.asked[client].evaluation if training else reply
            if evaluation is None:
                continue
            counts = evaluation.take_payload()
            if not isinstance(counts, EvaluationReply):
                body = evaluation.body()
                form, kind = evaluation.message.form, self.experiment.evaluation_reply
                counts = self.experiment.up.decode(kind, form, body)
            by_model = counts_by_model(counts, self.experiment.setting.more)
            if training and "global" in by_model:
                by_model = {"received": by_model.pop("global"), **by_model}
            found[client] = by_model
        return found

    def evaluate(
        self, round: int, down: Payload, carried: RunState, keep: Mapping[int, str], final: bool
    ) -> dict[int, dict[str, Counts]]:
        """Asks the `evaluated_clients` to evaluate their models, and the one in `down`, and waits
        for them.
        """
        exp = self.experiment
        encoded = exp.exact.encode(down)
        check = encoded.body.check()
        clients = tuple(asked_to_evaluate(self.config))
        index = len(self.method.exchanges)
        exchange = Exchange(round, index, "evaluate", clients, {}, time.monotonic())
        shared: dict[bytes, Job] = {}

        def ask(exchange: Exchange, client: int, start: str) -> Job:
            job = Job(
                client,
                encoded.form,
                encoded.body,
                check,
                cost=self.cost(client, self.method.main_exchange),
                start=start,
                state=carried.states.get(client, "") if start else "",
                keep=keep.get(client, "") if start else "",
                judge=final,
            )
            if exp.base_comes:
                whole = with_base(exp, job, shared)
                job = structs.replace(job, with_base=lambda: whole) if start else whole
            exchange.asked[client] = Asked(round, job)
            return job

        exchange.initial_task = lambda e, c: ask(e, c, "")
        jobs = [ask(exchange, client, carried.versions.get(client, "")) for client in clients]
        if final:
            self.io.link.ledger.final = round, index
        rules = dataclasses.replace(self.rules(), deadline=None, first=None)
        self.io.begin((round, index, "evaluate"), jobs, rules)
        for _ in self.replies(exchange):
            pass
        self.record_bills(exchange.asked.values())
        if exchange.dropped:
            self.directory.event("not_evaluated", round, clients=sorted(exchange.dropped))
        return self.evaluations(exchange)


def virtual_times(exchange: Exchange) -> dict[int, float]:
    """By client: the seconds after which its part was over on the virtual clock."""
    return {c: a.took_s for c, a in exchange.asked.items() if a.took_s is not None}


def with_base(experiment: Experiment, job: Job, shared: dict[bytes, Job]) -> Job:
    """The task with the model that training starts from before its payload. shared: of tasks with
    the same payload, by its digest, so that it is put together once.
    """
    base = experiment.base
    if base is None:
        return job
    made = shared.get(job.check)
    if made is None:
        body = Body([*base.body.segments, *job.body.segments])
        form, enrol = (*base.form, *job.form), job.enrol + len(base.form)
        made = Job(job.client, form, body, body.check(), enrol=enrol)
        shared[job.check] = made
    return structs.replace(
        job, form=made.form, body=made.body, check=made.check, enrol=made.enrol, with_base=None
    )

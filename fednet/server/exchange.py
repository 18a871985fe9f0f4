"""The round that is open (`OpenRound`), and its exchanges: each is a broadcast, and the replies to
it. An evaluation by the clients is an exchange too.

    open_exchange   encode what goes to each client, and hand the tasks to the protocol
    replies         wait, and yield each reply that counts, in ascending client id
    record_bills    record in the books which replies were useful

What the replies are added to is the caller's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from fednet import records, seeds
from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.errors import CannotGoOn, StateError
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, reply_bytes, task_bytes
from fednet.experiment.evaluations import (
    EvaluationReply,
    counts_by_model,
    evaluated_clients,
    evaluation_due,
)
from fednet.experiment.faults import drops
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT, STATE_LOST, Leaves, Rules, TaskSpec, end_of
from fednet.records.rows import TIMES
from fednet.server.endpoint import patience
from fednet.server.inbox import ReceivedReply
from fednet.server.io import LEFT_OUT
from fednet.server.schedule import Cohort
from fednet.training.evaluation import Counts
from fednet.training.samples import batch_count
from fednet.wire.codec import Body, Encoded
from fednet.wire.compressors.base import Memory
from fednet.wire.ledger import Kinds
from fednet.wire.messages import Fault, Key, Purpose, clean
from fednet.wire.payload import Run, weights_of

if TYPE_CHECKING:
    from fednet.server.session import Session

log = logging.getLogger(__name__)

POLL_S = 0.2  # how often a request to stop is looked for


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds. server: the method's own state at the server, which
    has the model (`Algorithm.shared_model`). versions, states: by client, of its state that was
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

    at: the second of the run at which it was asked. bytes: of the task, on the virtual clock.
    leaves_s: seconds after which the client is gone. staleness: updates since the model that it
    starts from, where training waits for nobody. memory: what compressors remember of messages with
    it once its reply counts. reply, evaluation: what came of its task; reason: why its reply does
    not count, "" as long as it does. times: how long it took on the virtual clock, by what the time
    was spent on.
    """

    spec: TaskSpec
    at: float = 0.0
    bytes: int = 0
    leaves_s: float = math.inf
    enrolled: bool = False
    staleness: int | None = None
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    reply: ReceivedReply | None = None
    evaluation: ReceivedReply | None = None
    reason: str = ""
    times: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.reply is not None or bool(self.reason)


@dataclass
class OpenExchange:
    """cohort: in ascending order. before: what it starts from. asked: by client, in the order of
    the cohort once all are asked. residuals: what compressed broadcasts have left out, and what
    compressors remember. opened: on the monotonic clock; at: the second of the run. found: replies
    that earlier servers received, by client and purpose. encoding: seconds. judge: see `TaskSpec`.
    restarted: clients that had lost their state, and were asked again from an initial one.
    schedule: who of a round's exchange is in time; on the virtual clock, see `decide`. virtual,
    virtual_split: seconds on the virtual clock from the tasks to its close, and what they were
    spent on.
    """

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    before: RunState
    residuals: dict[str, torch.Tensor]
    opened: float
    at: float = 0.0
    asked: dict[int, Asked] = field(default_factory=dict)
    found: dict[tuple[int, str], ReceivedReply] = field(default_factory=dict)
    encoding: float = 0.0
    judge: bool = False
    restarted: list[int] = field(default_factory=list)
    schedule: Cohort = field(default_factory=lambda: Cohort(set()))
    virtual: float = 0.0
    virtual_split: dict[str, float] = field(default_factory=dict)
    last: tuple[Payload, Encoded, bytes] | None = None  # what was encoded last, and its digest
    cache: JsonDict = field(default_factory=dict)
    based: dict[bytes, TaskSpec] = field(default_factory=dict)  # see `with_base`

    @property
    def done(self) -> dict[int, ReceivedReply]:
        """The replies that count, by client."""
        return {c: a.reply for c, a in self.asked.items() if a.reply is not None and not a.reason}

    @property
    def dropped(self) -> dict[int, str]:
        """By client: why it did not complete the exchange."""
        return {client: asked.reason for client, asked in self.asked.items() if asked.reason}

    def past(self, client: int, way: str) -> Memory:
        """What is remembered with a client of earlier messages that way."""
        memory = self.asked[client].memory
        return Memory(self.residuals, memory, f"client {client}/{way}/{self.index}/")


@dataclass
class OpenRound:
    """One round, from its selection to its record: each step adds what it found.

    before, after: what it starts from, and what came of it so far; a void round changes nothing.
    started: on the monotonic clock. exchange: the one that is open, or the last one; main: the one
    that the clients train in, once it is open. virtual_start: the second of the run at which its
    virtual time began. runs: of the replies that counted. reports: by the clients. spoiled: whether
    it is void because of what a client has sent that nobody knows.
    """

    number: int
    before: RunState
    after: RunState
    started: float
    exchange: OpenExchange
    main: OpenExchange
    record: records.Round
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    virtual: float = 0.0
    virtual_split: dict[str, float] = field(default_factory=dict)
    virtual_start: float = 0.0
    predicted: Kinds = field(default_factory=lambda: {"up": {}, "down": {}})
    dropped: dict[int, str] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    evaluated: dict[int, dict[str, Counts]] = field(default_factory=dict)
    reports: dict[int, dict[str, float]] = field(default_factory=dict)
    spoiled: bool = False

    @classmethod
    def begun(cls, first: OpenExchange) -> OpenRound:
        """A round whose first exchange is open."""
        record = records.Round(round=first.round, selected=list(first.cohort))
        return cls(first.round, first.before, first.before, first.opened, first, first, record)

    @property
    def failures(self) -> list[str]:
        """A sentence for each client that could not do its task, or whose reply was unusable."""
        return [
            clean(f"client {client}: {reason.replace(f'client {client}: ', '', 1)}")
            for client, reason in sorted(self.dropped.items())
            if reason.startswith(("failed", "refused", "damaged"))
        ]


# -- opening ---------------------------------------------------------------------------------------
def open_exchange(
    session: Session, round: int, index: int, cohort: Sequence[int], before: RunState, at: float
) -> OpenExchange:
    """Encodes each client's task of an exchange and hands them to the protocol. at: the second of
    the run.
    """
    exchange = new_exchange(session, round, index, cohort, before, at)
    for client in cohort:
        ask(session, exchange, client)
    for (client, purpose), reply in list(exchange.found.items()):
        if client not in exchange.asked and purpose == "train":
            why = "clients joined, and this one is not in the round any more"
            session.io.record_bill(reply.bill, False, why)
            del exchange.found[client, purpose]
    exchange.encoding = time.monotonic() - exchange.opened
    if session.clock is None:
        if session.faults.replay is None:  # else who counts is on record
            exchange.schedule.first = session.config.first
        # What an earlier server received is among the first.
        came = [client for client, purpose in exchange.found if purpose == "train"]
        for client in (*came, *exchange.dropped):
            exchange.schedule.on(0.0, client, exchange.asked[client].reason)
        drop_late(exchange)
    specs = [a.spec for a in exchange.asked.values() if not a.over]
    session.io.begin((round, index, "train"), specs, waiting_rules(session))
    return exchange


def new_exchange(
    session: Session, round: int, index: int, cohort: Sequence[int], before: RunState, at: float
) -> OpenExchange:
    """An exchange in which nobody is asked yet."""
    config, residuals = session.config, dict(before.residuals)
    session.host.begin(round, index, cohort)
    if config.schedule.mode == "sync":
        session.sent.clear()
    session.sent.remembered = residuals
    opened = time.monotonic()
    schedule = Cohort(set(cohort))
    exchange = OpenExchange(
        round, index, "train", tuple(cohort), before, residuals, opened, at, schedule=schedule
    )
    if config.evaluate.clients == "auto" and index == session.method.main_exchange:
        exchange.judge = evaluation_due(config, round)
    with session.io:
        exchange.found = session.io.inbox.found(round, index)
    return exchange


def waiting_rules(session: Session) -> Rules:
    """Returns how long the server waits, and for what."""
    section = session.config.round
    # Then the times of this process do not decide who counts.
    virtual = session.clock is not None or session.faults.replay is not None
    return dataclasses.replace(
        patience(session.config, session.io.inline, session.endpoint.wide),
        deadline=None if virtual else section.deadline,
    )


# -- a client's task -------------------------------------------------------------------------------
def ask(session: Session, exchange: OpenExchange, client: int, again: bool = False) -> Asked:
    """Asks a client: encodes its task, once for clients in a row that get the same. again: it has
    lost its state, and starts from its initial one.
    """
    exp, method, before = session.experiment, session.method, exchange.before
    round, index = exchange.round, exchange.index
    spec = TaskSpec(client, round=round)
    if not again:
        spec.start, spec.state = before.versions.get(client, ""), before.states.get(client, "")
        spec.keep = session.durable.get(client, "")
    asked = exchange.asked[client] = Asked(spec, exchange.at)
    if exchange.purpose == "evaluate":
        assert exchange.last is not None
        _, encoded, spec.check = exchange.last
        spec.form, spec.body = encoded.form, encoded.body
        spec.cost, spec.judge = task_cost(session, client, method.main_exchange), exchange.judge
        if exp.base_comes and not spec.start:
            asked.spec = with_base(exp, spec, exchange.based)
        elif exp.base_comes:
            spec.with_base = functools.partial(with_base, exp, spec, exchange.based)
        return asked

    down, last = method.broadcast(before.server, index, client), exchange.last
    # Where bytes depend on what a client remembers, each has its own.
    same = last is not None and all(map(operator.is_, vars(last[0]).values(), vars(down).values()))
    if last is not None and same and not exp.down.shared:
        _, encoded, spec.check = last
    else:
        encoded = exp.down.encode(
            down,
            lambda name: seeds.rng(session.config.seed, f"compress/down/{index}/{name}", round),
            exchange.residuals,
            exp.agreed,
            exchange.cache,
            slot=f"{index}/",
            past=exchange.past(client, "down"),
        )
        spec.check = encoded.body.check()
        exchange.last = down, encoded, spec.check
    spec.form, spec.body = encoded.form, encoded.body
    if not (spec.start or index):
        enrolment = method.enroll(before.server, client, session.host)
        if enrolment is not None:
            asked.enrolled = True
            given = exp.down.encode(enrolment)
            spec.form, spec.enrol = [*given.form, *encoded.form], len(given.form)
            spec.body = Body([*given.body.segments, *encoded.body.segments])
            spec.check = spec.body.check()
        if exp.base_comes:
            asked.spec = with_base(exp, spec, exchange.based)
    complete_task(session, exchange, asked, encoded.seen)
    return asked


def complete_task(session: Session, exchange: OpenExchange, asked: Asked, down: Payload) -> None:
    """Adds to a task how long it takes, the faults planned for it and when its client leaves. Finds
    the reply that an earlier server received, and the reason for which a client is not asked. down:
    what the client is sent.
    """
    exp, clock, faults, spec = session.experiment, session.clock, session.faults, asked.spec
    client, round, index = spec.client, exchange.round, exchange.index
    if (weights := weights_of(down)) is not None:
        session.sent[client] = weights
    spec.cost, spec.judge = task_cost(session, client, index), exchange.judge
    spec.bound = session.method.in_memory and index > 0
    if exp.base_comes and (index or spec.start):
        spec.with_base = functools.partial(with_base, exp, spec, exchange.based)
    if session.world.step_s is not None and clock is None:
        # The device waits for the rest of its time.
        spec.pace = [Fault("pace", session.world.step_s[client] * spec.cost)]
    reply = exchange.found.get((client, "train"))
    if reply is not None and reply.record.task == (spec.check, spec.start):
        asked.reply, asked.evaluation = reply, exchange.found.get((client, "evaluate"))
    elif reply is not None:
        session.io.record_bill(reply.bill, False, "the answer to another task")
        exchange.found.pop((client, "train"))
        exchange.found.pop((client, "evaluate"), None)
    if clock is not None:
        asked.bytes = task_bytes(session.run_id, Key(round, index, 0, client), spec)
    blamed_in, why = session.blamed.get(client, (round, ""))
    fault = faults.out(round, index, [client]).get(client, "")
    asked.reason = f"blamed in round {blamed_in}: {why}" if blamed_in < round else fault

    # A client that leaves in the middle of its task; who is gone already is not asked.
    until = session.world.until(client, exchange.at)
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


def with_base(experiment: Experiment, spec: TaskSpec, based: dict[bytes, TaskSpec]) -> TaskSpec:
    """The task with the model that training starts from before its payload. based: of tasks with
    the same payload, by its digest, so that it is put together once; a task that held its exchange
    would keep a round's models until the garbage collector next runs.
    """
    base = experiment.base
    assert base is not None
    made = based.get(spec.check)
    if made is None:
        body = Body([*base.body.segments, *spec.body.segments])
        form, enrol = (*base.form, *spec.form), spec.enrol + len(base.form)
        made = based[spec.check] = TaskSpec(spec.client, form, body, body.check(), enrol=enrol)
    return structs.replace(
        spec, form=made.form, body=made.body, check=made.check, enrol=made.enrol, with_base=None
    )


def task_cost(session: Session, client: int, index: int) -> int:
    """SGD steps of the client's task: the longest are handed out first."""
    train, method = session.config.train_of(client), session.method
    if method.in_memory and index != method.main_exchange:
        return 0
    if train.steps is not None:
        return train.steps
    federation = session.experiment.federation
    n = len(federation.parts[client]) if federation is not None else session.samples(client)
    return train.epochs * batch_count(n or 0, train.batch_size)


# -- collecting ------------------------------------------------------------------------------------
def replies(session: Session, exchange: OpenExchange) -> Iterator[tuple[int, ReceivedReply]]:
    """Waits for all of an exchange. Yields each client whose reply counts, in ascending id, as soon
    as its turn has come; on the virtual clock once all are there. Raises CannotGoOn where a client
    could not do its task and the configuration says to stop.
    """
    for client in sorted(exchange.dropped):
        note_dropped(session, exchange, client)
    if session.clock is not None and exchange.purpose == "train":
        for client in exchange.cohort:
            while not exchange.asked[client].over:
                take_outcome(session, exchange)
        decide(session, exchange, session.clock)
    for client in exchange.cohort:
        while not exchange.asked[client].over:
            take_outcome(session, exchange)
        asked = exchange.asked[client]
        if asked.reply is not None and not asked.reason:
            yield client, asked.reply
        elif asked.reason.startswith("failed"):
            may_stop(session, exchange.round, client, asked.reason.removeprefix("failed: "))
    started = sum(1 for a in exchange.asked.values() if a.spec.start)
    check_states(session, exchange.round, exchange.dropped, started)


def take_outcome(session: Session, exchange: OpenExchange) -> None:
    """Takes the next outcome. A client whose state is lost gets its task again, from its initial
    state; not in a later exchange, which needs what the client kept of this round.
    """
    outcome = session.io.wait(POLL_S)
    if outcome is not None:
        key, reason = outcome.key, outcome.reason
        name = exchange.round, exchange.index, exchange.purpose
        if (key.round, key.phase, key.purpose) != name:
            session.io.unused(outcome)
        elif (
            exchange.asked[key.client].spec.start
            and not (exchange.purpose == "train" and exchange.index)
            and begins_again(session, key.round, key.client, reason, exchange.residuals)
        ):
            exchange.restarted.append(key.client)
            asked = ask(session, exchange, key.client, again=True)
            session.io.add(exchange.round, [asked.spec])
        else:
            asked = exchange.asked[key.client]
            asked.reply, asked.evaluation, asked.reason = outcome.reply, outcome.evaluation, reason
            if reason:
                note_dropped(session, exchange, key.client)
            if session.clock is None:
                over(session, exchange, key.client)
    session.watch.check()


def over(session: Session, exchange: OpenExchange, client: int) -> None:
    """On the real clock: a client's task is over now. Where the exchange closes by it, the tasks of
    the others are called off; what has come of them in the same moment is left out.
    """
    now = time.monotonic() - exchange.opened
    exchange.schedule.on(now, client, exchange.asked[client].reason)
    for late in drop_late(exchange):
        note_dropped(session, exchange, late)
        session.io.cancel(exchange.asked[late].reason)
    if exchange.schedule.closed:
        while session.io.outcomes:
            session.io.unused(session.io.outcomes.popleft())


def drop_late(exchange: OpenExchange) -> list[int]:
    """Returns who is out because the exchange closed, with their reasons set."""
    dropped, asked = exchange.schedule.dropped, exchange.asked
    late = [client for client in dropped if not asked[client].over]
    for client in late:
        asked[client].reason = dropped[client]
    return late


def note_dropped(session: Session, exchange: OpenExchange, client: int) -> None:
    reason = exchange.asked[client].reason
    session.files.event("dropped", exchange.round, client, reason=reason)


def decide(session: Session, exchange: OpenExchange, clock: VirtualClock) -> None:
    """On the virtual clock: who was in time, when the exchange closed, and what the time was spent
    on. A client that is lost is waited for as long as one may be.
    """
    deadline = session.config.round.deadline
    latest = math.inf if deadline is None else deadline
    ends: dict[int, tuple[float, str]] = {}
    for client, asked in exchange.asked.items():
        if asked.reply is not None and not asked.reason:
            asked.times = clock.seconds(
                client,
                asked.spec.cost,
                asked.bytes,
                reply_bytes(asked.reply),
                *session.faults.time(exchange.round, exchange.index, client),
                at=exchange.at,
            )
            ends[client] = end_of(sum(asked.times.values()), asked.leaves_s, latest)
        elif asked.reason == LEFT:
            ends[client] = end_of(math.inf, asked.leaves_s, latest)
        else:
            ends[client] = clock.patience, asked.reason
    cohort = Cohort.of(ends, session.config.first)
    exchange.virtual = cohort.at
    exchange.virtual_split = {"sending": 0.0, "training": 0.0}
    if cohort.replied:
        exchange.virtual_split = dict(exchange.asked[cohort.replied[-1]].times)
    waiting = cohort.at - sum(exchange.virtual_split.values())
    exchange.virtual_split["waiting"] = max(0.0, waiting)
    if session.faults.replay is not None:  # who counts is on record
        return
    for client, reason in cohort.dropped.items():
        asked = exchange.asked[client]
        if asked.reason in ("", LEFT) and asked.reason != reason:
            asked.reason = reason
            note_dropped(session, exchange, client)


# -- clients that have lost their state ------------------------------------------------------------
def begins_again(
    session: Session, round: int, client: int, reason: str, residuals: dict[str, torch.Tensor]
) -> bool:
    """Whether a client that was dropped for that reason begins again. What compressors remember of
    earlier messages with it no longer holds, and is removed from residuals.
    """
    if not reason.startswith(STATE_LOST) or session.config.round.state_lost != "restart":
        return False
    with session.io:  # replies are decoded with them
        for name in [n for n in residuals if n.startswith(f"client {client}/")]:
            del residuals[name]
    reason = reason.removeprefix(STATE_LOST)
    session.files.event("restarted", round, client, reason=reason)
    log.warning("round %d: client %d begins again: %s", round, client, reason)
    return True


def check_states(session: Session, round: int, dropped: Mapping[int, str], started: int) -> None:
    """Raises StateError where the run ends because clients have lost their states. started: how
    many were to start from one. Where others start the clients, a few that say so are not believed:
    a single false report would end the run.
    """
    lost = {c: why for c, why in dropped.items() if why.startswith(STATE_LOST)}
    few = 2 * len(lost) <= started or len(lost) == 1 < session.config.clients
    if not lost or (session.endpoint.alone and few):
        return
    first = lost[min(lost)].removeprefix(STATE_LOST).rstrip(".")
    raise StateError(
        f"round {round}: {len(lost)} of the {started} clients that start from a state of their "
        f"own have lost it: clients {as_text(lost)}. {first}. Was the server restored from an "
        f"older copy? Then restore the clients' states of the same time, or let these clients "
        f"start again with --set round.state_lost=restart (the results differ)."
    )


# -- its end ---------------------------------------------------------------------------------------
def leave_out(session: Session, exchange: OpenExchange, client: int, reason: str) -> None:
    """A reply that was accepted turned out to be unusable: the client counts as one that did not
    complete the exchange, and a resume asks it again.
    """
    asked = exchange.asked[client]
    asked.reason = f"refused: {reason}"
    note_dropped(session, exchange, client)
    if asked.reply is not None:
        with session.io:
            session.io.inbox.revoke(asked.reply.message.key)
    may_stop(session, exchange.round, client, reason)


def may_stop(session: Session, round: int, client: int, reason: str) -> None:
    """Raises CannotGoOn where one client that cannot go on ends the run."""
    if session.config.round.on_error == "stop":
        raise CannotGoOn(f"client {client} could not do its task in round {round}: {reason}")


def record_bills(session: Session, all: Iterable[Asked], left_out: str = "") -> None:
    """Records in the books which replies, and their tasks, were useful, now that this is known.
    left_out: if it is not empty, none was useful, for this reason unless the client has one of its
    own. The book has that reason only of a reply that an earlier server received, else `LEFT_OUT`.
    """
    with session.io:
        for asked in all:
            reply, reason = asked.reply, asked.reason or left_out
            if reply is not None:
                why = reason if reply.earlier else LEFT_OUT
                session.io.record_bill(reply.bill, not reason, why, asked.staleness)


# -- evaluations by clients ------------------------------------------------------------------------
def evaluations(session: Session, exchange: OpenExchange) -> dict[int, dict[str, Counts]]:
    """What the clients that completed an exchange found in evaluating their models, of those that
    were asked to. In a training exchange the model that came down is the one before the round: what
    they found for it is named `received`, where that of an evaluation is `global`.
    """
    exp, training, found = session.experiment, exchange.purpose == "train", {}
    for client, reply in exchange.done.items():
        evaluation = exchange.asked[client].evaluation if training else reply
        if evaluation is None:
            continue
        counts = evaluation.take_payload()
        if not isinstance(counts, EvaluationReply):
            form = evaluation.message.form
            counts = exp.up.decode(exp.evaluation_reply, form, evaluation.body())
        by_model = counts_by_model(counts, exp.setting.more)
        if training and "global" in by_model:
            by_model = {"received": by_model.pop("global"), **by_model}
        found[client] = by_model
    return found


def evaluated_by_clients(
    session: Session, round: int, down: Payload, before: RunState, final: bool
) -> dict[int, dict[str, Counts]]:
    """Asks the `evaluated_clients` to evaluate their models, and the one in `down`, and waits for
    them.
    """
    encoded = session.experiment.exact.encode(down)
    clients, index = tuple(evaluated_clients(session.config)), len(session.method.exchanges)
    exchange = OpenExchange(round, index, "evaluate", clients, before, {}, time.monotonic())
    exchange.last, exchange.judge = (down, encoded, encoded.body.check()), final
    exchange.schedule = Cohort(set(clients))
    for client in clients:
        ask(session, exchange, client)
    if final:
        session.io.link.ledger.final = round, index
    rules = dataclasses.replace(waiting_rules(session), deadline=None)
    specs = [asked.spec for asked in exchange.asked.values()]
    session.io.begin((round, index, "evaluate"), specs, rules)
    for _ in replies(session, exchange):
        pass
    record_bills(session, exchange.asked.values())
    if exchange.dropped:
        session.files.event("not_evaluated", round, clients=sorted(exchange.dropped))
    return evaluations(session, exchange)

"""The round that is open (`OpenRound`), and its exchanges: each is a broadcast, and the replies to
it. An evaluation by the clients is an exchange too.

    open_exchange   encode what goes to each client, and hand the tasks to the protocol
    take            what follows from the next event: a task is over, or the exchange closes
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from msgspec import structs

from fednet import records, seeds
from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.errors import CannotGoOn, RemoteProtocolError, StateError
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, task_bytes
from fednet.experiment.evaluations import (
    EvaluationReply,
    counts_by_model,
    evaluated_clients,
    evaluation_due,
)
from fednet.experiment.faults import drops
from fednet.ids import as_text
from fednet.journal.book import Kinds
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT, STATE_LOST, Leaves, TaskSpec, end_of
from fednet.records.manifest import Candidate
from fednet.records.rows import TIMES
from fednet.server.inbox import ReceivedReply, evaluation_in
from fednet.server.io import LEFT_OUT
from fednet.server.schedule import Cohort
from fednet.server.sources import Asked, Event, RealTime, SimulatedTime, Source, collect
from fednet.training.evaluation import Counts
from fednet.training.samples import batch_count
from fednet.wire.codec import Body, Encoded, cut
from fednet.wire.compressors.base import Memory
from fednet.wire.messages import Fault, Key, Purpose, clean
from fednet.wire.payload import Run, weights_of

if TYPE_CHECKING:
    from fednet.server.session import Session

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """The state of a run between two rounds. server: the method's own state at the server, which
    has the model (`Algorithm.shared_model`). versions, states: by client, of its state that was
    last used, and its SHA-256. residuals: what compressed broadcasts have left out so far, by
    field, and, by client, what compressors remember at both ends. candidates: what each client
    replied last, where the clients are selected by it.
    """

    server: State
    versions: Mapping[int, str]
    states: Mapping[int, str]
    residuals: Mapping[str, torch.Tensor]
    candidates: Mapping[int, Candidate] = field(default_factory=dict)


@dataclass
class OpenExchange:
    """cohort: in ascending order. before: what it starts from. asked: by client, in the order of
    the cohort once all are asked. residuals: what compressed broadcasts have left out, and what
    compressors remember. opened: on the monotonic clock; at: the second of the run. found: replies
    that earlier servers received, by client. encoding: seconds. judge: see `TaskSpec`.
    restarted: clients that had lost their state, and were asked again from an initial one.
    schedule: who of its clients is in time. noted: of whom it is on record that they were dropped.
    fed: clients of the cohort, from the first on, whose replies have been added up or left out.
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
    found: dict[int, ReceivedReply] = field(default_factory=dict)
    encoding: float = 0.0
    judge: bool = False
    restarted: list[int] = field(default_factory=list)
    schedule: Cohort = field(default_factory=lambda: Cohort(()))
    noted: set[int] = field(default_factory=set)
    fed: int = 0
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
) -> tuple[OpenExchange, Source]:
    """Encodes each client's task of an exchange and hands them to the protocol. at: the second of
    the run. Returns the exchange, and where its events come from.
    """
    exchange = new_exchange(session, round, index, cohort, before, at)
    for client in cohort:
        ask(session, exchange, client)
    for client, reply in list(exchange.found.items()):
        if client not in exchange.asked:
            why = "clients joined, and this one is not in the round any more"
            session.clients.verdict([(reply.message.key, why, None)])
            del exchange.found[client]
    exchange.encoding = time.monotonic() - exchange.opened
    if session.faults.replay is None:  # else who counts is on record
        exchange.schedule.first = session.config.first
    source = source_of(session, exchange)
    # Replies that an earlier server received, in the order in which they came, are the first.
    for client in (*exchange.found, *[c for c in cohort if c not in exchange.found]):
        source.given(client)
    if isinstance(source, RealTime):  # nobody else is asked where the exchange closes by these
        while (over := source.over()) is not None:
            take(session, exchange, Event(0.0, over, exchange.asked[over].reason))
    specs = [a.spec for a in exchange.asked.values() if not a.over]
    session.clients.open((round, index, "train"), specs, deadline_s(session))
    return exchange, source


def new_exchange(
    session: Session, round: int, index: int, cohort: Sequence[int], before: RunState, at: float
) -> OpenExchange:
    """An exchange in which nobody is asked yet."""
    config, residuals = session.config, dict(before.residuals)
    session.host.begin(round, index, cohort)
    if config.schedule.mode == "sync":
        session.clients.sent.clear()
    session.clients.sent.remembered = residuals
    opened = time.monotonic()
    schedule = Cohort(tuple(cohort))
    exchange = OpenExchange(
        round, index, "train", tuple(cohort), before, residuals, opened, at, schedule=schedule
    )
    if config.evaluate.clients == "auto" and index == session.method.main_exchange:
        exchange.judge = evaluation_due(config, round)
    exchange.found = session.clients.found(round, index)
    return exchange


def deadline_s(session: Session) -> float | None:
    """After how many seconds of this process's time a reply is late; None: that decides nothing."""
    if session.clock is not None or session.faults.replay is not None:
        return None
    return session.config.round.deadline


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
        spec.keep = session.records.durable.get(client, "")
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
        session.clients.sent[client] = weights
    spec.cost, spec.judge = task_cost(session, client, index), exchange.judge
    spec.bound = session.method.exchanges[index].summation.bound
    if exp.base_comes and (index or spec.start):
        spec.with_base = functools.partial(with_base, exp, spec, exchange.based)
    if session.world.step_s is not None and clock is None:
        # The device waits for the rest of its time.
        spec.pace = [Fault("pace", session.world.step_s[client] * spec.cost)]
    reply = exchange.found.get(client)
    if reply is not None and reply.record.task == (spec.check, spec.start):
        asked.reply = reply
    elif reply is not None:
        key = reply.message.key
        session.clients.verdict([(key, "the answer to another task", None)])
        del exchange.found[client]
    if clock is not None:
        asked.bytes = task_bytes(session.records.run_id, Key(round, index, 0, client), spec)
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
    if not method.exchanges[index].summation.trains:
        return 0
    if train.steps is not None:
        return train.steps
    federation = session.experiment.federation
    if federation is not None:
        n: int | None = len(federation.parts[client])
    else:
        n = session.clients.sizes.samples(client)
    return train.epochs * batch_count(n or 0, train.batch_size)


# -- collecting ------------------------------------------------------------------------------------
def source_of(session: Session, exchange: OpenExchange) -> Source:
    """The events of an exchange of a round, or of an evaluation, in seconds from its beginning."""

    def again(client: int) -> bool:
        return asked_again(session, exchange, client)

    phase = exchange.index, exchange.purpose
    real = RealTime(session.clients, exchange.asked, exchange.opened, phase, again)
    clock = session.clock
    if clock is None or exchange.purpose == "evaluate":
        return real

    def end(client: int, up: int | None) -> tuple[float, str]:
        if up is None:  # until all ends are known none is next: each reply counts among the bytes
            return 0.0, ""
        task = exchange.asked[client]
        return end_on(session, clock, task, exchange.index, 0.0, up, task.reason)

    return SimulatedTime(real, end)


def end_on(
    session: Session,
    clock: VirtualClock,
    task: Asked,
    index: int,
    began: float,
    up: int,
    lost: str,
) -> tuple[float, str]:
    """When a task that began at that second is over on the virtual clock, and why it has no reply
    then. up: bytes of its reply; lost: why none came. A client that is lost is waited for as long
    as one may be; one that says that it lost its state is not.
    """
    if lost.startswith(STATE_LOST):
        return began, lost
    if lost and lost != LEFT:
        return began + clock.patience, lost
    client, cost, deadline = task.spec.client, task.spec.cost, session.config.round.deadline
    slow, delay = session.faults.time(task.spec.round, index, client)
    task.times = clock.seconds(client, cost, task.bytes, up, slow, delay, at=task.at)
    comes = math.inf if lost else began + sum(task.times.values())
    latest = math.inf
    if deadline is not None and session.faults.replay is None:
        latest = began + deadline
    return end_of(comes, began + task.leaves_s, latest)


def asked_again(session: Session, exchange: OpenExchange, client: int) -> bool:
    """Whether a client is asked again, whose task has just ended: one whose state is lost may begin
    again from its initial state; not in a later exchange, which needs what the client kept of this
    round.
    """
    reason, residuals = exchange.asked[client].reason, exchange.residuals
    later = exchange.purpose == "train" and exchange.index > 0
    if later or not exchange.asked[client].spec.start:
        return False
    if not begins_again(session, exchange.round, client, reason, residuals):
        return False
    exchange.restarted.append(client)
    asked = ask(session, exchange, client, again=True)
    if asked.over:
        return False
    session.clients.add(exchange.round, [asked.spec])
    return True


def take(session: Session, exchange: OpenExchange, event: Event) -> None:
    """A client's task is over. Where the exchange closes by it, the tasks of the others are called
    off, and what has come of them in the same moment is left out.
    """
    schedule, asked = exchange.schedule, exchange.asked
    at, client, reason = event
    assert client is not None
    asked[client].reason = reason
    if reason:
        note_dropped(session, exchange, client)
    schedule.on(at, client, reason)
    if not schedule.closed:
        return
    under_way = ""
    for late, why in schedule.dropped.items():
        task = asked[late]
        under_way = under_way or ("" if task.over else why)
        if task.reason in ("", LEFT):  # else it is known what happened to it
            task.reason = why
        note_dropped(session, exchange, late)
    if under_way:
        session.clients.cancel(under_way)
    session.clients.discard()


def note_dropped(session: Session, exchange: OpenExchange, client: int) -> None:
    """Raises CannotGoOn where the client could not do its task and the configuration says to
    stop.
    """
    reason = exchange.asked[client].reason
    if client in exchange.noted:
        return
    exchange.noted.add(client)
    session.records.files.event("dropped", exchange.round, client, reason=reason)
    if reason.startswith("failed"):
        may_stop(session, exchange.round, client, reason.removeprefix("failed: "))


# -- clients that have lost their state ------------------------------------------------------------
def begins_again(
    session: Session, round: int, client: int, reason: str, residuals: dict[str, torch.Tensor]
) -> bool:
    """Whether a client that was dropped for that reason begins again. What compressors remember of
    earlier messages with it no longer holds, and is removed from residuals.
    """
    if not reason.startswith(STATE_LOST) or session.config.round.state_lost != "restart":
        return False
    with session.clients.paused():  # replies are decoded with them
        for name in [n for n in residuals if n.startswith(f"client {client}/")]:
            del residuals[name]
    reason = reason.removeprefix(STATE_LOST)
    session.records.files.event("restarted", round, client, reason=reason)
    log.warning("round %d: client %d begins again: %s", round, client, reason)
    return True


def check_states(session: Session, exchange: OpenExchange) -> None:
    """Raises StateError where the run ends because clients of an exchange that is closed have lost
    their states, see `check_lost`.
    """
    started = sum(1 for task in exchange.asked.values() if task.spec.start)
    check_lost(session, exchange.round, exchange.dropped, started)


def check_lost(session: Session, round: int, dropped: Mapping[int, str], started: int) -> None:
    """Raises StateError where the run ends because clients have lost their states. started: how
    many were to start from one. Where others start the clients, a few that say so are not believed:
    a single false report would end the run.
    """
    lost = {c: why for c, why in dropped.items() if why.startswith(STATE_LOST)}
    few = 2 * len(lost) <= started or len(lost) == 1 < session.config.clients
    if not lost or (session.clients.alone and few):
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
        session.clients.revoke(asked.reply.message.key)
    may_stop(session, exchange.round, client, reason)


def may_stop(session: Session, round: int, client: int, reason: str) -> None:
    """Raises CannotGoOn where one client that cannot go on ends the run."""
    if session.config.round.on_error == "stop":
        raise CannotGoOn(f"client {client} could not do its task in round {round}: {reason}")


def record_verdict(session: Session, all: Iterable[Asked], left_out: str = "") -> None:
    """Records in the books which replies, and their tasks, were useful, now that this is known.
    left_out: if it is not empty, none was useful, for this reason unless the client has one of its
    own. The book has that reason only of a reply that an earlier server received, else `LEFT_OUT`.
    """
    replies = []
    for asked in all:
        reply, reason = asked.reply, asked.reason or left_out
        if reply is not None:
            if reason and not reply.earlier:
                reason = LEFT_OUT
            replies.append((reply.message.key, reason, asked.staleness))
    session.clients.verdict(replies)


# -- evaluations by clients ------------------------------------------------------------------------
def evaluations(session: Session, exchange: OpenExchange) -> dict[int, dict[str, Counts]]:
    """What the clients that completed an exchange found in evaluating their models, of those that
    were asked to. In a training exchange the model that came down is the one before the round: what
    they found for it is named `received`, where that of an evaluation is `global`.
    """
    exp, training, found = session.experiment, exchange.purpose == "train", {}
    for client, reply in exchange.done.items():
        counts = reply.evaluation if training else reply.take_payload()
        if counts is None:
            counts = evaluation_on_disk(session, client, reply)
        if counts is None:
            continue
        assert isinstance(counts, EvaluationReply)
        by_model = counts_by_model(counts, exp.setting.more)
        if training and "global" in by_model:
            by_model = {"received": by_model.pop("global"), **by_model}
        found[client] = by_model
    return found


def evaluation_on_disk(
    session: Session, client: int, reply: ReceivedReply
) -> EvaluationReply | None:
    """The evaluation in a reply, where it is not in memory; None where there is none that can be
    used.
    """
    exp = session.experiment
    form = reply.message.form
    key = reply.message.key
    tested = session.clients.sizes.tested(client)
    if key.purpose == "evaluate":  # it was checked when it came
        return evaluation_in(exp, client, form, reply.body(), tested)
    own = len(exp.algorithm.exchanges[key.phase].up.fields)
    if reply.refused or len(form) == own:
        return None
    _, evaluation = cut(form, reply.body(), own)
    try:
        return evaluation_in(exp, client, *evaluation, tested)
    except RemoteProtocolError:  # as when it came, of which there is an event
        return None


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
    exchange.schedule = Cohort(clients)
    for client in clients:
        ask(session, exchange, client)
    specs = [asked.spec for asked in exchange.asked.values()]
    session.clients.open((round, index, "evaluate"), specs, final=final)
    source = source_of(session, exchange)
    collect(exchange.schedule, source, functools.partial(take, session, exchange))
    check_states(session, exchange)
    record_verdict(session, exchange.asked.values())
    if exchange.dropped:
        session.records.files.event("not_evaluated", round, clients=sorted(exchange.dropped))
    return evaluations(session, exchange)

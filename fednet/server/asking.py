"""A client's task: what of the server's state goes down to it, encoded, and what strikes it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec import structs

from fednet import seeds
from fednet import world as worlds
from fednet.algorithms.state import State
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, task_bytes
from fednet.experiment.faults import Faults, drops
from fednet.experiment.judging import evaluation_due
from fednet.plain import JsonDict
from fednet.protocol.tasks import LEFT, Job, Leaves
from fednet.server.inbox import Inbox, Reply, Sent
from fednet.server.io import Outcome, ServerIO, Settled
from fednet.training.hosts import ServerHost
from fednet.training.samples import batch_count
from fednet.wire.codec import Body, Encoded
from fednet.wire.messages import Fault, Field, Key, Purpose
from fednet.wire.payload import Payload, weights_of
from fednet.wire.sending import Past


@dataclass
class Phase:
    """A phase that is open, or over."""

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    start: dict[int, str]
    seen: dict[int, Payload]  # what each client was sent, as it sees it
    residuals: dict[str, torch.Tensor]
    opened: float
    out: dict[int, str] = field(default_factory=dict)  # who is not asked, and why
    spooled: dict[tuple[int, str], Reply] = field(default_factory=dict)
    done: dict[int, Reply] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    declared: Mapping[int, int] = field(default_factory=dict)  # samples by client, at most
    came: dict[int, Reply] = field(default_factory=dict)  # also of those that do not count
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    virtual: dict[int, float] = field(default_factory=dict)
    # On the virtual clock: all bytes of each client's task.
    down: dict[int, int] = field(default_factory=dict)
    encoding: float = 0.0
    virtual_split: dict[int, dict[str, float]] = field(default_factory=dict)
    at: float = 0.0  # the second of the run at which it was opened
    leaves: dict[int, float] = field(default_factory=dict)  # seconds after which a client is gone
    training: dict[int, float] = field(default_factory=dict)  # seconds, where devices have a pace
    enrolled: set[int] = field(default_factory=set)  # who gets what is given once
    # Where training waits for nobody: updates since the model that each reply started from.
    staleness: dict[int, int] = field(default_factory=dict)
    last: tuple[Payload, Encoded, bytes] | None = None  # what was encoded last, and its digest
    cache: JsonDict = field(default_factory=dict)
    # The task of a client whose state is lost, from its initial state; None: it cannot have one.
    # It is given the phase: if it held it, the round's models would stay until the garbage
    # collector next runs, which is seldom.
    initial_task: Callable[[Phase, int], Job] | None = None
    restarted: list[int] = field(default_factory=list)  # clients that got such a task
    # By client: what compressors remember with it, once its reply counts.
    ahead: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    @property
    def name(self) -> tuple[int, int, Purpose]:
        return self.round, self.index, self.purpose

    def past(self, client: int, way: str, round: int) -> Past:
        """What is remembered with a client of earlier messages that way."""
        ahead = self.ahead.setdefault(client, {})
        return Past(self.residuals, ahead, f"client {client}/{way}/{self.index}/", round)


def with_base(
    experiment: Experiment, form: Sequence[Field], body: Body, check: bytes, enrol: int = 0
) -> tuple[Sequence[Field], Body, bytes, int]:
    """(form, body, its digest, fields given once) of a client's first task, with the model that
    training starts from where the server sends it.
    """
    base = experiment.base
    if base is None:
        return form, body, check, enrol
    body = Body([*base.body.segments, *body.segments])
    return (*base.form, *form), body, body.check(), enrol + len(base.form)


class Asking:
    """Makes the jobs of phases. samples(client): how many its site says it has; None where nobody
    has said so yet. clock: None where time is real. sent: filled with the weights that each
    client was sent with its last task.
    """

    def __init__(
        self,
        experiment: Experiment,
        spool: Inbox,
        *,
        io: ServerIO,
        run: str,
        host: ServerHost,
        faults: Faults,
        clock: VirtualClock | None,
        samples: Callable[[int], int | None],
        sent: Sent,
    ) -> None:
        """Nine arguments: what a task is made of."""
        self.experiment, self.config = experiment, experiment.config
        self.method = experiment.algorithm
        self.spool, self.io = spool, io
        self.run, self.host, self.faults, self.clock = run, host, faults, clock
        self.world = clock.world if clock is not None else worlds.of(self.config)
        self.samples = samples
        self.sent = sent
        self._rounds = self.config.schedule.mode == "sync"

    def prepared(
        self,
        round: int,
        index: int,
        cohort: Sequence[int],
        versions: Mapping[int, str],
        residuals: dict[str, torch.Tensor],
        at: float = 0.0,
    ) -> Phase:
        """A phase of which nothing is handed out yet. at: the second of the run."""
        self.host.begin(round, index, cohort)
        if self._rounds:
            self.sent.clear()
        self.sent.remembered = residuals
        start = {c: versions.get(c, "") for c in cohort}
        phase = Phase(
            round, index, "train", tuple(cohort), start, {}, residuals, time.monotonic(), at=at
        )
        with self.io.own():
            phase.spooled = self.spool.found(round, index)
        return phase

    def ask(self, phase: Phase, client: int, server: State, state: str, keep: str) -> Job:
        """A client's task of a phase, encoded."""
        method, index, start = self.method, phase.index, phase.start[client]
        encoded, check = self._encoded(phase, method.broadcast(server, index, client), client)
        phase.seen[client] = encoded.seen
        enrolment = method.enroll(server, client, self.host) if not start and index == 0 else None
        if enrolment is not None:
            phase.enrolled.add(client)
        given = None if enrolment is None else self.experiment.down.encode(enrolment)
        parts = [encoded] if given is None else [given, encoded]
        form: Sequence[Field] = [f for part in parts for f in part.form]
        enrol, body = 0, encoded.body
        if given is not None:
            enrol, body = len(given.form), Body([s for part in parts for s in part.body.segments])
            check = body.check()

        def behind_base(job: Job) -> Job:
            """The job with the model that training starts from before its payload."""
            form, body, check, enrol = with_base(
                self.experiment, job.form, job.body, job.check, job.enrol
            )
            return structs.replace(
                job, form=form, body=body, check=check, enrol=enrol, with_base=None
            )

        job = Job(client, form, body, check, start=start, state=state, keep=keep, enrol=enrol)
        if not self.experiment.base_comes:
            return self.struck(phase, job)
        if not start and index == 0:
            return self.struck(phase, behind_base(job))
        job = self.struck(phase, job)
        return structs.replace(job, with_base=lambda: behind_base(job))

    def _encoded(self, phase: Phase, down: Payload, client: int) -> tuple[Encoded, bytes]:
        """(what goes down, its digest); encoded anew only where it is not what went down last."""
        last, index = phase.last, phase.index
        if self.experiment.down.shared:
            last = None
        if last is None or any(getattr(last[0], f) is not getattr(down, f) for f in down.fields):
            encoded = self.experiment.down.encode(
                down,
                lambda name: seeds.rng(
                    self.config.seed, f"compress/down/{index}/{name}", phase.round
                ),
                phase.residuals,
                self.experiment.agreed,
                phase.cache,
                slot=f"{index}/",
                past=phase.past(client, "down", phase.round),
            )
            last = phase.last = (down, encoded, encoded.body.check())
        return last[1], last[2]

    def struck(self, phase: Phase, job: Job) -> Job:
        """The job as it is handed out, with what strikes it then."""
        client, round, index = job.client, phase.round, phase.index
        weights = weights_of(phase.seen[client])
        if weights is not None:
            self.sent[client] = weights
        job = structs.replace(
            job,
            cost=self.cost(client, index),
            judge=self._judges(round, index),
            bound=self.method.in_memory and index > 0,
            pace=self._pace(phase, client),
        )
        known = phase.spooled.get((client, "train"))
        # It answers what another server asked.
        if known is not None and known.task != (job.check, job.start):
            self.io.settle([Settled(known.bill, False, "the answer to another task")])
            phase.spooled = {k: s for k, s in phase.spooled.items() if k[0] != client}
        if self.clock is not None:
            phase.down[client] = task_bytes(self.run, Key(round, index, 0, client), job)
        leaves = self._leaves(phase, client)
        if not self.wanted(phase, client):
            return job
        faults = self.faults.of(round, index, client)
        if not faults and leaves is None:
            return job
        return structs.replace(job, faults=faults, lost=drops(faults), leaves=leaves)

    def _pace(self, phase: Phase, client: int) -> list[Fault]:
        """How long the client's device takes at least: on the real clock it waits for the rest."""
        if self.world.pace is None:
            return []
        phase.training[client] = self.world.pace[client].seconds(self.cost(client, phase.index))
        return [Fault("pace", phase.training[client])] if self.clock is None else []

    def _leaves(self, phase: Phase, client: int) -> Leaves | None:
        """When the client is gone in the middle of its task; who is gone already is not asked."""
        until = self.world.until(client, phase.at)
        stays = phase.leaves[client] = 0.0 if until is None else until - phase.at
        if self.faults.replay is not None or math.isinf(stays):
            return None
        if not stays and (client, "train") not in phase.spooled:
            phase.out.setdefault(client, LEFT)
        if self.clock is None:
            return Leaves(at=phase.opened + stays)
        slow, delay = self.faults.time(phase.round, phase.index, client)
        steps, down = self.cost(client, phase.index), phase.down[client]
        return self.clock.leaving(client, steps, down, phase.at, slow, delay)

    def wanted(self, phase: Phase, client: int) -> bool:
        """Whether its task is to be handed out: no earlier server has its answer, and one is to
        come.
        """
        return (client, "train") not in phase.spooled and client not in phase.out

    def _judges(self, round: int, index: int) -> bool:
        """Whether the clients of an exchange judge what they trained."""
        due = evaluation_due(self.config, round) and self.config.evaluate.clients == "auto"
        return due and index == self.method.main_exchange

    def cost(self, client: int, index: int) -> int:
        """SGD steps of the client's task: the longest are handed out first."""
        train, method = self.config.train, self.method
        if method.in_memory and index != method.main_exchange:
            return 0
        if train.steps is not None:
            return train.steps
        federation = self.experiment.federation
        n = len(federation.parts[client]) if federation is not None else self.samples(client)
        return train.epochs * batch_count(n or 0, train.batch_size, train.last_batch)

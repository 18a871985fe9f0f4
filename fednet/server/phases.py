"""A phase of a round: one exchange with its cohort, or an evaluation.

    encode each client's task -> hand them to the protocol -> their replies, in ascending client id

What the replies are folded into is the caller's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fednet import seeds
from fednet.algorithms.base import Nothing, Payload, Tensors
from fednet.errors import CannotGoOn
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, crossing, task_bytes
from fednet.experiment.faults import Faults, drops
from fednet.experiment.judging import GlobalModel, Judgement, asked, judgements
from fednet.experiment.rundir import RunDirectory
from fednet.protocol.rules import Job, Rules
from fednet.server import accuracies
from fednet.server.accounts import Accounts
from fednet.server.io_thread import ServerIO
from fednet.server.spool import Spool, Spooled
from fednet.training.evaluation import Counts
from fednet.training.hosts import ServerHost
from fednet.training.loop import batches
from fednet.wire import messages as m
from fednet.wire.codec import Body
from fednet.wire.messages import Key, Purpose
from fednet.wire.payload import weights_of

POLL_S = 0.2  # how often a request to stop is looked for


@dataclass
class Phase:
    """A phase that is open, or over."""

    round: int
    index: int
    purpose: Purpose
    cohort: tuple[int, ...]
    start: dict[int, str]
    seen: dict[int, Any]  # what each client was sent, as it sees it
    residuals: dict[str, torch.Tensor]
    opened: float
    out: dict[int, str] = field(default_factory=dict)  # who is not asked, and why
    spooled: dict[tuple[int, str], Spooled] = field(default_factory=dict)
    done: dict[int, Spooled] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    virtual: dict[int, float] = field(default_factory=dict)
    # On the virtual clock: all bytes of each client's task.
    down: dict[int, int] = field(default_factory=dict)
    encoding: float = 0.0
    virtual_split: dict[int, dict[str, float]] = field(default_factory=dict)
    enrolled: set[int] = field(default_factory=set)  # who gets what is given once

    @property
    def name(self) -> tuple[int, int, Purpose]:
        return self.round, self.index, self.purpose


class Phases:
    """Opens phases, one after the other, and waits for their replies.

    check_stop(): called every now and then meanwhile; raises where the run is to stop.
    clock: None where time is real.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory,
        io: ServerIO,
        spool: Spool,
        accounts: Accounts,
        *,
        run: str,
        host: ServerHost,
        faults: Faults,
        clock: VirtualClock | None,
        check_stop: Callable[[], None],
    ) -> None:
        self.experiment, self.config, self.method = (
            experiment,
            experiment.config,
            experiment.algorithm,
        )
        self.directory, self.io, self.spool, self.accounts = directory, io, spool, accounts
        self.run, self.host, self.faults, self.clock, self.check_stop = (
            run,
            host,
            faults,
            clock,
            check_stop,
        )
        self.sent: dict[
            int, Tensors
        ] = {}  # the weights each client was sent in the exchange that is open

    # -- opening -----------------------------------------------------------------------------------
    def open(
        self,
        round: int,
        index: int,
        cohort: Sequence[int],
        server: Any,
        versions: Mapping[int, str],
        states: Mapping[int, str],
        keep: Mapping[int, str],
        residuals: dict[str, torch.Tensor],
    ) -> Phase:
        """Encodes each client's task of an exchange and hands them to the protocol. versions,
        states: of its state, where each client starts, and that one's hash; keep: which it must not
        delete yet. residuals: what earlier broadcasts left out; changed here.
        """
        method, host, config = self.method, self.host, self.config
        host.begin(round, index, cohort)
        phase = Phase(
            round,
            index,
            "train",
            tuple(cohort),
            {c: versions.get(c, "") for c in cohort},
            {},
            residuals,
            time.monotonic(),
        )
        phase.spooled, phase.out = (
            self.spool.found(round, index),
            self.faults.out(round, index, cohort),
        )
        judge = (
            accuracies.due(config, round)
            and config.evaluate.clients == "auto"
            and index == len(method.exchanges) - 1
        )
        jobs: list[Job] = []
        cache: dict[str, Any] = {}
        last: Any = None
        for client in cohort:
            down = method.broadcast(server, index, client)
            same = last is not None and all(
                getattr(last[0], f) is getattr(down, f) for f in down.fields
            )
            if last is None or not same:
                encoded = self.experiment.down.encode(
                    down,
                    lambda name: seeds.rng(config.seed, f"compress/down/{index}/{name}", round),
                    residuals,
                    self.experiment.agreed,
                    cache,
                    slot=f"{index}/",
                )
                last = (down, encoded, encoded.body.check())
            _, encoded, check = last
            phase.seen[client] = encoded.seen
            form, body, enrol = encoded.form, encoded.body, 0
            enrolment = (
                method.enroll(server, client, host)
                if not phase.start[client] and index == 0
                else None
            )
            if enrolment is not None:
                phase.enrolled.add(client)
                given = self.experiment.down.encode(enrolment)
                form, body, enrol = (
                    (*given.form, *form),
                    Body([*given.body.segments, *body.segments]),
                    len(given.form),
                )
                check = body.check()
            known = phase.spooled.get((client, "train"))
            # It answers what another server asked.
            if known is not None and known.task != (check, phase.start[client]):
                self.accounts.replay(known.key, "the answer to another task")
                phase.spooled = {k: s for k, s in phase.spooled.items() if k[0] != client}
            if self.clock is not None:
                phase.down[client] = task_bytes(
                    self.run,
                    Key(round, index, 0, client),
                    form,
                    body.size,
                    check,
                    phase.start[client],
                    states.get(client, ""),
                    keep.get(client, ""),
                    enrol,
                    judge,
                )
            if (client, "train") not in phase.spooled and client not in phase.out:
                faults = self.faults.of(round, index, client)
                jobs.append(
                    Job(
                        client,
                        form,
                        body,
                        check,
                        cost=self._cost(client),
                        start=phase.start[client],
                        state=states.get(client, ""),
                        keep=keep.get(client, ""),
                        enrol=enrol,
                        judge=judge,
                        faults=faults,
                        lost=drops(faults),
                    )
                )
        sent = {c: weights_of(down) for c, down in phase.seen.items()}
        self.sent = {c: x for c, x in sent.items() if x is not None}
        phase.encoding = time.monotonic() - phase.opened
        rules, here = self._rules(), sum(1 for _, purpose in phase.spooled if purpose == "train")
        # What an earlier server received counts among the first.
        if rules.first is not None and here:
            rules = dataclasses.replace(rules, first=max(1, rules.first - here))
            if here >= (config.round.first or 0):
                phase.out |= {j.client: f"not among the first {config.round.first}" for j in jobs}
                jobs = []
        self._begin(phase, jobs, rules)
        return phase

    def _rules(self) -> Rules:
        section = self.config.round
        # Then who counts is not for the clock here to say.
        virtual = self.clock is not None or self.faults.replay is not None
        # A client that trains in this very thread sends no heartbeat.
        silent = None if self.io.inline else section.lost.silent
        return Rules(
            deadline=None if virtual else section.deadline,
            closed=section.lost.closed,
            silent=silent,
            join=section.join,
            first=None if virtual else section.first,
            defer=self.clock is not None,
            stalled=section.lost.stalled,
        )

    def _begin(self, phase: Phase, jobs: list[Job], rules: Rules) -> None:
        def command(now: float) -> list[Any]:
            self.io.replies.clear()
            return self.io.protocol.begin(*phase.name, jobs, rules, now)

        self.io.call(command)

    def _cost(self, client: int) -> int:
        """SGD steps of the client's task: the longest are handed out first."""
        train = self.config.train
        if train.steps is not None:
            return train.steps
        n = (
            len(self.experiment.federation.parts[client])
            if self.experiment.federation is not None
            else getattr(self.io.protocol.sites.get(client), "train", 0)
        )
        return train.epochs * len(batches(n, train.batch_size, train.last_batch))

    # -- collecting --------------------------------------------------------------------------------
    def replies(self, phase: Phase) -> Iterator[tuple[int, Spooled]]:
        """Waits for all of a phase. Yields each client whose reply counts, in ascending id, as soon
        as its turn has come; on the virtual clock once all are there. Raises CannotGoOn where a
        client could not do its task and the configuration says to stop.
        """
        outcomes: dict[int, str] = {
            c: "" for c, purpose in phase.spooled if purpose == phase.purpose and c in phase.cohort
        } | phase.out
        for client, reason in phase.out.items():
            self.directory.event("dropped", phase.round, client, reason=reason)
        clock = self.clock if phase.purpose == "train" else None
        todo = list(phase.cohort)
        while todo:
            while todo and todo[0] in outcomes and clock is None:
                yield from self._turn(phase, todo.pop(0), outcomes)
            if not todo or (clock is not None and all(c in outcomes for c in todo)):
                break
            resolved = self.io.wait(POLL_S, phase.name)
            if resolved is not None and resolved.client in phase.start:
                outcomes[resolved.client] = resolved.reason
                if resolved.reason:
                    self.directory.event(
                        "dropped", phase.round, resolved.client, reason=resolved.reason
                    )
            self.check_stop()
        if clock is not None:
            self._decide(phase, outcomes, clock)
            for client in todo:
                yield from self._turn(phase, client, outcomes)

    def _turn(
        self, phase: Phase, client: int, outcomes: Mapping[int, str]
    ) -> list[tuple[int, Spooled]]:
        """The client and its reply; nothing where that does not count."""
        reason = outcomes[client]
        reply = self._reply(phase, client, phase.purpose)
        if reply is not None:
            here = reply is not phase.spooled.get((client, phase.purpose))
            self.accounts.replay(reply.key, "sent again" if here else reason)
        if reason or reply is None:
            phase.dropped[client] = reason or "lost"
            if reason.startswith("failed"):
                self._may_stop(phase, client, reason.removeprefix("failed: "))
            return []
        phase.done[client] = reply
        return [(client, reply)]

    def leave_out(self, phase: Phase, client: int, reason: str) -> None:
        """A reply that was accepted turned out to be of no use: the client counts as one that did
        not complete the phase, and a resume asks it again.
        """
        reply = phase.done.pop(client)
        phase.spooled.pop((client, phase.purpose), None)
        phase.dropped[client] = f"refused: {reason}"
        self.directory.event("dropped", phase.round, client, reason=phase.dropped[client])

        def command(now: float) -> list[Any]:
            self.io.replies.pop((client, phase.purpose), None)
            self.spool.disown(reply)
            return []

        self.io.call(command, wait=True)
        self._may_stop(phase, client, reason)

    def _may_stop(self, phase: Phase, client: int, reason: str) -> None:
        if self.config.round.on_error == "stop":
            raise CannotGoOn(
                f"client {client} could not do its task in round {phase.round}: {reason}"
            )

    def _reply(self, phase: Phase, client: int, purpose: str) -> Spooled | None:
        came = self.io.replies.get((client, purpose))
        # The I/O thread clears them when it gets to it.
        if came is not None and (came.key.round, came.key.phase) == (phase.round, phase.index):
            return came
        return phase.spooled.get((client, purpose))

    def _decide(self, phase: Phase, outcomes: dict[int, str], clock: VirtualClock) -> None:
        """On the virtual clock: who was in time."""
        for client, reason in outcomes.items():
            reply = self._reply(phase, client, phase.purpose)
            if not reason and reply is not None:
                phase.virtual_split[client] = clock.seconds(
                    client,
                    phase.round,
                    self._cost(client),
                    phase.down[client],
                    _reply_bytes(reply),
                    *self.faults.time(phase.round, phase.index, client),
                )
                phase.virtual[client] = sum(phase.virtual_split[client].values())
        late = {} if self.faults.replay is not None else clock.late(phase.virtual)
        for client, reason in late.items():
            outcomes[client] = reason
            self.directory.event("dropped", phase.round, client, reason=reason)
        useful = {
            c: c not in late for c in phase.virtual if (c, phase.purpose) not in phase.spooled
        }
        self.io.call(lambda now: self.io.protocol.decide(useful), wait=True)

    # -- judging -----------------------------------------------------------------------------------
    def judged(self, phase: Phase) -> dict[int, dict[str, Counts]]:
        """What the clients that completed the phase found their models to be worth, of those that
        were asked to. In an exchange the model that came down is the one before the round: what
        they made of it is named `received`, where that of an evaluation is `global`.
        """
        found = {}
        for client in phase.done:
            verdict = self._reply(phase, client, "evaluate")
            if verdict is not None:
                judgement: Any = self.experiment.up.decode(Judgement, verdict.form, verdict.body())
                said = judgements(judgement, self.experiment.setting.classes)
                if phase.purpose == "train" and "global" in said:
                    said = {"received": said.pop("global"), **said}
                found[client] = said
        return found

    def evaluation(
        self,
        round: int,
        model: Tensors | None,
        versions: Mapping[int, str],
        states: Mapping[int, str],
        keep: Mapping[int, str],
        final: bool,
    ) -> dict[int, dict[str, Counts]]:
        """Asks the clients (`judging.asked`) to judge their models, and `model`, and waits for
        them.
        """
        exp = self.experiment
        down: Payload = (
            GlobalModel(x=model)
            if model is not None and exp.evaluation() is GlobalModel
            else Nothing()
        )
        encoded = exp.exact.encode(down)
        check = encoded.body.check()
        clients = tuple(asked(self.config))
        phase = Phase(
            round,
            len(self.method.exchanges),
            "evaluate",
            clients,
            {c: versions.get(c, "") for c in clients},
            {},
            {},
            time.monotonic(),
        )
        jobs = [
            Job(
                c,
                encoded.form,
                encoded.body,
                check,
                cost=self._cost(c),
                start=phase.start[c],
                state=states.get(c, ""),
                keep=keep.get(c, ""),
                judge=final,
            )
            for c in clients
        ]
        self._begin(
            phase, jobs, dataclasses.replace(self._rules(), deadline=None, first=None, defer=False)
        )
        for _ in self.replies(phase):
            pass
        if phase.dropped:
            self.directory.event("not_evaluated", round, clients=sorted(phase.dropped))
        return self.judged(phase)


def _reply_bytes(reply: Spooled) -> int:
    form = list(reply.form)
    return crossing(
        m.Reply(
            run=" " * 16,
            inc=1,
            key=reply.key,
            form=form,
            size=sum(f.size for f in form),
            check=reply.check,
            state=reply.state,
            kept=reply.kept,
            seconds=reply.seconds,
            split=list(reply.split),
            reported=reply.reported,
        )
    )

"""A phase of a round: one exchange with its cohort, or an evaluation.

    encode each client's task -> hand them to the protocol -> their replies, in ascending client id

What the replies are folded into is the caller's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch

from fednet.algorithms.base import Payload
from fednet.algorithms.state import State
from fednet.errors import CannotGoOn, StateError
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock, reply_bytes
from fednet.experiment.faults import Faults
from fednet.experiment.judging import Judgement, asked, judgements
from fednet.experiment.rundir import RunDirectory
from fednet.ids import as_text
from fednet.protocol.tasks import LEFT, STATE_LOST, Job, Rules
from fednet.server.asking import Asking, Phase, with_base
from fednet.server.endpoint import patience
from fednet.server.inbox import Reply
from fednet.server.io import LEFT_OUT, Outcome, ServerIO, Settled
from fednet.training.evaluation import Counts

log = logging.getLogger(__name__)

POLL_S = 0.2  # how often a request to stop is looked for


class Phases:
    """Opens phases, one after the other, and waits for their replies.

    check_stop(): called every now and then meanwhile; raises where the run is to stop.
    clock: None where time is real. alone: others start the clients.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory,
        io: ServerIO,
        asking: Asking,
        *,
        faults: Faults,
        clock: VirtualClock | None,
        check_stop: Callable[[], None],
        alone: bool,
    ) -> None:
        self.experiment, self.config = experiment, experiment.config
        self.method = experiment.algorithm
        self.directory, self.io, self.asking = directory, io, asking
        self.faults, self.clock, self.check_stop = faults, clock, check_stop
        self.alone = alone
        # Who broke a protocol of secure aggregation: by client, in which round, and how.
        self.blamed: dict[int, tuple[int, str]] = {}

    # -- opening -----------------------------------------------------------------------------------
    def open(
        self,
        round: int,
        index: int,
        cohort: Sequence[int],
        server: State,
        versions: Mapping[int, str],
        states: Mapping[int, str],
        keep: Mapping[int, str],
        residuals: dict[str, torch.Tensor],
        at: float = 0.0,
    ) -> Phase:
        """Encodes each client's task of an exchange and hands them to the protocol. versions,
        states: of its state, where each client starts, and that one's hash; keep: which it must not
        delete yet. residuals: what earlier broadcasts left out; changed here. at: the second of the
        run. Nine arguments: where it is, whom it asks, and what they start from.
        """
        phase = self.asking.prepared(round, index, cohort, versions, residuals, at)
        phase.out = self.faults.out(round, index, cohort) | self._blamed_before(round, cohort)
        made = [
            self.asking.ask(phase, c, server, states.get(c, ""), keep.get(c, "")) for c in cohort
        ]
        if index == 0:  # a later exchange needs what the client kept of this round
            phase.initial_task = lambda phase, c: self.asking.ask(phase, c, server, "", "")
        jobs = [job for job in made if self.asking.wanted(phase, job.client)]
        phase.encoding = time.monotonic() - phase.opened
        rules, here = self.rules(), sum(1 for _, purpose in phase.spooled if purpose == "train")
        # What an earlier server received counts among the first.
        if rules.first is not None and here:
            rules = dataclasses.replace(rules, first=max(1, rules.first - here))
            first = self.config.first or 0
            if here >= first:
                phase.out |= {j.client: f"not among the first {first}" for j in jobs}
                jobs = []
        self._begin(phase, jobs, rules)
        return phase

    def _blamed_before(self, round: int, cohort: Sequence[int]) -> dict[int, str]:
        """Of a cohort, who is not asked because of what it did in an earlier round, and why."""
        if not self.config.privacy.secagg.blame:
            return {}
        known = {c: self.blamed[c] for c in cohort if c in self.blamed}
        return {c: f"blamed in round {at}: {why}" for c, (at, why) in known.items() if at < round}

    def rules(self) -> Rules:
        section = self.config.round
        # Then who counts is not for the clock here to say.
        virtual = self.clock is not None or self.faults.replay is not None
        # A client that trains in this very thread sends no heartbeat.
        silent = None if self.io.inline else section.lost.silent
        return dataclasses.replace(
            patience(self.config),
            deadline=None if virtual else section.deadline,
            silent=silent,
            first=None if virtual else self.config.first,
        )

    def _begin(self, phase: Phase, jobs: list[Job], rules: Rules) -> None:
        self.io.begin(phase.name, jobs, rules)

    # -- collecting --------------------------------------------------------------------------------
    def replies(self, phase: Phase) -> Iterator[tuple[int, Reply]]:
        """Waits for all of a phase. Yields each client whose reply counts, in ascending id, as soon
        as its turn has come; on the virtual clock once all are there. Raises CannotGoOn where a
        client could not do its task and the configuration says to stop.
        """
        outcomes = phase.outcomes
        for (client, purpose), reply in phase.spooled.items():
            if purpose == phase.purpose and client in phase.cohort:
                outcomes[client] = Outcome(phase.name, client, "", reply)
        for client, reason in phase.out.items():
            known = phase.spooled.get((client, phase.purpose))
            outcomes[client] = Outcome(phase.name, client, reason, known)
            self.directory.event("dropped", phase.round, client, reason=reason)
        clock = self.clock if phase.purpose == "train" else None
        todo = list(phase.cohort)
        while todo:
            while todo and todo[0] in outcomes and clock is None:
                yield from self._turn(phase, outcomes[todo.pop(0)])
            if not todo or (clock is not None and all(c in outcomes for c in todo)):
                break
            outcome = self.io.wait(POLL_S)
            if outcome is not None and outcome.phase != phase.name:
                self.io.unused(outcome)
            elif outcome is not None:
                client, reason = outcome.client, outcome.reason
                if client in phase.start and not self._restarts(phase, client, reason):
                    outcomes[client] = outcome
                    if reason:
                        self.directory.event("dropped", phase.round, client, reason=reason)
            self.check_stop()
        lost = {c: o.reason for c, o in outcomes.items() if o.reason.startswith(STATE_LOST)}
        self.check_states(phase.round, lost, sum(map(bool, phase.start.values())))
        if clock is not None:
            self._decide(phase, outcomes, clock)
            for client in todo:
                yield from self._turn(phase, outcomes[client])

    def _restarts(self, phase: Phase, client: int, reason: str) -> bool:
        """Whether a client whose state is lost got its task again, from its initial state: what
        the server remembers of earlier messages with it is of no use then.
        """
        if not self.restarts(reason) or phase.initial_task is None:
            return False
        if not phase.start.get(client):
            return False
        self.forget(client, phase.residuals)
        phase.ahead.pop(client, None)
        phase.start[client] = ""
        phase.restarted.append(client)
        self.say_restarted(phase.round, client, reason)
        job = phase.initial_task(phase, client)
        self.io.add(phase.round, [job])
        return True

    def restarts(self, reason: str) -> bool:
        """Whether a client that was dropped for that reason begins again."""
        return reason.startswith(STATE_LOST) and self.config.round.state_lost == "restart"

    def forget(self, client: int, residuals: dict[str, torch.Tensor]) -> None:
        """Removes what compressors remember of messages with a client."""
        with self.io.own():  # replies are decoded with them
            for name in [n for n in residuals if n.startswith(f"client {client}/")]:
                del residuals[name]

    def say_restarted(self, round: int, client: int, reason: str) -> None:
        reason = reason.removeprefix(STATE_LOST)
        self.directory.event("restarted", round, client, reason=reason)
        log.warning("round %d: client %d begins again: %s", round, client, reason)

    def check_states(self, round: int, lost: Mapping[int, str], started: int) -> None:
        """Raises StateError where the run ends because clients have lost their states. started:
        how many were to start from one. What clients say that others start is not taken for true
        where few of them say it: one that lies would end the run.
        """
        if not lost:
            return
        if self.alone and (2 * len(lost) <= started or len(lost) == 1 < self.config.clients):
            return
        first = lost[min(lost)].removeprefix(STATE_LOST).rstrip(".")
        raise StateError(
            f"round {round}: {len(lost)} of the {started} clients that were to go on from a state "
            f"of theirs no longer have it: clients {as_text(lost)}. {first}. Was the server "
            f"restored from an older copy? Then restore the clients' states of the same time, or "
            f"let these clients begin again with --set round.state_lost=restart (the results "
            f"differ)."
        )

    def _turn(self, phase: Phase, outcome: Outcome) -> list[tuple[int, Reply]]:
        """The client and its reply; nothing where that does not count."""
        client, reason, reply = outcome.client, outcome.reason, outcome.reply
        if reply is not None:
            phase.came[client] = reply
        if reason or reply is None:
            phase.dropped[client] = reason or "lost"
            if reason.startswith("failed"):
                self.may_stop(phase.round, client, reason.removeprefix("failed: "))
            return []
        phase.done[client] = reply
        return [(client, reply)]

    def leave_out(self, phase: Phase, client: int, reason: str) -> None:
        """A reply that was accepted turned out to be of no use: the client counts as one that did
        not complete the phase, and a resume asks it again.
        """
        reply = phase.done.pop(client)
        phase.dropped[client] = f"refused: {reason}"
        self.directory.event("dropped", phase.round, client, reason=phase.dropped[client])
        with self.io.own():
            self.io.inbox.revoke(reply)
        self.may_stop(phase.round, client, reason)

    def may_stop(self, round: int, client: int, reason: str) -> None:
        """Raises CannotGoOn where one client that cannot go on ends the run."""
        if self.config.round.on_error == "stop":
            raise CannotGoOn(f"client {client} could not do its task in round {round}: {reason}")

    def _evaluation(self, phase: Phase, client: int) -> Reply | None:
        """What the client found its models to be worth, in a phase that it completed."""
        outcome = phase.outcomes[client]
        if phase.purpose == "evaluate":
            return outcome.reply
        return outcome.evaluation or phase.spooled.get((client, "evaluate"))

    def _decide(self, phase: Phase, outcomes: dict[int, Outcome], clock: VirtualClock) -> None:
        """On the virtual clock: who was in time."""
        for client, outcome in outcomes.items():
            reason, reply = outcome.reason, outcome.reply
            if not reason and reply is not None:
                phase.virtual_split[client] = clock.seconds(
                    client,
                    phase.round,
                    self.asking.cost(client, phase.index),
                    phase.down[client],
                    reply_bytes(reply),
                    *self.faults.time(phase.round, phase.index, client),
                    at=phase.at,
                )
                phase.virtual[client] = sum(phase.virtual_split[client].values())
            elif reason == LEFT:
                phase.virtual[client] = math.inf
        late = {} if self.faults.replay is not None else clock.late(phase.virtual, phase.leaves)
        for client, reason in late.items():
            if outcomes[client].reason != reason:
                outcomes[client] = dataclasses.replace(outcomes[client], reason=reason)
                self.directory.event("dropped", phase.round, client, reason=reason)

    def settle(self, phase: Phase) -> None:
        """It is known what counts: says in the books which replies, and tasks, were of use."""
        self.io.settle(
            Settled(
                reply.bill, c in phase.done, phase.dropped.get(c, "") if reply.earlier else LEFT_OUT
            )
            for c, reply in phase.came.items()
        )

    # -- judging -----------------------------------------------------------------------------------
    def judged(self, phase: Phase) -> dict[int, dict[str, Counts]]:
        """What the clients that completed the phase found their models to be worth, of those that
        were asked to. In an exchange the model that came down is the one before the round: what
        they made of it is named `received`, where that of an evaluation is `global`.
        """
        found = {}
        for client in phase.done:
            verdict = self._evaluation(phase, client)
            if verdict is not None:
                judgement = verdict.take_payload()
                if not isinstance(judgement, Judgement):
                    judgement = self.experiment.up.decode(Judgement, verdict.form, verdict.body())
                said = judgements(judgement)
                if phase.purpose == "train" and "global" in said:
                    said = {"received": said.pop("global"), **said}
                found[client] = said
        return found

    def evaluation(
        self,
        round: int,
        down: Payload,
        versions: Mapping[int, str],
        states: Mapping[int, str],
        keep: Mapping[int, str],
        final: bool,
    ) -> dict[int, dict[str, Counts]]:
        """Asks the clients (`judging.asked`) to evaluate their models, and the one in `down`, and
        waits for them.
        """
        exp = self.experiment
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
        plain = encoded.form, encoded.body, check, 0
        whole = with_base(exp, encoded.form, encoded.body, check)

        def job(c: int, start: str, based: bool) -> Job:
            form, body, check, enrol = whole if based else plain
            return Job(
                c,
                form,
                body,
                check,
                enrol=enrol,
                cost=self.asking.cost(c, self.method.main_exchange),
                start=start,
                state=states.get(c, ""),
                keep=keep.get(c, ""),
                judge=final,
            )

        def first(c: int) -> Job:
            start = phase.start[c]
            if not exp.base_comes:
                return job(c, start, False)
            if not start:
                return job(c, start, True)
            made = job(c, start, False)
            return msgspec.structs.replace(made, with_base=lambda: job(c, start, True))

        def initial(phase: Phase, c: int) -> Job:
            return msgspec.structs.replace(job(c, "", exp.base_comes), state="", keep="")

        phase.initial_task = initial
        jobs = [first(c) for c in clients]
        if final:
            self.io.link.ledger.final = round, phase.index
        self._begin(phase, jobs, dataclasses.replace(self.rules(), deadline=None, first=None))
        for _ in self.replies(phase):
            pass
        self.settle(phase)
        if phase.dropped:
            self.directory.event("not_evaluated", round, clients=sorted(phase.dropped))
        return self.judged(phase)

"""What a reply goes through between its client and the sum: bounds, clipping, staleness, noise.

`of` lists what a run has of them, in the order in which they are applied. Each may

    start     change the accumulator that the method starts with
    review    say, from the summaries of all replies of the round, who is left out or counts less
    change    change one reply on its way into the accumulator
    finish    change the accumulator before the next server state is made of it

A review sees every reply that could be read, also of clients that are left out by now: one that
fails cannot take away a bound that the others are held to. (An update's norm that the configuration
gives as a number is checked as the reply arrives, in inbox.py.)
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fednet.algorithms.base import Run, Tensors
from fednet.algorithms.staleness import rebased
from fednet.algorithms.state import State
from fednet.config import Config, PrivacySection
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.robust import stack
from fednet.wire.payload import Payload, run_of

if TYPE_CHECKING:
    from fednet.server.exchange import Exchange


OUTLIER = 1e3


@dataclasses.dataclass(frozen=True)
class Summary:
    """What reviews see of a reply. norms: by field, of its tensors as they were sent: of `Weights`
    the model's norm, not the update's (which `privacy.updates` gives). run: None where it has none.
    """

    norms: Mapping[str, float]
    run: Run | None

    @classmethod
    def of(cls, up: Payload) -> Summary:
        norms: dict[str, float] = {}
        for name in up.fields:
            value = getattr(up, name)
            if isinstance(value, Tensors):
                norms[name] = norm(value)
        return cls(norms, run_of(up))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """left_out: why, by client. counts: the samples that a client counts for, where that is fewer
    than it sent.
    """

    left_out: Mapping[int, str] = dataclasses.field(default_factory=dict)
    counts: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Postprocessor:
    """One step; each method does nothing unless a step defines it."""

    def start(self, accumulator: State) -> State:
        return accumulator

    def review(self, replied: Mapping[int, Summary], counted: Collection[int]) -> Verdict:
        """replied: of every client whose reply could be read; counted: those not left out."""
        return Verdict()

    def change(self, up: Payload, client: int) -> Payload:
        return up

    def finish(self, accumulator: State, clients: Sequence[int], round: int) -> State:
        """clients: whose replies were added, in that order."""
        return accumulator


def of(
    experiment: Experiment,
    noise: privacy.Noise | None,
    server: State,
    exchange: Exchange,
    sent: Mapping[int, Tensors],
) -> list[Postprocessor]:
    """What the replies of an exchange go through. noise: what the server adds; None: nothing.
    server: the state that the exchange began with. sent: the weights that each client was sent.
    """
    config, method = experiment.config, experiment.algorithm
    shared = method.shared_model(server)
    steps: list[Postprocessor] = []
    if config.security.max_norm == "auto":
        steps.append(NormBound(shared))
    # Under secure aggregation the count is in the masked vector: privacy.secagg.max_samples. With
    # clipping, or a rule that bears malicious clients, all replies count the same.
    by_samples = method.weight(Run(1, 1, 0.0)) != method.weight(Run(2, 1, 0.0))
    if by_samples and not method.in_memory and not stack.equal_weights(config):
        steps.append(ShareBound(experiment))
    if config.privacy.clip is not None:
        steps.append(Clipping(config.privacy, sent))
    if not method.weighs_staleness:
        staleness = {c: a.staleness or 0 for c, a in exchange.asked.items()}
        steps.append(Rebasing(staleness, sent, shared))
    if stack.needs_stack(config):
        fields = method.exchanges[exchange.index].up.fields
        kinds = {name: f.kind for name, f in fields.items() if f.form == "tensors"}
        steps.append(Stacking(config, shared, kinds))
    if noise is not None:
        steps.append(Noising(config.privacy, noise))
    return steps


class NormBound(Postprocessor):
    """`security.max_norm: auto`: leaves out a reply whose field is longer than `OUTLIER` times the
    largest of 1, the norm of the shared model, and the median of the replies' norms.

    With fewer than three replies no median can be trusted. The bound is that wide because honest
    updates differ by their numbers of steps; what an honest run sends never comes near it.
    """

    def __init__(self, shared: Tensors | None) -> None:
        self._least = 1.0
        if shared is not None:
            self._least = max(1.0, norm(shared))

    def review(self, replied: Mapping[int, Summary], counted: Collection[int]) -> Verdict:
        if len(replied) < ENOUGH:
            return Verdict()
        left_out: dict[int, str] = {}
        for name in next(iter(replied.values())).norms:
            median = statistics.median_low([one.norms[name] for one in replied.values()])
            most = OUTLIER * max(self._least, median)
            for client in counted:
                found = replied[client].norms[name]
                if found > most and client not in left_out:
                    left_out[client] = (
                        f"{name} has norm {found:.4g}; among this round's replies "
                        f"security.max_norm: auto allows {most:.4g}"
                    )
        return Verdict(left_out=left_out)


class ShareBound(Postprocessor):
    """`round.max_share`: lowers the sample counts of clients that would weigh more than that share
    of all that are counted.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    def review(self, replied: Mapping[int, Summary], counted: Collection[int]) -> Verdict:
        share = share_of_one(self._experiment, len(replied))
        if share is None:
            return Verdict()
        sent: dict[int, int] = {}
        for client in counted:
            run = replied[client].run
            if run is not None:
                sent[client] = run.n
        return Verdict(counts=lowered(sent, share))


class Clipping(Postprocessor):
    """`privacy.clip`: clips every update; each has the weight 1."""

    def __init__(self, section: PrivacySection, sent: Mapping[int, Tensors]) -> None:
        self._section, self._sent = section, sent

    def change(self, up: Payload, client: int) -> Payload:
        return privacy.received(up, self._sent.get(client), self._section)


class Rebasing(Postprocessor):
    """A stale reply becomes one of the model as it is now, of a smaller weight: for methods that
    do not weigh staleness themselves.
    """

    def __init__(
        self, staleness: Mapping[int, int], sent: Mapping[int, Tensors], now: Tensors | None
    ) -> None:
        self._staleness, self._sent, self._now = staleness, sent, now

    def change(self, up: Payload, client: int) -> Payload:
        return rebased(up, self._sent.get(client), self._now, self._staleness.get(client, 0))


class Stacking(Postprocessor):
    """`aggregation.rule`, or attackers that know each other's replies: the accumulator's sums are
    stacks of all replies until the rule makes a sum of them.
    """

    def __init__(self, config: Config, shared: Tensors | None, kinds: dict[str, str]) -> None:
        self._config, self._shared, self._kinds = config, shared, kinds

    def start(self, accumulator: State) -> State:
        return stack.with_stacks(accumulator, self._shared, self._kinds)

    def finish(self, accumulator: State, clients: Sequence[int], round: int) -> State:
        return stack.with_sums(accumulator, self._config, clients)


class Noising(Postprocessor):
    """`privacy.noise` with `where: server`: noise on the sum of clipped updates."""

    def __init__(self, section: PrivacySection, noise: privacy.Noise) -> None:
        self._section, self._noise = section, noise

    def finish(self, accumulator: State, clients: Sequence[int], round: int) -> State:
        return privacy.noised(accumulator, self._section, self._noise, round)


def norm(value: Tensors) -> float:
    """The Euclidean norm of its parameters."""
    return math.sqrt(value.square)


ENOUGH = 3  # replies: of fewer none can have less than half


def share_of_one(experiment: Experiment, replies: int) -> float | None:
    """The largest part that one client may have in a mean by samples (`round.max_share`); None:
    there is no bound.
    """
    share = experiment.config.round.max_share
    if share == "auto":
        return 0.5 if experiment.federation is None and replies >= ENOUGH else None
    return share


def lowered(counts: Mapping[int, int], share: float) -> dict[int, int]:
    """The counts that have to be lowered so that none is more than `share` of their sum, or of an
    equal part where so few cannot have less.
    """
    share = max(share, 1 / max(1, len(counts)))
    ordered = sorted(counts.items(), key=lambda item: item[1])
    high: list[int] = []
    rest = sum(counts.values())
    most = share * rest
    while ordered and ordered[-1][1] > most:
        client, n = ordered.pop()
        high.append(client)
        rest -= n
        left = 1 - share * len(high)
        if left > 1e-9:
            most = share * rest / left
        elif ordered:
            most = float(ordered[-1][1])
        else:
            most = float(n)
    cap = max(1, math.floor(most))
    return {c: cap for c in high if counts[c] > cap}

"""What is done to the replies of one exchange on their way into a sum, so that no single one
decides the result, and the result tells little of a single one.

Each guard is a small class of its own. `guards_of` lists those that the configuration names, in the
order in which they change a reply and finish a sum. What is wrong with a single reply by itself was
refused when it came.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fednet.algorithms.base import LocalRun, Tensors
from fednet.algorithms.staleness import rebase
from fednet.algorithms.state import State
from fednet.config import Config
from fednet.config.schema import PrivacySection
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.robust import stack
from fednet.wire.payload import Payload, run_of, tensors_of

if TYPE_CHECKING:
    from fednet.server.decoding import SentModels
    from fednet.server.open_round import OpenExchange
    from fednet.server.setup import Setup

OUTLIER = 1e3
ENOUGH = 3  # replies: of fewer none can have less than half


class Review(NamedTuple):
    """left_out: by client, why. again: the others now count for more or less than before, so that
    they are accumulated again.
    """

    left_out: Mapping[int, str] = {}
    again: bool = False


class Guard:
    """A guard of one exchange. Each has those of these methods that it needs."""

    def admit(self, client: int, up: Payload) -> None:
        """Sees each reply that could be read, in ascending order of the clients, also one that is
        left out later: a reply that fails cannot take away a bound that the others are held to.
        """

    def review(self, clients: Sequence[int]) -> Review:
        """Looks at all replies that are left together, before a result is made of them."""
        return Review()

    def samples(self, client: int, n: int) -> int:
        """For how many of its n samples a client counts."""
        return n

    def change(self, client: int, up: Payload) -> Payload:
        """The reply as it is accumulated."""
        return up

    def start(self, accumulator: State) -> State:
        """The accumulator before the first reply."""
        return accumulator

    def finish(self, accumulator: State, clients: Sequence[int]) -> State:
        """The accumulator after the last one. clients: whose replies it has."""
        return accumulator

    def remarks(self) -> Iterable[str]:
        """What the record says of a result."""
        return ()


def guards_with(guards: Sequence[Guard], method: str) -> list[Guard]:
    """Those of the guards that have that method of their own: it is asked of each reply."""
    return [g for g in guards if getattr(type(g), method) is not getattr(Guard, method)]


def guards_of(
    setup: Setup, sent: SentModels, exchange: OpenExchange, shared: Tensors | None
) -> list[Guard]:
    """The guards of an exchange. sent: to its clients; shared: the model before it."""
    config = setup.config
    method = setup.method
    exchanges = setup.method.exchanges
    found: list[Guard] = []
    if config.security.max_norm == "auto":
        found.append(MaxNorm(shared))
    # Under secure aggregation the count is in the masked vector: privacy.secagg.max_samples.
    # With clipping, or a rule that bears malicious clients, all replies count the same.
    by_samples = method.weight(LocalRun(1, 1, 0.0)) != method.weight(LocalRun(2, 1, 0.0))
    known = exchanges[exchange.index].summation.known
    if by_samples and known and not stack.equal_weights(config):
        found.append(MaxShare(setup.experiment))
    if config.privacy.clip is not None:
        found.append(Clipping(config.privacy, sent))
    if not method.own_schedule and config.schedule.mode != "sync":
        found.append(Rebasing(exchange, sent, shared))
    if stack.needs_stack(config):
        fields = exchanges[exchange.index].up.fields
        kinds = {name: field.kind for name, field in fields.items() if field.form == "tensors"}
        found.append(RobustRule(config, shared, kinds))
    if setup.noise is not None:
        found.append(NoiseGuard(config.privacy, setup.noise, exchange.round))
    return found


class MaxNorm(Guard):
    """`security.max_norm: auto`. Leaves out replies whose field is longer than `OUTLIER` times the
    largest of 1, the norm of the shared model, and the median of the replies' norms. With fewer
    than three replies no median can be trusted. The bound is that wide because honest updates
    differ by their numbers of steps; what an honest run sends never comes near it.
    """

    def __init__(self, shared: Tensors | None) -> None:
        self._shared = shared
        # By client and field, as its tensors were sent: of `Weights` the model's norm, not the
        # update's (which `privacy.updates` gives).
        self._norms: dict[int, dict[str, float]] = {}

    def admit(self, client: int, up: Payload) -> None:
        self._norms[client] = {name: value.rough_norm for name, value in tensors_of(up).items()}

    def review(self, clients: Sequence[int]) -> Review:
        left_out: dict[int, str] = {}
        if len(self._norms) < ENOUGH:
            return Review()
        least = 1.0 if self._shared is None else max(1.0, self._shared.rough_norm)
        for name in next(iter(self._norms.values())):
            median = statistics.median_low([norms[name] for norms in self._norms.values()])
            most = OUTLIER * max(least, median)
            for client in clients:
                found = self._norms[client][name]
                if found > most and client not in left_out:
                    left_out[client] = (
                        f"{name} has norm {found:.4g}; among this round's replies "
                        f"security.max_norm: auto allows {most:.4g}"
                    )
        return Review(left_out)


class MaxShare(Guard):
    """`round.max_share`: lowers the samples of clients that would weigh more."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._runs: dict[int, LocalRun | None] = {}
        self._counts: dict[int, int] = {}  # by client whose samples are lowered

    def admit(self, client: int, up: Payload) -> None:
        self._runs[client] = run_of(up)

    def review(self, clients: Sequence[int]) -> Review:
        share = share_of_one(self._experiment, len(self._runs))
        if share is None:
            return Review()
        runs = {client: self._runs[client] for client in clients}
        counts = lower_counts({c: run.n for c, run in runs.items() if run is not None}, share)
        again = counts != self._counts
        self._counts = counts
        return Review(again=again)

    def samples(self, client: int, n: int) -> int:
        return min(n, self._counts.get(client, n))

    def change(self, client: int, up: Payload) -> Payload:
        return at_most(up, self._counts[client]) if client in self._counts else up

    def remarks(self) -> Iterable[str]:
        for client, n in self._counts.items():
            yield f"client {client}'s samples count as {n}: round.max_share allows no more"


class Clipping(Guard):
    """`privacy.clip`: an update that is longer than its bound is shortened to it."""

    def __init__(self, section: PrivacySection, sent: SentModels) -> None:
        self._section = section
        self._sent = sent

    def change(self, client: int, up: Payload) -> Payload:
        return privacy.clip_received(up, self._sent.get(client), self._section)


class Rebasing(Guard):
    """Of a reply that is updates late, the model is moved to where the server's is now."""

    def __init__(self, exchange: OpenExchange, sent: SentModels, shared: Tensors | None) -> None:
        self._exchange = exchange
        self._sent = sent
        self._shared = shared

    def change(self, client: int, up: Payload) -> Payload:
        staleness = self._exchange.asked[client].staleness
        if not staleness:
            return up
        return rebase(up, self._sent.get(client), self._shared, staleness)


class RobustRule(Guard):
    """`aggregation.rule`: the sum of a rule that bears malicious clients, which it makes of all
    replies after the last one.
    """

    def __init__(self, config: Config, shared: Tensors | None, kinds: dict[str, str]) -> None:
        self._config = config
        self._shared = shared
        self._kinds = kinds

    def start(self, accumulator: State) -> State:
        return stack.with_stacks(accumulator, self._shared, self._kinds)

    def finish(self, accumulator: State, clients: Sequence[int]) -> State:
        return stack.with_sums(accumulator, self._config, clients)


class NoiseGuard(Guard):
    """`privacy.noise`: what the server adds to a sum of clipped updates."""

    def __init__(self, section: PrivacySection, noise: privacy.Noise, round: int) -> None:
        self._section = section
        self._noise = noise
        self._round = round

    def finish(self, accumulator: State, clients: Sequence[int]) -> State:
        return privacy.add_noise(accumulator, self._section, self._noise, self._round)


# -- counts ----------------------------------------------------------------------------------------
def share_of_one(experiment: Experiment, replies: int) -> float | None:
    """The largest part that one client may have in a mean by samples (`round.max_share`); None:
    there is no bound.
    """
    share = experiment.config.round.max_share
    if share == "auto":
        return 0.5 if experiment.federation is None and replies >= ENOUGH else None
    return share


def lower_counts(counts: Mapping[int, int], share: float) -> dict[int, int]:
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


def at_most(up: Payload, n: int) -> Payload:
    """The reply, with at most n samples."""
    run = run_of(up)
    name = up.run_field
    if run is None or name is None or run.n <= n:
        return up
    return dataclasses.replace(up, **{name: dataclasses.replace(run, n=n)})

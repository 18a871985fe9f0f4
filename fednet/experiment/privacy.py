"""Client-level DP-FedAvg: McMahan et al., "Learning Differentially Private Recurrent Language
Models", ICLR 2018 (arXiv:1710.06963), and the bound of an update's norm.

C  privacy.clip    z  privacy.noise    m of N  clients drawn a round

An update (y_i - x where a method sends weights y_i) is clipped to norm C by its client, and again
by the server, which need not trust it. Every update has the same weight: weights by sample counts
would depend on the data. `where: server` adds N(0, (zC)^2) once to the sum. `where: client` adds it
to each update before it is compressed and leaves its site. Under secure aggregation each client
adds a part of it, so that the sum has enough for the fewest clients that it can be of.

Only the update is private: sample counts, losses and counts of correct answers are sent as they
are. Buffers would not be clipped, so a model whose buffers are sent is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from fednet.algorithms.state import S
from fednet.config import Config, PrivacySection
from fednet.errors import ConfigError, StateError, lacking
from fednet.experiment import selection
from fednet.files import digest, write_aside
from fednet.tensors import Sum, Tensors
from fednet.wire.payload import P, Payload, run_of, tensors_of

if TYPE_CHECKING:
    from fednet.experiment.build import Experiment
    from fednet.experiment.store import Record
    from fednet.wire.messages import Task

# The server takes an update for clipped up to this factor: float32 rounds x + (y - x).
SLACK = 1.0001
# Standard deviations of noise that fixed point must have room for; one entry in 10^15 has more.
TAILS = 8


# -- an update's norm ------------------------------------------------------------------------------
def updates(up: Payload, x: Tensors | None) -> Iterator[tuple[str, Tensors, Tensors]]:
    """Yields (field, value, its update) of a reply's tensors: the update of weights is their
    difference to x, what was sent; any other value is one itself.
    """
    for name, value in tensors_of(up).items():
        if up.fields[name].kind == "state" and x is not None:
            yield name, value, value - x.to(value.device)
        else:
            yield name, value, value


def clip_updates(up: P, x: Tensors | None, bound: float, slack: float = 1.0) -> P:
    """Returns the reply with each update scaled to norm `bound` where it is above `slack * bound`;
    other updates keep their bits.
    """
    changed = {}
    for name, value, update in updates(up, x):
        norm = update.norm()
        if norm > slack * bound:
            short = update.vector * (bound / norm)
            if update is not value and x is not None:
                short = x.vector.to(value.device) + short
            changed[name] = value.with_vector(short)
    return dataclasses.replace(up, **changed) if changed else up


# -- noise -----------------------------------------------------------------------------------------
class Noise:
    """Draws Gaussian noise from a secret in `file` (mode 0600). It does not come from the run's
    seed: with that, which every client knows, anyone could compute the noise and subtract it.

    The same value sent for the same question gets the same noise again, so that a round repeated
    after a crash reveals nothing new. Anything else gets other noise: the difference of two values
    with the same noise would have none.
    """

    def __init__(self, file: Path, drawn: bool = False) -> None:
        """Reads the secret, or makes it. drawn: it was used before. Raises StateError if it is
        missing or another.
        """
        if not file.exists() and not drawn:
            file.parent.mkdir(parents=True, exist_ok=True)
            secret = secrets.token_bytes(32)
            write_aside(file, secret + digest([secret]), 0o600, first=True)
        found = file.read_bytes() if file.exists() else b""
        self._secret = found[:32]
        if digest([self._secret]) != found[32:]:
            raise StateError(
                f"{file}: the secret of this run's noise is {'another' if found else 'gone'}, and "
                f"other noise would show what the first has hidden; put it back, or start the run "
                f"again under another name."
            )

    def add(self, value: torch.Tensor, scale: float, question: bytes) -> tuple[torch.Tensor, str]:
        """Returns the value in float64 with N(0, scale^2) added, and an id of this answer.
        question: all that was asked, or a cryptographic digest of it.
        """
        sent = value.detach().cpu().contiguous()
        asked = hashlib.sha256(question).digest()
        key = hmac.new(self._secret, asked, hashlib.sha256)
        key.update(sent.numpy().tobytes())
        number = int.from_bytes(key.digest()[:16], "little")
        rng = np.random.Generator(np.random.Philox(key=number))
        drawn = torch.from_numpy(rng.normal(0.0, scale, sent.numel()))
        return value.double() + drawn.to(value.device), key.hexdigest()


def noise_of(config: Config, where: str, file: Path, drawn: bool) -> Noise | None:
    """Returns the noise that this side adds, the client or the server; None if it adds none."""
    section = config.privacy
    return Noise(file, drawn) if section.noise and section.where == where else None


@dataclasses.dataclass(frozen=True)
class Question:
    """Says what a client was asked: a digest, and for the account the run, round and client."""

    run: str
    round: int
    client: int
    digest: bytes

    @classmethod
    def of(cls, config: Config, run: str, task: Task, record: Record, body: memoryview) -> Question:
        """Makes a digest of everything that the answer to a task depends on, so that two questions
        never have the same digest. record: the client's state; body: the task's payload.
        """
        key = task.key.round, task.key.phase, task.key.client
        settings = msgspec.json.encode(config, order="deterministic")
        task_text = msgspec.json.encode((key, task.form, task.enrol, record.sha256, body.nbytes))
        whole = hashlib.sha256(b"%d %b%b" % (len(settings), settings, task_text))
        whole.update(body)
        return cls(run, task.key.round, task.key.client, whole.digest())


def at_client(config: Config) -> PrivacySection:
    """Returns what each client applies itself. Under secure aggregation nobody sees less than the
    sum of the fewest clients that it needs, so each adds its part of that sum's noise.
    """
    section = config.privacy
    if section.secagg.protocol == "none" or section.where != "client":
        return section
    fewest = max(2, math.ceil(section.secagg.threshold * config.cohort_size - 1e-9))
    return msgspec.structs.replace(section, noise=section.noise / math.sqrt(fewest))


def protect(
    up: P,
    x: Tensors | None,
    section: PrivacySection,
    noise: Noise | None,
    question: Question,
    account: Callable[[Question, str, PrivacySection], None] | None = None,
) -> P:
    """Returns the client's part: clipping, and with `where: client` noise. account: called before
    an answer leaves; it raises ConfigError where the budget is used up.
    """
    assert section.clip is not None
    up = clip_updates(up, x, section.clip)
    if section.where != "client" or not section.noise or noise is None:
        return up
    changed = {}
    for name, value in tensors_of(up).items():
        asked = question.digest + name.encode()
        vector, answer = noise.add(value.vector, section.noise * section.clip, asked)
        if account is not None:
            account(question, answer, section)
        changed[name] = value.with_vector(vector.float())
    return dataclasses.replace(up, **changed)


def clip_received(up: P, x: Tensors | None, section: PrivacySection) -> P:
    """Returns the server's part, of one reply: it is clipped again, and has weight 1."""
    assert section.clip is not None
    if section.where == "server":
        up = clip_updates(up, x, section.clip, SLACK)
    run = run_of(up)
    name = up.run_field
    if run is None or name is None:
        return up
    return dataclasses.replace(up, **{name: dataclasses.replace(run, n=1)})


def add_noise(accumulator: S, section: PrivacySection, noise: Noise | None, round: int) -> S:
    """Returns the accumulator with noise on its sum, where the server adds it."""
    assert section.clip is not None
    if section.where != "server" or not section.noise or noise is None:
        return accumulator
    changed = {}
    for f in dataclasses.fields(accumulator):
        total = getattr(accumulator, f.name)
        if isinstance(total, Sum) and total.layout is not None:
            asked = f"{round}/{f.name}".encode()
            vector, _ = noise.add(total.vector, section.noise * section.clip, asked)
            changed[f.name] = dataclasses.replace(total, vector=vector)
    return accumulator.replace(**changed)


# -- what it amounts to ----------------------------------------------------------------------------
def epsilon(noises: Mapping[float, int], delta: float) -> float:
    """Returns the epsilon of several answers together, for one client's data being replaced by
    other data. noises: by noise multiplier, how many answers.
    """
    gaussian = accounting()[0].GaussianDpEvent
    return _epsilon([(gaussian(noise / 2), times) for noise, times in noises.items()], delta)


def _epsilon(events: Iterable[tuple[object, int]], delta: float) -> float:
    dp_accounting, rdp = accounting()
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = rdp.RdpAccountant(neighboring_relation=replaced)
    for event, times in events:
        if times:
            accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def accounting() -> tuple[ModuleType, ModuleType]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise ConfigError(lacking("privacy.noise", "dp-accounting")) from None
    return dp_accounting, rdp


class Accountant:
    """Computes the privacy spent at `privacy.delta`, by Rényi DP, with Google's dp-accounting.
    Neighbouring federations differ in one client's whole data, replaced by other data: a sum
    changes by up to 2C.

    epsilon assumes that an attacker knows which clients took part in which round. They follow from
    the run's seed, which all clients know, so this is what the run guarantees. It counts the rounds
    of the client that was drawn most often; where that depends on the time (availability.trace),
    all rounds.

    epsilon_sampled, with `where: server`, assumes that nobody knows who took part, as papers do. It
    is the smaller one of two bounds: that of sampling m of N without replacement (Wang et al.,
    AISTATS 2019, arXiv:1808.00087), and epsilon itself, which is smaller where many clients take
    part. It is absent where an availability model draws clients unevenly.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        dp_accounting, _ = accounting()
        gaussian = dp_accounting.GaussianDpEvent(config.privacy.noise / 2)
        self._events = {"epsilon": gaussian}
        there = config.availability
        if config.privacy.where == "server" and there.model == "always" and there.trace is None:
            self._events["epsilon_sampled"] = dp_accounting.SampledWithoutReplacementDpEvent(
                config.training_clients, config.asked, gaussian
            )
        self._round = 0
        self._taken: Counter[int] = Counter()

    def spent(self, round: int) -> dict[str, float]:
        """Returns the privacy spent by `round` rounds; ask for rounds in ascending order."""
        most = round
        if self._config.availability.trace is None:
            for r in range(self._round + 1, round + 1):
                self._taken.update(selection.cohort(self._config, r))
            most = max(self._taken.values(), default=0)
        self._round = round
        times = {"epsilon": most, "epsilon_sampled": round}
        found = {
            name: _epsilon([(event, times[name])], self._config.privacy.delta)
            for name, event in self._events.items()
        }
        if "epsilon_sampled" in found:
            found["epsilon_sampled"] = min(found.values())
        return found


def check(experiment: Experiment) -> None:
    """Raises ConfigError if DP-FedAvg is not possible. Called before anything starts."""
    config = experiment.config
    if config.privacy.clip is None:
        return
    if experiment.up.buffers and experiment.shared.sizes[1] + experiment.shared.sizes[2]:
        raise ConfigError(
            "privacy.clip: this model's BatchNorm statistics would leave their clients unclipped; "
            "set model.buffers: local."
        )
    own = at_client(config)
    room = config.privacy.secagg.clip
    least = config.privacy.clip * (1 + TAILS * own.noise)
    if own.secagg.protocol != "none" and own.noise and room < least:
        raise ConfigError(
            f"privacy.secagg.clip: {room:g} would cut off noise, and the sum would have less "
            f"than epsilon assumes; expected {least:.4g} at least."
        )
    if config.privacy.noise:
        Accountant(config)

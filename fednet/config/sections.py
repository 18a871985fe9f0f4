"""The configuration's sections, one record each, with every key and every default. The words are
the manual's.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated, Any, Literal

import msgspec

from fednet.ids import LARGEST

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Below1 = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Taken = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
RunName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}\Z",
        description="a directory's name of letters, digits and . _ - + = @, at most 100",
    ),
]
Schedule = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(constant|cosine|exponential\(\s*[0-9.eE+-]+\s*\)|step\(\s*[0-9]+\s*,\s*[0-9.eE+-]+\s*\))\Z",
        description="constant, cosine, exponential(factor) or step(rounds, factor)",
    ),
]

# Keys that say where the data come from, and nothing of what is computed.
WHERE = ("data.root", "data.download")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of sections: unknown keys are errors, values never change."""


class AlgorithmSection(Section, frozen=True, kw_only=True):
    """options: the method's hyper-parameters, every default filled in."""

    name: str = "fedavg"
    options: dict[str, Any] = {}


class ModelSection(Section, frozen=True, kw_only=True):
    """buffers: what becomes of BatchNorm statistics; weights: a .safetensors file each site has;
    trainable: patterns of parameter names, separated by commas; what they leave out never
    crosses.
    """

    name: str = "lenet5"
    buffers: Literal["average", "local", "server"] = "average"
    weights: str | None = None
    trainable: str = "*"
    options: dict[str, Any] = {}


class PartitionSection(Section, frozen=True, kw_only=True):
    """seed: null is the run's."""

    scheme: str = "dirichlet"
    seed: int | None = None
    options: dict[str, Any] = {}


class PublicSection(Section, frozen=True, kw_only=True):
    """Held out of the training pool for the server: a count of samples, or a fraction of the
    pool.
    """

    samples: Count = 0
    fraction: Below1 = 0.0


class DataSection(Section, frozen=True, kw_only=True):
    dataset: str = "digits"
    root: str | None = None
    download: bool = False
    augment: Literal["none", "flip", "crop_flip"] = "none"
    partition: PartitionSection = PartitionSection()
    validation: Below1 = 0.0
    client_test: Literal["like_train", "merge_split", "none"] = "like_train"
    public: PublicSection = PublicSection()
    baseline_pool: Literal["same", "full"] = "same"
    options: dict[str, Any] = {}


class TrainSection(Section, frozen=True, kw_only=True):
    """Local training. steps: SGD steps instead of epochs. threads: of torch, per client.
    last_batch: what becomes of an epoch's last batch where it is smaller than the others: keep it;
    drop it, as PFLlib does; merge it with the one before; auto = keep it, but where the model has
    BatchNorm drop one of one or two samples, whose variance would spoil the running statistics. (A
    client whose only batch it is trains on it all the same.)
    memory_format: how the kernels of convolutions lie in memory; auto: channels_last on a CPU,
    contiguous on a GPU. pack: so many clients of one process are trained as one, which many small
    models on a GPU gain by; other bits than each by itself, the same each time. 1: each by
    itself.
    """

    epochs: AtLeast1 = 1
    steps: AtLeast1 | None = None
    batch_size: AtLeast1 = 64
    last_batch: Literal["auto", "keep", "drop", "merge"] = "auto"
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.01
    momentum: Below1 = 0.0
    weight_decay: NonNegative = 0.0
    schedule: Schedule = "constant"
    clip_norm: Positive | None = None
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    pack: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1

    def lr_at(self, round: int, rounds: int) -> float:
        """The local learning rate of a round (from 1): constant; cosine: lr * (1 + cos(pi (t-1)/T))
        / 2; exponential(g): lr * g^(t-1); step(k, g): lr * g^floor((t-1)/k).
        """
        name, _, inside = self.schedule.partition("(")
        numbers = [float(x) for x in re.findall(r"[^,()\s]+", inside)]
        if name == "cosine":
            return self.lr * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
        if name == "exponential":
            return float(self.lr * numbers[0] ** (round - 1))
        if name == "step":
            return float(self.lr * numbers[1] ** ((round - 1) // int(numbers[0])))
        return self.lr


class EvaluateSection(Section, frozen=True, kw_only=True):
    """every: rounds, 0 = never. clients: auto = participants within their task, all at the end.
    most: where there are more clients, an evaluation of all asks so many, drawn once from the seed;
    null: all. finetune: personal models are judged after E more local epochs, at the end. shared:
    what a method that shares a part of the model is judged with beside each client's own part: the
    newest shared part (FedRep's and LG-FedAvg's authors, PFLlib), or that of the client's own last
    participation. keep_local: whether each client keeps its last local model, whole, to be judged
    by; auto = of methods with personal models, and of all methods where there are no more clients
    than `most`.
    """

    every: Count = 1
    global_: bool = msgspec.field(default=True, name="global")
    clients: Literal["auto", "all", "none"] = "auto"
    most: AtLeast1 | None = 1000
    finetune: bool = False
    shared: Literal["latest", "last_seen"] = "latest"
    keep_local: Literal["auto", "always", "never"] = "auto"
    batch_size: AtLeast1 = 512


class LostSection(Section, frozen=True, kw_only=True):
    """Seconds that a client may take to come back after its connection closed, or its heartbeat
    fell silent; null: for ever. stalled: that a task may make no progress although its process is
    heard of, before it is given to another that hosts the same client.
    """

    closed: NonNegative | None = 3.0
    silent: Positive | None = 10.0
    stalled: Positive | None = 300.0


class RoundSection(Section, frozen=True, kw_only=True):
    """Seconds. deadline: for a client's own task, from its hand-out; null: wait for all that are
    alive. first: close on the first k replies. start: clients joined before round 1. join: an id
    that has not joined by then counts as lost. on_error: whether a client that could not do its
    task, or whose reply could not be used, is left out of the round, or ends the run. max_share:
    the largest part of a mean by samples that one client may have; auto: half, where sites bring
    their own data and three or more replied, else no bound, for the server then knows the counts.
    """

    deadline: Positive | None = None
    min_results: AtLeast1 = 1
    select_extra: Count = 0
    first: AtLeast1 | None = None
    lost: LostSection = LostSection()
    start: Literal["all"] | AtLeast1 = "all"
    join: Positive | None = 60.0
    void_rounds: AtLeast1 = 3
    on_error: Literal["stop", "drop"] = "drop"
    max_share: Literal["auto"] | Taken | None = "auto"


class StopSection(Section, frozen=True, kw_only=True):
    """End early: target accuracy (0..1) reached, or the budget spent (MB is 10^6 bytes)."""

    accuracy: Taken | None = None
    megabytes: Positive | None = None
    seconds: Positive | None = None


class CheckpointSection(Section, frozen=True, kw_only=True):
    """every: rounds, a crash loses at most so many. fsync: against power loss too."""

    every: AtLeast1 = 1
    best: bool = True
    fsync: bool = False


class WireSection(Section, frozen=True, kw_only=True):
    """Compressors in order, by the ledger kind they apply to."""

    up: dict[str, tuple[str, ...]] = {}
    down: dict[str, tuple[str, ...]] = {}


_NUMBER = r"\s*[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?\s*"
Drawn = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:lognormal|uniform)\({_NUMBER},{_NUMBER}\)\Z",
        description="lognormal(median, sigma) or uniform(low, high)",
    ),
]
Profile = Literal["3g", "4g", "dsl", "wifi", "lan"]
_NAME = r"(?:3g|4g|dsl|wifi|lan)"
Chosen = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:{_NAME}|choice\(\s*{_NAME}\s*(?:,\s*{_NAME}\s*)*\))\Z",
        description="one of 3g, 4g, dsl, wifi, lan or choice(NAME, NAME, ...) of these",
    ),
]


def drawn(text: str) -> tuple[str, float, float]:
    """A distribution in parts: ("lognormal", median, sigma) or ("uniform", low, high)."""
    name, _, inside = text.partition("(")
    first, second = (float(x) for x in inside.rstrip(") ").split(","))
    return name, first, second


class ClientLinkSection(Section, frozen=True, kw_only=True):
    """One client's own link; what is left out is as for all."""

    up_mbps: Positive | Drawn | None = None
    down_mbps: Positive | Drawn | None = None
    latency_ms: NonNegative | Drawn | None = None
    jitter_ms: NonNegative | Drawn | None = None
    step_ms: NonNegative | Drawn | None = None
    profile: Profile | None = None


PROFILES = {
    # WebPageTest's connectivity profiles of these names (down/up, round trip): 1.6/0.768 Mbit/s,
    # 300 ms;
    "3g": ClientLinkSection(up_mbps=0.768, down_mbps=1.6, latency_ms=150.0),
    # 9/9 Mbit/s, 170 ms;
    "4g": ClientLinkSection(up_mbps=9.0, down_mbps=9.0, latency_ms=85.0),
    # 1.5/0.384 Mbit/s, 50 ms.
    "dsl": ClientLinkSection(up_mbps=0.384, down_mbps=1.5, latency_ms=25.0),
    # Chrome's former "WiFi" preset: 30/15 Mbit/s, 2 ms.
    "wifi": ClientLinkSection(up_mbps=15.0, down_mbps=30.0, latency_ms=1.0),
    # Gigabit Ethernet through one switch.
    "lan": ClientLinkSection(up_mbps=1000.0, down_mbps=1000.0, latency_ms=0.1),
}


class LinkSection(Section, frozen=True, kw_only=True):
    """clock: real, emulated on each connection; virtual, nothing sleeps and time is counted. mbps:
    10^6 bits a second, null: no limit. profile: a named link, for what is not given. per_client: by
    id or range of ids (`0-4,7`). step_ms: of one training step. Each figure may be drawn, once a
    client: lognormal(median, sigma of its logarithm), uniform(low, high); a profile by choice(3g,
    4g, wifi), a name given twice counting twice. seed: of these draws and the jitter; null is the
    run's.
    """

    clock: Literal["real", "virtual"] = "real"
    up_mbps: Positive | Drawn | None = None
    down_mbps: Positive | Drawn | None = None
    latency_ms: NonNegative | Drawn = 0.0
    jitter_ms: NonNegative | Drawn = 0.0
    profile: Chosen | None = None
    per_client: dict[str, ClientLinkSection] = {}
    step_ms: NonNegative | Drawn | None = None
    seed: int | None = None

    def of(self, client: int) -> ClientLinkSection:
        """The link of one client: its own figures, those of its own profile, those of `link`, those
        of the profile there. A rate that stays None has no limit; a delay is one way. Figures to be
        drawn stand as they are given: see engine.links.
        """
        from fednet import ids

        own = next(
            (link for pattern, link in self.per_client.items() if client in ids.parse(pattern)),
            ClientLinkSection(),
        )
        mine, named = (
            PROFILES.get(p or "", ClientLinkSection()) for p in (own.profile, self.profile)
        )
        chosen = {}
        for key in ClientLinkSection.__struct_fields__:
            general = getattr(self, key) or None  # a delay of 0 is one that was not given
            given = (
                getattr(own, key),
                getattr(mine, key),
                general,
                getattr(named, key),
                getattr(self, key),
            )
            chosen[key] = next((value for value in given if value is not None), None)
        return ClientLinkSection(**chosen)


class AvailabilitySection(Section, frozen=True, kw_only=True):
    """bernoulli: present with probability p, each round anew. markov: up, down: probabilities of
    coming and of going. trace: a file with the rounds in which each client is present.
    """

    model: Literal["always", "bernoulli", "markov", "trace"] = "always"
    p: Share | None = None
    up: Share | None = None
    down: Share | None = None
    path: str | None = None


FaultKind = Literal[
    "drop_before_training",
    "drop_before_sending",
    "drop_during_upload",
    "crash",
    "delay",
    "slow",
    "duplicate",
    "corrupt",
    "disconnect",
    "server_crash",
]
ServerPoint = Literal[
    "broadcasting",
    "spooling",
    "receiving",
    "aggregating",
    "evaluating",
    "checkpointing",
    "recording",
    "between",
]


class FaultSection(Section, frozen=True, kw_only=True):
    """One planned fault. rounds: a crashed client stays away so long; seconds: of delay; factor: of
    slowness; at: the point of the round at which the server dies (a task has left; a reply has come
    in part; whole; the last is folded; the round is judged; the checkpoint's files are written, its
    manifest is not; the manifest is, the records are not; all is done); share: of an upload that
    gets through before it is cut.
    """

    round: AtLeast1
    kind: FaultKind
    client: Count | None = None
    rounds: AtLeast1 | None = None
    seconds: Positive | None = None
    factor: Annotated[float, msgspec.Meta(ge=1)] | None = None
    share: Share | None = None
    at: ServerPoint | None = None


class FaultsSection(Section, frozen=True, kw_only=True):
    """random: by kind, the probability that it strikes a client in a round. replay: a run whose
    completed sets are forced.
    """

    seed: int = 0
    random: dict[str, Share] = {}
    schedule: tuple[FaultSection, ...] = ()
    replay: str | None = None


class SecuritySection(Section, frozen=True, kw_only=True):
    """curve: encrypt and authenticate with CURVE; keys: the directory of the server's keys.
    max_norm: an update of a larger Euclidean norm is refused; auto: what is a thousand times larger
    than the shared model and than most replies of its round; null: no bound.
    """

    curve: bool = False
    keys: str | None = None
    max_norm: Literal["auto"] | Positive | None = "auto"


class PrivacySection(Section, frozen=True, kw_only=True):
    """DP-FedAvg. clip: bound of an update's norm; noise: multiplier of it; delta: for the
    accountant.
    """

    clip: Positive | None = None
    noise: NonNegative = 0.0
    where: Literal["server", "client"] = "server"
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-5


class Config(Section, frozen=True, kw_only=True):
    """A whole run. `fednet.config.load` and `from_mapping` make it, checked; `to_mapping` writes it
    back.
    """

    name: RunName = "quickstart"
    load: tuple[str, ...] = ()
    seed: int = 0
    rounds: AtLeast1 = 20
    clients: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)] = 10
    participation: Taken | None = 0.5
    clients_per_round: AtLeast1 | None = None
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    task: str = "classification"
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    round: RoundSection = RoundSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    wire: WireSection = WireSection()
    link: LinkSection = LinkSection()
    availability: AvailabilitySection = AvailabilitySection()
    faults: FaultsSection = FaultsSection()
    security: SecuritySection = SecuritySection()
    privacy: PrivacySection = PrivacySection()
    track: tuple[Literal["tensorboard"], ...] = ()
    report: bool = True  # figures and page at the end

    @property
    def cohort_size(self) -> int:
        """m = max(1, floor(C * N + 0.5)): clients asked in a round, without `select_extra`."""
        if self.clients_per_round is not None:
            return self.clients_per_round
        assert self.participation is not None
        return max(1, math.floor(self.participation * self.clients + 0.5))

    def replace(self, **changes: Any) -> Config:
        """This configuration with some sections changed, unchecked."""
        return msgspec.structs.replace(self, **changes)


@functools.cache
def homes() -> dict[str, list[str]]:
    """Where each key of ours stands: {'lr': ['train.lr'], ...}."""
    found: dict[str, list[str]] = {}

    def visit(kind: Any, path: str) -> None:
        for field in msgspec.structs.fields(kind):
            here = f"{path}.{field.encode_name}" if path else field.encode_name
            if field.name != "options":
                found.setdefault(field.encode_name, []).append(here)
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                visit(field.type, here)

    visit(Config, "")
    return found

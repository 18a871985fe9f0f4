"""Every key of the configuration: its type, its range, its default and what it does.

`Config` is the whole record. The text of a key with a unit ends with it in brackets.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Annotated, Literal, get_args, get_origin

import msgspec

from fednet import ids
from fednet.ids import LARGEST
from fednet.options import call
from fednet.plain import JsonDict

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# The largest number of seconds in a message: see `wire.messages.Seconds`.
Carried = msgspec.Meta(le=1e9)
JOIN_S = 60.0
Below1 = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Taken = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
AtLeast2 = Annotated[int, msgspec.Meta(ge=2)]
RunName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}\Z",
        description="a directory's name of letters, digits and . _ - + = @, at most 100",
    ),
]
_NUMBER = r"\s*[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?\s*"
Schedule = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(constant|cosine|exponential\({_NUMBER}\)|step\(\s*[0-9]+\s*,{_NUMBER}\))\Z",
        description="constant, cosine, exponential(factor) or step(rounds, factor)",
    ),
]

Drawn = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:lognormal|uniform)\({_NUMBER},{_NUMBER}\)\Z",
        description="lognormal(median, sigma) or uniform(low, high)",
    ),
]
Profile = Literal["3g", "4g", "dsl", "wifi", "lan"]
_NAME = f"(?:{'|'.join(get_args(Profile))})"
Chosen = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:{_NAME}|choice\(\s*{_NAME}\s*(?:,\s*{_NAME}\s*)*\))\Z",
        description=f"one of {', '.join(get_args(Profile))} or choice(NAME, NAME, ...) of these",
    ),
]


def parse_distribution(text: str) -> tuple[str, float, float]:
    """A distribution: ("lognormal", median, sigma) or ("uniform", low, high)."""
    name, _, inside = text.partition("(")
    first, second = (float(x) for x in inside.rstrip(") ").split(","))
    return name, first, second


def learning_rate_at(schedule: str, lr: float, t: int, last: int) -> float:
    """The learning rate at t = 1..T (last): constant; cosine: lr * (1 + cos(pi (t-1)/T)) / 2;
    exponential(g): lr * g^(t-1); step(k, g): lr * g^floor((t-1)/k).
    """
    if schedule == "constant":
        return lr
    name, given = call(schedule)
    numbers = [float(x) for x in given]
    if name == "cosine":
        return lr * (1 + math.cos(math.pi * (t - 1) / last)) / 2
    if name == "exponential":
        return float(lr * numbers[0] ** (t - 1))
    if name == "step":
        return float(lr * numbers[1] ** ((t - 1) // int(numbers[0])))
    return lr


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of sections: unknown keys are errors, values never change."""


class ClientLinkSection(Section, frozen=True, kw_only=True):
    """One client's own link, in figures. Values that are not given are those of `link`."""

    up_mbps: Positive | None = None
    """Rate from the client. [10^6 bits/s]"""
    down_mbps: Positive | None = None
    """Rate to the client. [10^6 bits/s]"""
    latency_ms: NonNegative | None = None
    """One-way delay. [ms]"""
    step_ms: NonNegative | None = None
    """Time of one training step, in simulated time. [ms]"""
    profile: Profile | None = None
    """A named link, for the values that are not given."""


class LinkSection(Section, frozen=True, kw_only=True):
    """The clients' links. Each value may be drawn once per client: lognormal(median, sigma of the
    logarithm) or uniform(low, high).
    """

    clock: Literal["real", "virtual"] = "real"
    """real: links are emulated on each connection; virtual: nothing waits, and time is computed
    from bytes, links and steps.
    """
    up_mbps: Positive | Drawn | None = None
    """Rate from a client; null: no limit. [10^6 bits/s]"""
    down_mbps: Positive | Drawn | None = None
    """Rate to a client; null: no limit. [10^6 bits/s]"""
    latency_ms: NonNegative | Drawn = 0.0
    """One-way delay. [ms]"""
    profile: Chosen | None = None
    """A named link, for the values that are not given; choice(3g, 4g, wifi) draws one per client,
    and a name given twice is twice as likely.
    """
    per_client: dict[str, ClientLinkSection] = {}
    """Other links for some clients, by ids or a share of all, such as `0-4,7` or `1/4`."""
    trace: str | tuple[str, str] | None = None
    """Rates second by second, instead of up_mbps and down_mbps: wifi, lte, umts, evdo, a file, or
    two files for uplink and downlink.
    """
    step_ms: NonNegative | Drawn | None = None
    """Time of one training step, in simulated time. [ms]"""


class AvailabilitySection(Section, frozen=True, kw_only=True):
    """Which clients are available in a round."""

    model: Literal["always", "bernoulli", "markov"] = "always"
    """always: all clients are available; bernoulli: each with probability p per round; markov:
    clients come and go.
    """
    p: Share | None = None
    """bernoulli: probability that a client is available in a round. [probability]"""
    up: Share | None = None
    """markov: probability per round that an absent client becomes available. [probability]"""
    down: Share | None = None
    """markov: probability per round that an available client leaves. [probability]"""
    trace: str | None = None
    """Instead of `model`: the seconds in which each client is available: `phones`, which begins at
    midnight, or a file.
    """


class DevicesSection(Section, frozen=True, kw_only=True):
    """How fast the clients' devices are."""

    trace: str | None = None
    """Time of a training step for each client: `phones` or a file; null: as long as it takes. A
    client that computes faster waits.
    """


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
    """One planned fault."""

    round: AtLeast1
    """Round in which it happens. [round]"""
    kind: FaultKind
    """The client stops answering before it trains (drop_before_training), before it sends its reply
    (drop_before_sending) or in the middle of the upload (drop_during_upload); its process is killed
    while it trains (crash); its reply is late (delay, slow), sent twice (duplicate) or has a
    changed byte (corrupt); its connection closes after the reply (disconnect); the server is killed
    (server_crash).
    """
    exchange: Count | None = None
    """The round's exchange in which it happens, from 0; null: the first, with privacy.secagg the
    one that trains. [exchange]
    """
    client: Count | None = None
    """The client; not for server_crash. [id]"""
    rounds: Annotated[AtLeast1, msgspec.Meta(le=10**9)] | None = None
    """crash: rounds that the client stays away. [rounds]"""
    seconds: Annotated[Positive, Carried] | None = None
    """delay: how late the reply is. [s]"""
    factor: Annotated[float, msgspec.Meta(ge=1), Carried] | None = None
    """slow: training takes this many times as long."""
    share: Share | None = None
    """drop_during_upload: share of the reply that is sent, at most all bytes but one. [share]"""
    at: ServerPoint | None = None
    """server_crash: after a task was sent (broadcasting); after a reply or a part of it arrived
    (spooling); after a reply was accepted (receiving); after the last reply was aggregated
    (aggregating); after the evaluation (evaluating); before (checkpointing) or after (recording)
    the checkpoint's manifest is written; after the round (between).
    """


class MaliciousSection(Section, frozen=True, kw_only=True):
    """Malicious clients: they attack in every round they are selected in."""

    clients: Share = 0.0
    """Share of the clients that are malicious, rounded down; drawn from the run's seed. [share]"""
    attack: Literal["sign_flip", "label_flip", "gaussian", "alie", "ipm"] = "sign_flip"
    """sign_flip: the update with its sign turned; label_flip: an update trained on flipped labels;
    gaussian: noise; alie: slightly off the honest mean; ipm: against the honest mean. alie and ipm
    need all replies and are made at the server.
    """
    strength: NonNegative | None = None
    """The attack's factor; null: sign_flip 1, gaussian 1, alie 1.5, ipm 2."""


class AggregationSection(Section, frozen=True, kw_only=True):
    """Robust aggregation, for methods that sum their clients' updates."""

    rule: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "norm_bound", "rfa"] = (
        "mean"
    )
    """mean: the method's own mean; the others tolerate malicious replies, and weigh all replies the
    same.
    """
    tolerate: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.2
    """trimmed_mean, krum, multi_krum: share of a round's replies that may be malicious, rounded
    down to f replies. [share]
    """
    bound: Positive | None = None
    """norm_bound: largest norm of an update; null: the round's median. [norm]"""
    iterations: AtLeast1 = 3
    """rfa: number of Weiszfeld steps."""


class FaultsSection(Section, frozen=True, kw_only=True):
    """Faults, planned or random."""

    random: dict[str, Share] = {}
    """Probability per client and round of each kind of fault: a crash of one round, a delay of 1 s,
    half the speed, half an upload. [probability]
    """
    schedule: tuple[FaultSection, ...] = ()
    """Planned faults."""
    malicious: MaliciousSection = MaliciousSection()
    replay: str | None = None
    """A run's directory: each round uses the replies of the same clients as that run's, less those
    that a planned fault of this configuration loses.
    """


# Keys that say where the data are, which changes no result.
WHERE = ("data.root", "data.download")


class AlgorithmSection(Section, frozen=True, kw_only=True):
    """The method. Its own options are written beside `name`: [methods](methods.md#options)."""

    name: str = "fedavg"
    """The method; `fednet list algorithms`. Its own options are written beside the name."""
    options: JsonDict = {}


class AdaptersSection(Section, frozen=True, kw_only=True):
    """Low-rank adapters (LoRA, arXiv:2106.09685). They are trained, and the layers' own weights are
    frozen unless `train.only` names them.
    """

    rank: AtLeast1 = 8
    """Rank r: rows of A and columns of B."""
    alpha: Positive = 8.0
    """Scale: the layer's output gets alpha / rank times B A x."""
    target: tuple[str, ...] = ("*",)
    """Glob patterns of the names of Linear and Conv2d layers that get an adapter."""
    weights: str | None = None
    """Folder with adapters to start from, as the package peft or a run has written them; every site
    needs it. null: A random from the seed, B zero.
    """


class SelectionSection(Section, frozen=True, kw_only=True):
    """Who is selected: by a part of your own, instead of at random."""

    name: str | None = None
    """A selection of a loaded file, `fednet list selections`; its own options are written beside
    the name. null: the method's own, where it has one, else at random from the seed.
    """
    options: JsonDict = {}


class ModelSection(Section, frozen=True, kw_only=True):
    """The model. Its own options are written beside `name`: `fednet list keys model`."""

    name: str = "lenet5"
    """The model; `fednet list models`. Its own options are written beside the name."""
    buffers: Literal["average", "local", "server"] = "average"
    """BatchNorm statistics: average: averaged with the model; local: each client keeps its own;
    server: the server's, which no client changes.
    """
    weights: str | None = None
    """A .safetensors file with initial weights; with `base: sites` every site needs it, with `base:
    server` only the server. null: random from the seed.
    """
    base: Literal["sites", "server"] = "sites"
    """Who has the initial model. sites: each site makes it from `weights` or the seed, and is
    refused if frozen parts differ from the server's. server: the server alone, and sends it to each
    client once.
    """
    sha256: str | None = None
    """SHA-256 of the initial model, which sites check; null: the server sends it."""
    adapters: AdaptersSection | None = None
    """Train low-rank adapters instead of the layers' weights; null: no adapters."""
    clients: str | None = None
    """Clients that have this model if `others` has models for the rest, such as 0-4,7; null: all
    that are left.
    """
    others: tuple[JsonDict, ...] = ()
    """Models of other clients, each with name, clients and its own options, for methods that do not
    send weights. `model:` as a list is short for it.
    """
    options: JsonDict = {}


class PartitionSection(Section, frozen=True, kw_only=True):
    """How the training data are divided among clients. The scheme's own options are written beside
    it: `fednet list keys data.partition`.
    """

    scheme: str = "dirichlet"
    """How the training data are divided among the clients; `fednet list partitions`. Its own
    options are written beside the name.
    """
    seed: int | None = None
    """Seed of the division; null: the run's `seed`."""
    options: JsonDict = {}


class PublicSection(Section, frozen=True, kw_only=True):
    """Public samples: held out of the training pool for the server."""

    samples: Count = 0
    """Number of samples, the same of each class; instead of `fraction`. [samples]"""
    fraction: Below1 = 0.0
    """Share of the training pool, with its class proportions; instead of `samples`. [share]"""


SITE = "site"
"""The name of the dataset that each client brings."""

DIVIDES = ("partition", "validation", "public", "client_test", "baseline_pool", "feature_noise")
"""Keys of `data` that say how a run divides its data; without meaning if sites bring their own."""


class DataSection(Section, frozen=True, kw_only=True):
    """The data. The dataset's own options are written beside `dataset`: `fednet list keys data`."""

    dataset: str = "digits"
    """The dataset; `fednet list datasets`. site: each client brings its own data. Its own options
    are written beside the name.
    """
    root: str | None = None
    """Folder with the datasets' files; null: $FEDNET_DATA, else the user's cache."""
    download: bool = False
    """Download missing files, if the dataset supports it."""
    augment: Literal["none", "flip", "crop_flip", "crop_reflect_flip"] = "none"
    """Random changes of training images: flip horizontally, crop with zero or reflected padding.
    Targets of the images' height and width (masks) are moved with them.
    """
    normalise: bool = True
    """Subtract the dataset's mean from uint8 inputs and divide by its standard deviation; false:
    only scale to 0..1.
    """
    feature_noise: NonNegative = 0.0
    """Feature skew: standard deviation of the Gaussian noise added to the last client's inputs,
    growing from 0 at the first client; for uint8 images in units of 0..1. The client's test split
    gets it too, the server's test set does not.
    """
    partition: PartitionSection = PartitionSection()
    validation: Below1 = 0.0
    """Share of the training pool kept for tuning hyper-parameters. [share]"""
    client_test: Literal["like_train", "merge_split", "none"] = "like_train"
    """A client's own test split: like_train: from the test set, with the client's class
    proportions, or under the scheme natural those of its owners; merge_split: a part of its own
    samples; none: no split.
    """
    public: PublicSection = PublicSection()
    baseline_pool: Literal["same", "full"] = "same"
    """Training pool of methods that use no public samples: same: without the public samples too;
    full: all samples.
    """
    options: JsonDict = {}


class ClientTrainSection(Section, frozen=True, kw_only=True):
    """Some clients' own local training; values that are not given are those of `train`."""

    epochs: AtLeast1 | None = None
    """Local epochs per round; also instead of `train.steps`. [epochs]"""
    steps: AtLeast1 | None = None
    """Local steps per round, instead of epochs. [steps]"""
    batch_size: AtLeast1 | None = None
    """Samples per step. [samples]"""
    lr: Positive | None = None
    """Local learning rate of round 1; `train.schedule` changes it."""
    class_weights: tuple[Positive, ...] | None = None
    """Weights of the classes in the loss."""


# `train.lr: null`. The rate for SGD trains the examples well; the others are PyTorch's.
RATES = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001}


class TrainSection(Section, frozen=True, kw_only=True):
    """Local training."""

    epochs: AtLeast1 = 5
    """Local epochs E: passes over the client's samples per round. [epochs]"""
    steps: AtLeast1 | None = None
    """Local steps K per round, instead of `epochs`. [steps]"""
    batch_size: AtLeast1 = 16
    """Samples per step (B). An epoch's last batch may be smaller; one of one or two samples is left
    out if the model has BatchNorm, unless it is the only one. With batches of one sample a
    BatchNorm layer is in eval mode where that is one value a channel, as in BatchNorm1d. [samples]
    """
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Local optimizer; its state starts empty in every round (see `keep_optimizer`). Some methods
    accept only sgd.
    """
    lr: Positive | None = None
    """Local learning rate eta of round 1; `schedule` changes it. null: 0.05 with sgd, 0.001 with
    adam and adamw.
    """
    momentum: Below1 = 0.0
    """Momentum of local SGD."""
    weight_decay: NonNegative = 0.0
    """L2 penalty: this times the weights is added to the gradient (adamw: decoupled)."""
    schedule: Schedule = "constant"
    """Learning rate over the rounds t = 1..T: cosine: lr (1 + cos(pi (t-1)/T)) / 2; exponential(g):
    lr g^(t-1); step(k, g): times g every k rounds.
    """
    class_weights: tuple[Positive, ...] = ()
    """Weight of each class in the loss, as in torch.nn.CrossEntropyLoss; []: all the same. Only for
    `task: classification`.
    """
    per_client: dict[str, ClientTrainSection] = {}
    """Other settings for some clients, by ids or a share of all, such as `0-4,7` or `1/4`."""
    keep_optimizer: bool = False
    """Each client keeps its optimizer's state (momentum, Adam's moments) between its rounds. It is
    not sent.
    """
    local_schedule: Schedule = "constant"
    """Learning rate over the local steps of a round, from 1: as `schedule`, with steps for rounds.
    The two are multiplied.
    """
    clip_norm: Positive | None = None
    """Upper bound of the gradient's Euclidean norm in a local step; null: none."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Number format of the computation; bf16 and fp16 by autocast."""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of convolutions; auto: channels_last on a CPU if the model gives the same
    results with it, else contiguous.
    """
    portable: bool = False
    """Use CPU kernels that give the same bits on every x86-64 processor with AVX2; slower."""
    only: tuple[str, ...] = ()
    """Glob patterns of tensor names in the model's state dict: only these are trained and sent;
    modules without any stay in evaluation mode. []: all.
    """
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """torch threads per client. [threads]"""
    pack: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Train this many clients of a process together as one, which is faster for small models on a
    GPU. Results differ in rounding from pack 1, and in what dropout draws; they are reproducible.
    [clients]
    """
    graphs: bool = False
    """On a GPU, replay steps of plain SGD as CUDA graphs, which is faster if a step is short. It
    needs a constant learning rate and no momentum; other steps are computed as without it. Not
    with pack.
    """

    def changed(self, own: ClientTrainSection) -> TrainSection:
        """The section with a client's own values. Its own epochs replace the run's steps too."""
        given = {key: getattr(own, key) for key in own.__struct_fields__}
        given = {key: value for key, value in given.items() if value is not None}
        if "epochs" in given:
            given.setdefault("steps", None)
        return msgspec.structs.replace(self, per_client={}, **given)

    def lr_at(self, round: int, rounds: int) -> float:
        """The local learning rate of a round, from 1."""
        assert self.lr is not None  # reading a configuration fills it in
        return learning_rate_at(self.schedule, self.lr, round, rounds)


class EvaluateSection(Section, frozen=True, kw_only=True):
    """Which models are evaluated, on which data, and how often."""

    every: Count = 1
    """Evaluate every this many rounds, and after the last; 0: never. [rounds]"""
    global_: bool = msgspec.field(default=True, name="global")
    """Evaluate the global model on the server's test set."""
    clients: Literal["auto", "all", "none"] = "auto"
    """Clients that evaluate the global and their personal model on their test split: auto: the
    participants in each round, all at the end; all: all each time; none.
    """
    most: AtLeast1 | None = 1000
    """With more clients than this, an evaluation of all clients uses a fixed random sample of this
    size, and only methods with personal models evaluate the clients' last local models; null:
    always all. [clients]
    """
    finetune: bool = False
    """At the end also evaluate personal models after `train.epochs` more local epochs."""
    held_out: Below1 = 0.0
    """Share of the clients that never train, rounded up. They are drawn from the seed, evaluate the
    models whenever all clients do, and are recorded apart. [share]
    """
    shared: Literal["latest", "last_seen"] = "latest"
    """Shared part (FedRep) or prototypes (FedProto) that a client's own part is evaluated with:
    latest: the server's newest, as in the authors' code; last_seen: those of its last
    participation. Participants that evaluate during a round have only the latter.
    """
    batch_size: AtLeast1 = 512
    """Samples per batch in evaluation. [samples]"""
    metrics: tuple[str, ...] = ()
    """Further metrics of each evaluation, such as [f1_macro, auc]; `fednet list metrics`."""


class LostSection(Section, frozen=True, kw_only=True):
    """When a client counts as lost. Its task then goes to another process that runs the same
    client, or the round goes on without it.
    """

    closed: Literal["auto"] | NonNegative | None = "auto"
    """A client whose connection closed counts as lost after this time; null: never, or after
    `silent` if another process also runs the client; auto: 3 s, or 60 s for fednet-server at an
    address beyond loopback. [s]
    """
    silent: Literal["auto"] | Positive | None = "auto"
    """A client counts as lost after this time without a heartbeat, or bytes of a long message;
    null: never; auto: 10 s, or 300 s for fednet-server at an address beyond loopback. [s]
    """
    beat: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] | None = None
    """Interval of a client's heartbeat; null: half of `closed` or a quarter of `silent`, at most
    2 s, so 1.5 s by default; more with very many clients; 30 s for fednet-server at an address
    beyond loopback, or less if these are shorter. A client that hears nothing from the server for
    8 beats reconnects. [s]
    """

    def closed_s(self, over_network: bool = False) -> float | None:
        """Seconds; None: for ever. over_network: clients connect over more than loopback."""
        if self.closed == "auto":
            return 60.0 if over_network else 3.0
        return self.closed

    def silent_s(self, over_network: bool = False) -> float | None:
        """The same, of a client without a heartbeat."""
        if self.silent == "auto":
            return 300.0 if over_network else 10.0
        return self.silent

    def beat_most_s(self, over_network: bool = False) -> float:
        """The longest interval between two heartbeats that is chosen for few clients."""
        return 30.0 if over_network else 2.0


class ScheduleSection(Section, frozen=True, kw_only=True):
    """Synchronous rounds or asynchronous training. In asynchronous training a round is the time
    between two updates, and `participation` says how many clients train at a time.
    """

    mode: Literal["sync", "semi-sync", "async"] = "sync"
    """sync: rounds that wait for their clients; async: an update after every `buffer` replies;
    semi-sync: an update every `every` seconds. fedasync, fedbuff and ca2fl are async by default.
    """
    buffer: AtLeast1 | None = None
    """async: replies K per update; null: half of the clients that train at a time. [clients]"""
    every: Annotated[float, msgspec.Meta(ge=0.001), Carried] | None = None
    """semi-sync: time between two updates. [s]"""


class RoundSection(Section, frozen=True, kw_only=True):
    """When a round starts, when it closes, and when it is discarded."""

    deadline: Annotated[Positive, Carried] | None = None
    """Time that a client has for a task after it was sent, or after its turn came in a process that
    does several; null: wait for all that are alive. [s]
    """
    min_results: AtLeast1 = 1
    """A round with fewer replies is discarded. [clients]"""
    ask: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """Over-selection: select this many times the cohort and use the first replies, as many as the
    cohort. [times]
    """
    lost: LostSection = LostSection()
    start: Literal["all"] | AtLeast1 = "all"
    """Clients that must have joined before round 1. [clients]"""
    join: Literal["auto"] | Positive | None = "auto"
    """A client that has not joined this long after the server's start counts as lost; null: wait
    for it, after round 1 only if fewer than `min_results` clients are there; auto: 60 s, for
    fednet-server null before round 1 and while fewer than `min_results` clients are there. [s]
    """
    open: AtLeast1 | None = None
    """fednet-server: clients may join while it runs, until there are this many; null: none.
    [clients]
    """
    gone: dict[str, AtLeast2] = {}
    """Clients that do not come back, by ids, and the first round without them: `{"3,7": 12}`. From
    then on they are neither selected nor evaluated. A resumed run may add some. [round]
    """
    void_rounds: Literal["auto"] | AtLeast1 = "auto"
    """This many discarded rounds in a row end the run; auto: 3, or 100 for fednet-server at an
    address beyond loopback. Rounds of secure aggregation in which enough clients answered, and one
    sent something wrong under its masks, do not count. [rounds]
    """
    on_error: Literal["stop", "drop"] = "drop"
    """If a client's task fails or its reply is unusable: drop: the round continues without the
    client; stop: the run ends.
    """
    state_lost: Literal["stop", "restart"] = "stop"
    """If a client has lost the state that its task starts from, for example after the server was
    restored from a backup: stop: the run ends and names what is missing (fednet-server: only if
    more than half of the cohort lacks it, else these are dropped); restart: the client starts as
    one that never took part, and results differ.
    """
    max_share: Literal["auto"] | Taken | None = "auto"
    """Largest weight of one client in a mean by samples; null: no bound; auto: 0.5 if sites bring
    their own data and at least three replied, else no bound. With sites' data it also bounds the
    weight in mean accuracies. [share]
    """

    def void_limit(self, over_network: bool = False) -> int:
        """How many discarded rounds in a row end the run. over_network: clients connect over more
        than loopback.
        """
        if self.void_rounds == "auto":
            return 100 if over_network else 3
        return self.void_rounds

    def join_s(self, external_clients: bool = False) -> float | None:
        """Seconds; None: for ever. external_clients: others start them, and none has come yet."""
        if self.join == "auto":
            return None if external_clients else JOIN_S
        return self.join


class StopSection(Section, frozen=True, kw_only=True):
    """What ends a run before its last round."""

    accuracy: Taken | None = None
    """Stop at this accuracy of the global model, or of the clients' models if there is no global
    one. [share]
    """
    megabytes: Positive | None = None
    """Stop after this traffic, both directions. [10^6 bytes]"""
    seconds: Positive | None = None
    """Stop after this time on the run's clock. [s]"""
    patience: AtLeast1 | None = None
    """Stop when `stop.metric` has not improved for this many rounds. [rounds]"""
    metric: str = "accuracy"
    """What the best model is best in: accuracy, validation_accuracy, test_loss, or one of
    evaluate.metrics. As for accuracy: of the global model, or of the clients' models if there is no
    global one.
    """


class CheckpointSection(Section, frozen=True, kw_only=True):
    """Checkpoints, from which `--resume` continues."""

    every: AtLeast1 = 1
    """Rounds between two checkpoints; a crash loses at most this many. [rounds]"""
    best: bool = True
    """Also keep the model with the best `stop.metric`, as best.safetensors."""
    fsync: bool = False
    """Force files to disk, so that they survive a power loss."""


class RecordSection(Section, frozen=True, kw_only=True):
    """How much of a run is recorded. Less makes its directory smaller and changes no result."""

    clients: Literal["each", "last"] = "each"
    """Lines of clients.jsonl: each: one per client and evaluation; last: those of the last
    evaluation alone.
    """
    tensors: bool = True
    """Record the SHA-256 of each tensor per round, by which `fednet verify` names the first that
    differs; false: only that of the whole model.
    """


class WireSection(Section, frozen=True, kw_only=True):
    """Compressors in their order, by the kind of payload they apply to: `{delta: [topk(0.01),
    qsgd(8)]}`.
    """

    up: dict[str, tuple[str, ...]] = {}
    """Compressors from clients to the server; `fednet list compressors`."""
    down: dict[str, tuple[str, ...]] = {}
    """Compressors from the server to clients."""


class SecuritySection(Section, frozen=True, kw_only=True):
    """Who may connect, and which updates are refused."""

    curve: bool = False
    """Encrypt and authenticate connections with CURVE keys."""
    keys: str | None = None
    """Folder of the server's keys; null: --keys; `fednet run` then makes keys for the run."""
    max_norm: Literal["auto"] | Positive | None = "auto"
    """Updates with a larger Euclidean norm are refused; null: no bound; auto: those a thousand
    times larger than the shared model and than most replies of the round.
    """


class SecaggSection(Section, frozen=True, kw_only=True):
    """Secure aggregation: the server sees the sum of a round's updates, and no single one."""

    protocol: Literal["none", "secagg", "secagg+"] = "none"
    """secagg: pairwise masks (Bonawitz et al., CCS 2017); secagg+: masks on a random graph (Bell et
    al., CCS 2020).
    """
    threshold: Annotated[float, msgspec.Meta(gt=0.5, le=1)] = 0.66
    """Share of the cohort that must answer each step; with fewer the round is discarded. [share]"""
    neighbours: Annotated[int, msgspec.Meta(ge=2)] = 20
    """secagg+: clients that each client shares secrets with; odd numbers are rounded down. More
    dropouts need more: of 200 clients, 20 for a tenth lost, 80 for three tenths. [clients]
    """
    bits: Annotated[int, msgspec.Meta(ge=2, le=32)] = 24
    """Bits per entry of an update in fixed point, with sign. [bits]"""
    clip: Positive = 1.0
    """Entries of an update are cut off at plus or minus this value."""
    counts: Literal["open", "masked"] = "open"
    """open: the server sees each client's sample count and loss; masked: only the sum of the
    counts.
    """
    max_samples: AtLeast1 | None = None
    """Upper bound of a client's sample count as its weight; null: that of the largest client, if
    known. [samples]
    """


class PrivacySection(Section, frozen=True, kw_only=True):
    """Differential privacy (DP-FedAvg): updates are clipped, then noised, then compressed."""

    clip: Positive | None = None
    """Clipping bound S of an update's Euclidean norm; null: no clipping."""
    noise: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    """Noise multiplier z: the Gaussian noise has standard deviation z times `clip`; 0, or at least
    1e-6.
    """
    where: Literal["server", "client"] = "server"
    """server: noise is added to the sum; client: each client adds its part to its update."""
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 1e-5
    """delta of the (epsilon, delta) guarantee that the accountant reports."""
    secagg: SecaggSection = SecaggSection()


class Config(Section, frozen=True, kw_only=True):
    """A whole run. `fednet.config.load` and `from_mapping` make it, checked; `to_mapping` writes it
    back.
    """

    name: RunName = ""
    """Name of the run's directory, below --out; without it the method and the dataset, such as
    fedavg-digits.
    """
    load: tuple[str, ...] = ()
    """Python files with your own parts, relative to this file; as --load."""
    seed: int = 0
    """Seed of every random draw."""
    rounds: AtLeast1 = 20
    """Number of rounds T. [rounds]"""
    clients: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)] = 10
    """Number of clients N in the federation. [clients]"""
    participation: Taken | None = 0.5
    """Share C of the clients that is selected per round, uniformly without replacement unless
    `selection` says otherwise; at least one client. [share]
    """
    clients_per_round: AtLeast1 | None = None
    """Number m of clients selected per round, instead of `participation`. [clients]"""
    selection: SelectionSection = SelectionSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    model: ModelSection = ModelSection()
    task: str = "classification"
    """What the model's outputs mean: gives the loss and the metric; `fednet list tasks`."""
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    round: RoundSection = RoundSection()
    schedule: ScheduleSection = ScheduleSection()
    stop: StopSection = StopSection()
    checkpoint: CheckpointSection = CheckpointSection()
    record: RecordSection = RecordSection()
    wire: WireSection = WireSection()
    link: LinkSection = LinkSection()
    availability: AvailabilitySection = AvailabilitySection()
    devices: DevicesSection = DevicesSection()
    faults: FaultsSection = FaultsSection()
    aggregation: AggregationSection = AggregationSection()
    security: SecuritySection = SecuritySection()
    privacy: PrivacySection = PrivacySection()
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """Trackers that get each round's metrics, in local files in the run's directory."""
    report: bool = True
    """Write report.html at the end."""

    @property
    def training_clients(self) -> int:
        """How many clients may train: N less those that are held out (`evaluate.held_out`)."""
        return self.clients - held_out_count(self.evaluate.held_out, self.clients)

    @property
    def cohort_size(self) -> int:
        """m = max(1, floor(C * N + 0.5)): clients selected per round, without `round.ask`. N: those
        that may train.
        """
        if self.clients_per_round is not None:
            return self.clients_per_round
        assert self.participation is not None
        return max(1, math.floor(self.participation * self.training_clients + 0.5))

    @property
    def buffer(self) -> int | None:
        """Replies per update in asynchronous training; None in the other modes."""
        if self.schedule.mode != "async":
            return None
        return self.schedule.buffer or max(1, self.cohort_size // 2)

    @property
    def asked(self) -> int:
        """Clients selected per round, if that many are available."""
        if self.round.ask is None:
            return self.cohort_size
        return math.ceil(min(self.round.ask * self.cohort_size - 1e-9, self.training_clients))

    @property
    def first(self) -> int | None:
        """Replies that close a round; None: those of all selected clients."""
        return self.cohort_size if self.round.ask is not None else None

    def train_of(self, client: int) -> TrainSection:
        """The local training of a client: `train`, with its own values from `train.per_client`."""
        if not self.train.per_client:
            return self.train
        own = ids.own(self.train.per_client, client, self.clients)
        return self.train if own is None else self.train.changed(own)

    def replace(self, **changes: object) -> Config:
        """This configuration with some sections changed, unchecked."""
        return msgspec.structs.replace(self, **changes)


def held_out_count(share: float, clients: int) -> int:
    """Returns how many clients never train, by `evaluate.held_out`: ceil(share * N)."""
    return math.ceil(share * clients - 1e-9)


def is_struct(kind: object) -> bool:
    """Returns whether a type, as in an annotation, is a Struct."""
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, msgspec.Struct)


def every_key(
    kind: type[msgspec.Struct] = Config, above: str = "", entries: bool = True
) -> Iterator[tuple[str, type[msgspec.Struct], msgspec.structs.FieldInfo]]:
    """Yields each key's path, section and field, in the order of the sections. entries: also the
    keys of a mapping's and of a list's entries, with `IDS` and `[i]` in their paths, and those of a
    section that may be null.
    """
    for field in msgspec.structs.fields(kind):
        if field.name == "options":
            continue
        path = above + field.encode_name
        yield path, kind, field
        many = {tuple: "[i]", dict: ".IDS"}.get(get_origin(field.type), "")
        for inner in (field.type, *(get_args(field.type) if entries else ())):
            if is_struct(inner):
                yield from every_key(inner, f"{path}{many}.", entries)


@functools.cache
def homes() -> dict[str, list[str]]:
    """The full paths of each key: {'lr': ['train.lr'], ...}."""
    found: dict[str, list[str]] = {}
    for path, _, field in every_key(entries=False):
        found.setdefault(field.encode_name, []).append(path)
    return found

"""The sections about what is learned, from which data and how."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from fednet.config.types import AtLeast1, Below1, Count, NonNegative, Positive, Schedule, Section
from fednet.options import call
from fednet.plain import JsonDict

# Keys that say where the data come from, and nothing of what is computed.
WHERE = ("data.root", "data.download")


class AlgorithmSection(Section, frozen=True, kw_only=True):
    """The method. Its hyper-parameters stand beside `name`: `fednet list keys algorithm`."""

    name: str = "fedavg"
    """A registered algorithm; its own options: `fednet list keys algorithm`.
    [-; experiment/build]"""
    options: JsonDict = {}


class AdaptersSection(Section, frozen=True, kw_only=True):
    """Adapters of low rank (LoRA, arXiv:2106.09685): they are trained, and the layers' own weights
    are not, unless `train.only` names them.
    """

    rank: AtLeast1 = 8
    """r, the rows of A and the columns of B. [-; models/adapters]"""
    alpha: Positive = 8.0
    """B A counts alpha / rank times. [-; models/adapters]"""
    target: tuple[str, ...] = ("*",)
    """Glob patterns of the names of Linear and Conv2d layers. [-; models/adapters]"""
    weights: str | None = None
    """A folder that every site has, of adapters to start from as the package peft, or a run, has
    written them; null: A from the seed, B zero. [-; models/adapters]"""


class ModelSection(Section, frozen=True, kw_only=True):
    """The model. Its options stand beside `name`: `fednet list keys model`."""

    name: str = "lenet5"
    """A registered model; its own options: `fednet list keys model`. [-; models/__init__]"""
    buffers: Literal["average", "local", "server"] = "average"
    """What becomes of BatchNorm statistics: averaged with the model, each client's own, or the
    server's, which no client changes. [-; wire/codec]"""
    weights: str | None = None
    """A .safetensors file that every site has, or the server (`base`), to start from; null:
    initialised by the seed. [-; models/__init__]"""
    base: Literal["sites", "server"] = "sites"
    """Who has the model that training starts from: each site makes it, from `weights` or the seed
    (and is refused where something is frozen and it is not the server's); or the server alone,
    which sends it to each client once. [-; models/start]"""
    sha256: str | None = None
    """Of that model, by which sites know it; null: the server says it. [-; models/start]"""
    adapters: AdaptersSection | None = None
    """Low-rank adapters on the model's layers; null: none. [-; models/adapters]"""
    trainable: str = "*"
    """As `train.only` of parameters alone, separated by commas, as fednet 0.1 knew it: all buffers
    cross. [-; models/trained]"""
    clients: str | None = None
    """Who has this model, where `others` name others: ids such as 0-4,7; null: who is left.
    [-; config/parts]"""
    others: tuple[JsonDict, ...] = ()
    """Models of other clients, each with name, clients and its own options, for methods whose
    messages do not depend on the model; `model:` as a list is short for it. [-; config/parts]"""
    options: JsonDict = {}


class PartitionSection(Section, frozen=True, kw_only=True):
    """Who holds what. The scheme's options stand beside it: `fednet list keys data.partition`."""

    scheme: str = "dirichlet"
    """A registered partitioner; its own options: `fednet list keys data.partition`.
    [-; data/division]"""
    seed: int | None = None
    """Of every draw of the division, in place of the run's; null: the run's. [-; data/division]"""
    options: JsonDict = {}


class PublicSection(Section, frozen=True, kw_only=True):
    """Held out of the training pool for the server; one of the two."""

    samples: Count = 0
    """In all, the same number of each class. [samples; data/division]"""
    fraction: Below1 = 0.0
    """A share of the pool, in its class proportions. [share; data/division]"""


SITE = "site"
"""The dataset that each client brings."""

DIVIDES = (
    "partition",
    "validation",
    "public",
    "client_test",
    "baseline_pool",
    "feature_noise",
)
"""Keys of `data` that say how a run divides its data; none has a meaning where sites bring their
own.
"""


class DataSection(Section, frozen=True, kw_only=True):
    """The data. The dataset's options stand beside `dataset`: `fednet list keys data`."""

    dataset: str = "digits"
    """A registered dataset; site: each client brings its own. Its options:
    `fednet list keys data`. [-; data/loading]"""
    root: str | None = None
    """Where the files lie; null: $FEDNET_DATA, else the user's cache. [-; data/loading]"""
    download: bool = False
    """Fetch what is missing, where the dataset can. [-; data/loading]"""
    augment: Literal["none", "flip", "crop_flip", "crop_reflect_flip"] = "none"
    """What is done at random to images of a training batch. [-; data/augment]"""
    normalise: bool = True
    """uint8 inputs less the dataset's mean, divided by its standard deviation; false: only scaled
    to 0..1. [-; data/loading]"""
    feature_noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise in the last client's inputs, growing from 0 at the first
    (feature skew; in units of 0..1 for uint8 images); in its own test split too, and not in the
    server's test set. [-; data/division]"""
    partition: PartitionSection = PartitionSection()
    validation: Below1 = 0.0
    """Of the training pool, kept for choosing hyper-parameters. [share; data/division]"""
    client_test: Literal["like_train", "merge_split", "none"] = "like_train"
    """A client's own test split: the test set cut in its class proportions, or a part of its own
    samples, or none. [-; data/division]"""
    public: PublicSection = PublicSection()
    baseline_pool: Literal["same", "full"] = "same"
    """Whether methods without a public set train on the reduced pool too. [-; data/division]"""
    options: JsonDict = {}


class TrainSection(Section, frozen=True, kw_only=True):
    """Local training."""

    epochs: AtLeast1 = 1
    """Passes over the client's samples. [epochs; training/loop]"""
    steps: AtLeast1 | None = None
    """SGD steps instead of epochs. [steps; training/loop]"""
    batch_size: AtLeast1 = 64
    """Of each step. [samples; training/loop]"""
    last_batch: Literal["auto", "keep", "drop", "merge"] = "auto"
    """What becomes of an epoch's last batch where it is smaller than the others: keep it; drop it,
    as PFLlib does; merge it with the one before; auto: keep it, but where the model has BatchNorm
    drop one of one or two samples, whose variance would spoil the running statistics. (A client
    whose only batch it is trains on it all the same.) [-; training/loop]"""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Begun anew in every task; a method that assumes SGD refuses another.
    [-; training/optimizers]"""
    lr: Positive = 0.01
    """The learning rate of the first round; see `schedule`. [-; config/learning]"""
    momentum: Below1 = 0.0
    """Of SGD. [-; training/loop]"""
    weight_decay: NonNegative = 0.0
    """Added to the gradient, times the weights (adamw: decoupled). [-; training/loop]"""
    schedule: Schedule = "constant"
    """How the learning rate goes on over the rounds. [-; config/learning]"""
    clip_norm: Positive | None = None
    """A gradient of a larger Euclidean norm is scaled down to it. [-; training/loop]"""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """What the kernels compute in; bf16 and fp16 by autocast. [-; training/loop]"""
    memory_format: Literal["auto", "contiguous", "channels_last"] = "auto"
    """How the kernels of convolutions lie in memory; auto: channels_last on a CPU where the model
    works so (with `x.view(-1, n)` after a convolution it does not) and as exactly (with GroupNorm
    it does not), contiguous else.
    [-; training/scratch]"""
    portable: bool = False
    """The CPU's kernels that compute the same bits on every x86-64 processor with AVX2; slower than
    its own. [-; experiment/determinism]"""
    only: tuple[str, ...] = ()
    """Glob patterns of names in the model's state dict: only these tensors are trained and cross;
    modules without any stand still (eval mode, their buffers as they were). []: all.
    [-; models/trained]"""
    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Of torch, for each client. [threads; client/preparing]"""
    pack: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """So many clients of one process are trained as one, which many small models on a GPU gain by;
    other bits than each by itself, the same each time. 1: each by itself.
    [clients; client/packing]"""

    @property
    def depends_on_rounds(self) -> bool:
        """Whether a round's rate depends on how many rounds the run has."""
        return call(self.schedule)[0] == "cosine"

    def lr_at(self, round: int, rounds: int) -> float:
        """The local learning rate of a round (from 1): constant; cosine: lr * (1 + cos(pi (t-1)/T))
        / 2; exponential(g): lr * g^(t-1); step(k, g): lr * g^floor((t-1)/k).
        """
        name, given = call(self.schedule)
        numbers = [float(x) for x in given]
        if name == "cosine":
            return self.lr * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
        if name == "exponential":
            return float(self.lr * numbers[0] ** (round - 1))
        if name == "step":
            return float(self.lr * numbers[1] ** ((round - 1) // int(numbers[0])))
        return self.lr


class EvaluateSection(Section, frozen=True, kw_only=True):
    """Who is judged, on what, and how often."""

    every: Count = 1
    """0: never; else the run's last round is judged too. [rounds; server/round]"""
    global_: bool = msgspec.field(default=True, name="global")
    """Judge the global model on the server's test set. [-; server/judging]"""
    clients: Literal["auto", "all", "none"] = "auto"
    """Whose global and personal model is judged on its own test split; auto: participants within
    their task, all at the end. [-; server/asking]"""
    most: AtLeast1 | None = 1000
    """Where there are more clients, an evaluation of all asks so many, drawn once from the seed;
    null: all. [clients; experiment/judging]"""
    finetune: bool = False
    """Personal models are judged after `train.epochs` more local epochs too, at the end.
    [-; client/judging]"""
    shared: Literal["latest", "last_seen"] = "latest"
    """Where a method shares a part of the model (FedRep) or class prototypes (FedProto), which of
    them a client's own part is evaluated with: the server's newest (as FedRep's, LG-FedAvg's and
    FedProto's authors do, and PFLlib), or that of the client's last participation. Participants
    evaluated within their task have only the latter. [-; client/judging]"""
    keep_local: Literal["auto", "always", "never"] = "auto"
    """Whether each client keeps its last local model, whole, to be judged by; auto: of methods with
    personal models, and of all methods where there are no more clients than `most`.
    [-; experiment/judging]"""
    batch_size: AtLeast1 = 512
    """Of evaluation. [samples; training/hosts]"""

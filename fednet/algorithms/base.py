"""The interface of a method.

A method declares the states of both sides (`Server`, `Client`), the messages between them (`Down`,
`Up`), and a few functions of these values. `self` has the configuration and no state: one function
makes the checkpoints of all methods. The client's functions can use the client's state, the message
that it got and its `host`, and nothing else.

A round, for each exchange in `exchanges`:

    server: broadcast(server, phase, client_id) -> Down; the same object is encoded once
    client: client_update(phase, client, down, host) -> next client state, Up
    server: init_accumulator(server, phase)          -> Accumulator
            accumulate(accumulator, ...)             -> Accumulator; per reply, in ascending id
            server_update(accumulator, ...)          -> next server state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import isfunction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import msgspec
import numpy as np
import torch
from torch import nn

from fednet.algorithms.returned import RETURNS, first
from fednet.algorithms.state import Empty, PerClient, State
from fednet.config.schema import ClientTrainSection
from fednet.errors import ConfigError, unknown
from fednet.loading import check_returns
from fednet.registry import algorithm
from fednet.tensors import Inputs, Layout, Sum, Tensors, TwoSums, blockwise, mean
from fednet.training.hosts import ClientHost, ServerHost
from fednet.training.loop import Loss, Trained
from fednet.training.tasks import LearningTask
from fednet.wire.payload import (
    TENSORS,
    Accuracy,
    Condensed,
    Control,
    Delta,
    LocalRun,
    Nothing,
    Payload,
    Samples,
    Scalar,
    Shared,
    Statistics,
    Weights,
    kind,
)

if TYPE_CHECKING:
    from fednet.config import Config
    from fednet.records.manifest import Candidate

# Keys of `train` that a method may forbid: see `Algorithm.forbids`.
FORBIDDEN = (*ClientTrainSection.__struct_fields__, "keep_optimizer", "local_schedule")

# What a method's file imports, in one line: `from fednet.algorithms.base import *`.
__all__ = [
    "Accuracy",
    "Algorithm",
    "AlgorithmConfig",
    "ClientFacts",
    "ClientHost",
    "Condensed",
    "Control",
    "Count",
    "Delta",
    "Empty",
    "Exchange",
    "Fraction",
    "Inputs",
    "Layout",
    "LearningTask",
    "LocalRun",
    "Loss",
    "NonNegative",
    "Nothing",
    "Payload",
    "PerClient",
    "Positive",
    "Samples",
    "Scalar",
    "ServerHost",
    "Shared",
    "State",
    "Statistics",
    "Sum",
    "Tensors",
    "Trained",
    "TwoSums",
    "WeightedConfig",
    "Weighting",
    "Weights",
    "algorithm",
    "blockwise",
    "kind",
    "mean",
]

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Weighting = Literal["samples", "uniform"]

# A method's functions get values of the classes that the method itself declares. These are narrower
# than State and Payload; the types of arguments of an overridden function may not be.
OwnState = Any  # `Server`, `Client` or `Accumulator`: see above
OwnPayload = Any  # `Down`, `Up` or `Enrolment`: see above
OwnConfig = Any  # `Config`: see above


class AlgorithmConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The hyper-parameters of a method, with the paper's names and defaults. The string below each
    describes it, with its symbol.
    """


class WeightedConfig(AlgorithmConfig):
    """Those of a method whose mean may be weighted in two ways."""

    weighting: Weighting = "samples"
    """Weights of the clients' models or updates in the mean: samples: by their numbers of training
    samples; uniform: all the same.
    """


@dataclass(frozen=True, slots=True)
class Plain:
    """The replies of an exchange are added up as they are."""

    known: ClassVar[bool] = True
    trains: ClassVar[bool] = True
    bound: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Masked:
    """An exchange of secure aggregation: the server learns the sum of the replies alone."""

    known: ClassVar[bool] = False
    """Whether the server can tell what a single reply gives."""
    trains: bool
    """Whether the clients train in it, and keep what they trained; else they talk of masks."""
    bound: bool
    """Whether it needs values of the exchange before it, which only the client's process has."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A message to each client and its reply. `label` names the exchange in records."""

    down: type[Payload]
    up: type[Payload]
    label: str = "train"
    summation: Plain | Masked = Plain()


@dataclass(frozen=True, slots=True)
class ClientFacts:
    """The facts of a client that the partition gives, for predicting message sizes."""

    n: int
    """Training samples."""
    class_counts: Sequence[int]
    """(C,) training samples by class."""
    sample_nbytes: int
    """Bytes of one raw sample, without its label."""
    input_shape: tuple[int, ...]
    """Of one model input."""
    public_n: int
    """Samples of the server's public pool."""
    features: int = 0
    """Width of what the model's head gets."""


class Algorithm:
    """Base of methods: defaults for what most of them share. One level of inheritance, no state on
    self.
    """

    paper: ClassVar[str] = ""
    part: ClassVar[str] = "w"  # the name, in tables, of the part of the model that `shared` returns
    weighting: ClassVar[str] = "samples"  # of a method without an option of that name
    personalised: ClassVar[bool] = False
    has_global: ClassVar[bool] = True
    sgd_only: ClassVar[bool] = False  # refuses another optimizer than SGD
    momentum_free: ClassVar[bool] = False  # refuses local momentum
    # Keys of `train` that its equations do not allow, and why: keys of `per_client`, which have to
    # be the same for all clients, and `keep_optimizer` and `local_schedule`.
    forbids: ClassVar[Mapping[str, str]] = {}
    classes_only: ClassVar[bool] = False  # its own loss is about classes, whatever the task's is
    needs_public: ClassVar[bool] = False  # an error without a public set
    # What is held out for the server is for this method (see data.baseline_pool).
    uses_public: ClassVar[bool] = False
    # The accumulator is a sum of updates: clipping and noise may be applied to it. If `summed`
    # declares one sum, `weighted`, and there is one exchange, this and `asynchronous` are True
    # unless the method says otherwise.
    sums_updates: ClassVar[bool] = False
    # The fields of Up that are summed, each `weighted` by `weight(run)`, or `plain`. Accumulator
    # has a Sum of the same name for each, and nothing else. `accumulate` sums them by default, and
    # secure aggregation needs this declaration.
    summed: ClassVar[Mapping[str, str]] = {}
    # The exchange in which clients are evaluated; a client that completes it has taken part.
    main: ClassVar[int] = -1
    selects: ClassVar[bool] = False  # whether it defines `select`; found out
    architecture_free: ClassVar[bool] = False  # no message depends on the model
    asynchronous: ClassVar[bool] = False  # a reply may answer an older model than the server's
    # The schedule of a method that has no rounds, if the configuration has no `schedule.mode`. Such
    # a method refuses `sync` and itself weighs stale replies; for others FedBuff's rule does
    # (`staleness`).
    own_schedule: ClassVar[Mapping[str, str | int]] = {}

    class Config(AlgorithmConfig):
        pass

    class Down(Payload):
        x: Weights

    class Up(Payload):
        x: Weights
        run: Statistics

    class Server(State):
        x: Tensors

    Client: type[State] = Empty

    class Accumulator(State):
        x: Sum

    exchanges: tuple[Exchange, ...] = ()
    Enrolment: type[Payload] | None = None
    # The field of Server that is the shared model: declared `Weights`, or the only one declared
    # `Tensors`; None for a method that has none.
    model_field: ClassVar[str | None] = "x"
    # Fields that Server, the main exchange's Down and Client all declare, with the same name: they
    # are shared by the clients beside a model. Client keeps the values that it got; with
    # `evaluate.shared: latest` a client is evaluated with the server's newest ones.
    shared_state: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: AlgorithmConfig | None = None, clients: int = 1) -> None:
        self.config: OwnConfig = self.Config() if config is None else config
        self.clients = clients  # N

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "exchanges" not in cls.__dict__:
            cls.exchanges = (Exchange(cls.Down, cls.Up),)
        if "summed" in cls.__dict__:
            mean = len(cls.exchanges) == 1 and [*cls.summed.values()] == ["weighted"]
            cls.sums_updates = cls.__dict__.get("sums_updates", mean)
            cls.asynchronous = cls.__dict__.get("asynchronous", mean)
        cls.asynchronous = cls.asynchronous or bool(cls.own_schedule)
        if "Server" in cls.__dict__:
            hints = get_type_hints(cls.Server, include_extras=True)
            models = [n for n, hint in hints.items() if hint == Weights]
            models = models or [n for n, hint in hints.items() if hint is Tensors]
            if len(models) > 1:
                raise ConfigError(
                    f"{cls.Server.__qualname__}: {' and '.join(models)} may each be the shared "
                    f"model; declare it alone as Weights, and other tensors as Tensors."
                )
            cls.model_field = next(iter(models), None)
        cls.uses_public = cls.uses_public or cls.needs_public
        cls.selects = cls.select is not Algorithm.select
        # A mistyped function would never be called: the method would train without it.
        steps = [name for name, step in vars(Algorithm).items() if isfunction(step)]
        for name, own in vars(cls).items():
            if not isfunction(own) or name in steps:
                continue
            meant = get_close_matches(name, steps, n=1, cutoff=0.85)
            if meant:
                raise ConfigError(
                    f"{cls.__name__}.{name}: fednet calls no function of that name. Did you mean "
                    f"{meant[0]}? If it is one of your own, choose another name."
                )
        for key in cls.forbids:
            if key not in FORBIDDEN:
                raise ConfigError(f"{cls.__name__}.forbids: {unknown('key', key, FORBIDDEN)}")
        for name in cls.shared_state:
            for record in (cls.Server, cls.exchanges[cls.main].down, cls.Client):
                if name not in {field.name for field in fields(record)}:
                    raise ConfigError(
                        f"{cls.__name__}.shared_state names {name}, which {record.__qualname__} "
                        f"does not declare; Server, Down and Client all need a field of that name."
                    )
        check_returns(cls, RETURNS)

    @property
    def main_exchange(self) -> int:
        """The number, from 0, of the exchange that `main` names."""
        return self.main % len(self.exchanges)

    @property
    def only_sums(self) -> bool:
        """Whether clients keep nothing, and the server does nothing but what it does by default:
        adding replies up, and taking their mean.
        """
        own = type(self)
        default = (own.accumulate, own.server_update) == (
            Algorithm.accumulate,
            Algorithm.server_update,
        )
        return default and not fields(own.Client)

    def refusal(self, run: Config) -> tuple[str, str] | None:
        """Returns (key, sentence) if this method cannot do what the configuration asks for; the
        run is refused before it starts. run: the whole configuration.
        """
        return None

    # -- what crosses ------------------------------------------------------------------------------
    def shared(self, layout: Layout, module: nn.Module) -> Layout:
        """Returns the part of the model that is sent; each client keeps the rest as its own."""
        return layout

    def sizes(self, payload: type[Payload], client: ClientFacts) -> dict[str, int]:
        """Returns the exact bytes of the fields whose size the declaration does not give (samples,
        arrays), for this client.
        """
        return {}

    # -- state -------------------------------------------------------------------------------------
    def init_server(self, x: Tensors) -> State:
        """Returns the server's first state. x: the shared part of the initial model. Default: x;
        other fields declared Tensors are zeros shaped like its parameters, PerClient is empty.
        """
        values: dict[str, object] = {}
        for name, declared in get_type_hints(self.Server).items():
            if name == self.model_field:
                values[name] = x
            elif declared is Tensors:
                values[name] = x.params.zeros_like()
            elif declared is PerClient:
                values[name] = PerClient(x.params.layout)
        return first(self.Server, "init_server", **values)

    def prepare(self, server: OwnState, host: ServerHost) -> State:
        """Returns the server's state to start from. Called once, before round 1, and not again
        after a resume.
        """
        return server

    def with_more_clients(self, server: OwnState, before: int, now: int) -> State:
        """Returns the server's state after clients have joined the run, of which `before` could
        train until now. A state that holds a mean over all N clients has to be divided by the new
        N. Raises ConfigError if no client can join. Default: the same state.
        """
        return server

    def init_client(self, x: Tensors) -> State:
        """Returns a client's first state; called at its first participation. x: the whole initial
        model.
        """
        return first(self.Client, "init_client")

    def enroll(self, server: OwnState, client_id: int, host: ServerHost) -> Payload | None:
        """Returns the payload that a client gets once, with its first task; by default None."""
        return None

    def receive_enrolment(self, client: OwnState, payload: OwnPayload, host: ClientHost) -> State:
        """Returns the client's state after it got the payload of `enroll`."""
        return client

    # -- a round -----------------------------------------------------------------------------------
    def select(
        self,
        server: OwnState,
        round: int,
        available: Sequence[Candidate],
        asked: int,
        rng: np.random.Generator,
    ) -> Sequence[int]:
        """Returns the ids of the clients to select for a round: 1 to `asked` of those that are
        available, which come in ascending order. Draws from `rng`, which is the same for the same
        round. Default: drawn at random; without a rule of its own it is not called, and the
        configuration says who is selected.
        """
        return [available[i].id for i in rng.permutation(len(available))[:asked]]

    def broadcast(self, server: OwnState, phase: int, client_id: int) -> Payload:
        """Returns the message to this client. phase: the index in `exchanges`. The same object for
        several clients is encoded once. Default: the shared model, and for each other field of Down
        the server's of that name.
        """
        values = {name: getattr(server, name) for name in self.Down.fields if hasattr(server, name)}
        if (model := self.Down.weights_field) is not None:
            values[model] = self.shared_model(server)
        return first(self.Down, "broadcast", **values)

    def client_update(
        self, phase: int, client: OwnState, down: OwnPayload, host: ClientHost
    ) -> tuple[State, Payload]:
        """Does the client's work: returns (its next state, its reply). client: its state before,
        which it keeps if the reply does not count. Default: local training from the model that came
        down, which the reply has as its only weights.
        """
        y = host.train(getattr(down, self._field(down.weights_field, "Down")))
        x = self._field(self.Up.weights_field, "Up")
        run = self._field(self.Up.run_field, "Up")
        return client, first(self.Up, "client_update", **{x: y.x, run: y.run})

    def outputs(self, module: nn.Module, x: Inputs) -> torch.Tensor:
        """Returns the model's outputs for inputs x, computed as the local loss computes them. Tried
        on a batch before the run starts.
        """
        return module(x)

    def init_accumulator(self, server: OwnState, phase: int) -> State:
        """Returns the empty accumulator of an exchange. Default: each field declared Sum or TwoSums
        is empty, and the others have the values of their declaration.
        """
        kinds = get_type_hints(self.Accumulator)
        sums = {name: kind.empty() for name, kind in kinds.items() if kind in (Sum, TwoSums)}
        return first(self.Accumulator, "init_accumulator", **sums)

    def accumulate(
        self,
        accumulator: OwnState,
        server: OwnState,
        client_id: int,
        up: OwnPayload,
        host: ServerHost,
    ) -> State:
        """Returns the accumulator with one more reply; called in ascending client id. Default: the
        sums that `summed` declares; without it, the sum x of the weights in the replies, weighted
        by samples unless `weighting: uniform`.
        """
        return self.add_all(accumulator, [up])

    @property
    def adds_alike(self) -> bool:
        """Whether replies may be added by `add_all`: it leaves `accumulate` as it is."""
        return type(self).accumulate is Algorithm.accumulate

    def add_all(self, accumulator: OwnState, ups: Sequence[OwnPayload]) -> State:
        """Returns the accumulator with these replies, of one exchange and so of one kind, as the
        default of `accumulate` adds each.
        """
        kind = type(ups[0])
        run = self._field(kind.run_field, "Up")
        weights = [self.weight(getattr(up, run)) for up in ups]
        if not self.summed:
            name = self._field(kind.weights_field, "Up")
            values = [getattr(up, name) for up in ups]
            return accumulator.replace(x=accumulator.x.add_all(list(zip(values, weights))))
        sums = {}
        for name, how in self.summed.items():
            own = weights if how == "weighted" else [1.0] * len(ups)
            values = [getattr(up, name) for up in ups]
            sums[name] = getattr(accumulator, name).add_all(list(zip(values, own)))
        return accumulator.replace(**sums)

    def server_update(
        self, accumulator: OwnState, server: OwnState, cohort: Sequence[int], host: ServerHost
    ) -> State:
        """Returns the server's next state; between exchanges this includes all that the next
        exchange needs. cohort: the clients whose replies were accumulated. Default: the mean of the
        replies is the shared model.
        """
        if type(self).server_update is Algorithm.server_update:  # nobody asks for the sum again
            return self.with_model(server, accumulator.x.spend())
        return self.with_model(server, accumulator.x.mean())

    def weight(self, run: LocalRun) -> float:
        """Returns the weight of a reply in a mean: its samples n_i, or 1."""
        uniform = getattr(self.config, "weighting", self.weighting) == "uniform"
        return 1.0 if uniform else float(run.n)

    def weights(self, server: OwnState, runs: Mapping[int, LocalRun]) -> dict[int, float]:
        """Returns the weight that each reply had in the round that led to this state, by client."""
        return {i: self.weight(run) for i, run in runs.items()}

    # -- what tables say of the method, from its declarations --------------------------------------
    def sends(self) -> tuple[str, str]:
        """Returns (down, up): the values that a client gets and sends in a round, such as ("|w| +
        p", "2|w|"); in brackets those that it gets once, with its first task.
        """
        down = _contents_of([exchange.down for exchange in self.exchanges], self.part)
        up = _contents_of([exchange.up for exchange in self.exchanges], self.part)
        if self.Enrolment is not None:
            down += f" (once: {_contents_of([self.Enrolment], self.part)})"
        return down, up

    def keeps(self) -> tuple[str, str]:
        """Returns (server, client): the fields that each keeps between rounds; "-" for none."""
        server = [self.part if f.name == self.model_field else f.name for f in fields(self.Server)]
        client = [f.name for f in fields(self.Client)]
        return ", ".join(server) or "-", ", ".join(client) or "-"

    # -- what is evaluated -------------------------------------------------------------------------
    def global_model(self, server: OwnState) -> Tensors | None:
        """Returns the model that is evaluated; None if there is no complete global model."""
        return self.shared_model(server) if self.has_global else None

    # -- the shared model --------------------------------------------------------------------------
    def shared_model(self, server: OwnState) -> Tensors | None:
        """Returns the model, or its shared part, from the server's state; None if it has none."""
        return None if self.model_field is None else getattr(server, self.model_field)

    def with_model(self, server: OwnState, x: Tensors) -> State:
        """Returns the server's state with this shared model."""
        return server.replace(**{self._field(self.model_field, "Server"): x})

    def _field(self, name: str | None, where: str) -> str:
        """Returns the name of a field that a default of this class needs; raises ConfigError if
        there is none.
        """
        if name is None:
            raise ConfigError(
                f"{type(self).__name__}.{where} declares no field that the defaults of Algorithm "
                f"could use; declare one, or write this method yourself."
            )
        return name

    @classmethod
    def shares(cls) -> bool:
        """Whether a round sends a model, or a part of one, that all clients share."""
        return any(
            field.form == "tensors" and field.kind == "state"
            for exchange in cls.exchanges
            for field in exchange.down.fields.values()
        )

    def shared_part(self, server: OwnState) -> Tensors | None:
        """Returns the global model, or the shared part of the model: a run writes it to a file, and
        clients are evaluated with it and their own part. None for a method that shares nothing.
        """
        if self.has_global:
            return self.global_model(server)
        return self.shared_model(server) if self.shares() else None

    def with_latest(self, client: OwnState, newest: OwnState | OwnPayload) -> State:
        """Returns the client's state with the `shared_state` of `newest`."""
        return client.replace(**{name: getattr(newest, name) for name in self.shared_state})

    def personal_model(
        self, client: OwnState, local: Tensors, host: ClientHost
    ) -> Tensors | Callable[[Inputs], torch.Tensor]:
        """Returns the client's model to evaluate: weights, or a function from inputs to outputs.
        Default: its last local model. For a function, `beside` has to return its tensors.
        """
        return local

    def beside(self, client: OwnState) -> Mapping[str, torch.Tensor]:
        """Returns the tensors, by name, that a client's personal predictor needs beside the local
        model; they are written with it to `personal/`.
        """
        return {}


def _contents_of(payloads: Sequence[type[Payload]], part: str) -> str:
    """Describes the contents of these payloads: |part| for each field of tensors, and the names of
    the others but the training's counts; "0" for none.
    """
    declared = [item for payload in payloads for item in payload.fields.items()]
    tensors = sum(field.form in TENSORS for _, field in declared)
    others = [n for n, field in declared if field.form not in (*TENSORS, "run")]
    listed = list(dict.fromkeys(others))
    if tensors:
        many = str(tensors) if tensors > 1 else ""
        listed.insert(0, f"{many}|{part}|")
    return " + ".join(listed) or "0"

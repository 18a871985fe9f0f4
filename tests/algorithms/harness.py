"""A federation in memory: any method run through its functions alone, without wire, engine or
files.

    fed = Federation(clients=4)
    states = fed.run("scaffold", rounds=3)    # of the server; states[0] is the first
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch

from fednet import models, registry, seeds
from fednet.algorithms.state import dump, load
from fednet.config import (
    AlgorithmSection,
    Config,
    EvaluateSection,
    ModelSection,
    TrainSection,
)
from fednet.data.base import Data
from fednet.tensors import Layout, Slot, Tensors
from fednet.training.hosts import ClientHost, ServerHost
from fednet.training.scratch import Scratch
from fednet.training.setting import Setting, Splits
from fednet.wire.payload import LocalRun as Statistics


def images(
    n: int = 200,
    classes: int = 5,
    shape: tuple[int, ...] = (1, 16, 16),
    seed: int = 1,
    y: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """n random images, each its class's pattern under noise: separable, so that accuracies mean
    something. y: their classes.
    """
    draw = seeds.rng(seed, "test images")
    if y is None:
        y = draw.integers(0, classes, n)
    patterns = draw.standard_normal((classes, *shape))
    x = patterns[y] + draw.standard_normal((len(y), *shape))
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


@dataclass
class Federation:
    """parts: indices of each client's samples; default: cut unevenly (33, 44, 56, 67 of 200 for
    four).
    """

    clients: int = 4
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "mlp", "hidden": [16]})
    train: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[torch.Tensor, torch.Tensor] | None = None
    classes: int = 5
    parts: Sequence[Any] | None = None
    public: int = 40  # samples of the server's own
    seed: int = 0
    rounds: int = 3
    normalise: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = (
        None  # of the public samples
    )

    def __post_init__(self) -> None:
        self.x, self.y = images(classes=self.classes) if self.data is None else self.data
        if self.parts is None:
            shares = np.arange(1, self.clients + 1) / self.clients
            ends = (len(self.y) * (0.55 * shares + 0.45 * shares**2)).round().astype(int)
            self.parts = [np.arange(a, b) for a, b in zip([0, *ends], ends)]

    # -- what every run of this federation shares --------------------------------------------------
    @property
    def config(self) -> Config:
        defaults = {"epochs": 1, "batch_size": 16, "lr": 0.1}
        return Config(
            seed=self.seed,
            rounds=self.rounds,
            clients=self.clients,
            algorithm=AlgorithmSection(),
            model=ModelSection(name=self.model["name"]),
            train=TrainSection(**{**defaults, **self.train}),
            evaluate=EvaluateSection(),
        )

    def build(self, seed: int) -> torch.nn.Module:
        return models.build(self.model, tuple(self.x.shape[1:]), self.classes, seed)

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.build(self.seed))

    @cached_property
    def initial(self) -> Tensors:
        return Tensors.of(self.build(self.seed), self.layout)

    @cached_property
    def public_data(self) -> Data | None:
        if not self.public:
            return None
        x, y = images(self.public, self.classes, tuple(self.x.shape[1:]), seed=2)
        return Data(train=(x, y), classes=self.classes)

    def samples(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.as_tensor(np.asarray(self.parts[client], dtype=np.int64))
        return self.x[index], self.y[index]

    def setting(self, algorithm: Any) -> Setting:
        module = self.build(self.seed)
        return Setting(
            layout=self.layout,
            shared=algorithm.shared(self.layout, module),
            head=models.head_names(module),
            initial=self.initial,
            config=self.config,
            task=registry.task.get("classification")(),
            classes=self.classes,
            factory=self.build,
            features=models.head_width(module),
            normalise=self.normalise,
        )

    def make(self, name: str, **options: Any) -> Any:
        kind = registry.algorithm.get(name)
        return kind(msgspec.convert(options, kind.Config), clients=self.clients)

    def run(
        self,
        name: str,
        *,
        cohorts: Sequence[Sequence[int]] | None = None,
        saved: bool = False,
        **options: Any,
    ) -> Run:
        """Runs `rounds` rounds. cohorts: ids by round; default all. saved: the states of both sides
        go through dump and load on their way, as in a run that is killed and resumed after each
        step.
        """
        run = Run(self, self.make(name, **options), saved)
        for t in range(self.rounds):
            run.round(range(self.clients) if cohorts is None else cohorts[t])
        return run


@dataclass
class Run:
    """One run. servers: the server's state after each round, the initial one first. clients: states
    by id. locals, ups, downs: of the last round, by client, the last exchange's; every exchange's
    are in `trips`.
    """

    federation: Federation
    algorithm: Any
    saved: bool = False

    def __post_init__(self) -> None:
        fed = self.federation
        algorithm = self.algorithm
        self.setting = fed.setting(algorithm)
        # Initialised otherwise: a task must overwrite all of it.
        self.scratch = Scratch(lambda: fed.build(99), fed.layout)
        self.io = ServerHost(
            self.setting,
            lambda: Scratch(lambda: fed.build(98), fed.layout),
            fed.clients,
            fed.public_data,
        )
        self.servers = [
            algorithm.prepare(
                algorithm.init_server(fed.initial.select(self.setting.shared)), self.io
            )
        ]
        self.enrolments: dict[int, Any] = {}
        self.clients: dict[int, Any] = {}
        self.locals: dict[int, Tensors] = {}
        self.reports: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.trips: list[dict[int, tuple[Any, Any]]] = []
        self.hosts: dict[int, ClientHost] = {}  # of the last round

    @property
    def server(self) -> Any:
        return self.servers[-1]

    @property
    def downs(self) -> dict[int, Any]:
        return {client: down for client, (down, _) in self.trips[-1].items()}

    @property
    def x(self) -> Tensors:
        return self.servers[-1].x

    @property
    def ups(self) -> dict[int, Any]:
        return {client: up for client, (_, up) in self.trips[-1].items()}

    def site(self, client: int, phase: int = 0, round: int | None = None) -> ClientHost:
        data = self.federation.samples(client)
        t = len(self.servers) if round is None else round
        return ClientHost(self.setting, self.scratch, client, t, phase, splits=Splits(data, data))

    def round(self, cohort: Sequence[int], lost: Sequence[int] = ()) -> Any:
        """One round of `cohort`. lost: clients whose last upload is dropped, and whose state is not
        committed.
        """
        algorithm = self.algorithm
        server = self.servers[-1]
        t = len(self.servers)
        self.trips = []
        for phase, exchange in enumerate(algorithm.exchanges):
            self.io.begin(t, phase, sorted(cohort))
            fold = algorithm.init_accumulator(server, phase)
            trip: dict[int, tuple[Any, Any]] = {}
            for client in sorted(cohort):
                host = self.hosts[client] = self.site(client, phase, t)
                state = self.clients.get(client)
                if state is None:
                    state = algorithm.init_client(self.federation.initial)
                    enrolment = self.enrolments[client] = algorithm.enroll(server, client, self.io)
                    if enrolment is not None:
                        state = algorithm.receive_enrolment(state, enrolment, host)
                down = algorithm.broadcast(server, phase, client)
                assert type(down) is exchange.down
                state, up = algorithm.client_update(phase, state, down, host)
                assert type(up) is exchange.up
                if host.trained is not None:
                    self.locals[client] = host.trained
                if phase == len(algorithm.exchanges) - 1 and client in lost:
                    continue
                self.clients[client] = self._keep(state)
                trip[client] = (down, up)
                fold = algorithm.accumulate(fold, server, client, up, self.io)
            server = self._keep(algorithm.server_update(fold, server, sorted(trip), self.io))
            self.trips.append(trip)
        self.reports.append(dict(self.io.reported))
        self.warnings += self.io.warnings
        self.servers.append(server)
        return server

    def rounds(self, n: int, cohort: Sequence[int] | None = None) -> Run:
        for _ in range(n):
            self.round(range(self.federation.clients) if cohort is None else cohort)
        return self

    def host(self, client: int) -> ClientHost:
        """A new host of the client in the round that ended last."""
        return self.site(client, round=max(1, len(self.servers) - 1))

    def personal(self, client: int) -> Any:
        state = self.clients[client]
        local = self.locals[client]
        return self.algorithm.personal_model(state, local, self.host(client))

    def _keep(self, state: Any) -> Any:
        if not self.saved:
            return state
        tree, tensors = dump(state)
        return load(type(state), tree, {name: t.clone() for name, t in tensors.items()})


CLASSES = 4
SIZES = (50, 34, 24, 42)


def begun(
    name: str,
    *,
    labels: Sequence[np.ndarray] | None = None,
    train: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    normalise: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = None,
    **options: Any,
) -> Run:
    """A run that goes on by `rounds`, over a net of three layers. labels: by client the classes of
    its samples, of CLASSES; default: SIZES samples, unequally. Options of the method go by keyword.
    """
    if labels is None:
        draw = seeds.rng(3, "labels")
        labels = [
            np.concatenate([np.arange(CLASSES), draw.choice(CLASSES, n - CLASSES, p=np.roll(p, i))])
            for i, (n, p) in enumerate((n, [0.6, 0.2, 0.1, 0.1]) for n in SIZES)
        ]
    ends = np.cumsum([0, *map(len, labels)])
    federation = Federation(
        clients=len(labels),
        model=model or {"name": "mlp", "hidden": [16, 8]},
        train={"epochs": 2, **(train or {})},
        data=images(classes=CLASSES, y=np.concatenate(labels)),
        classes=CLASSES,
        parts=[np.arange(a, b) for a, b in itertools.pairwise(ends)],
        normalise=normalise,
        rounds=10,
    )
    return Run(federation, federation.make(name, **options))


def same(a: Tensors, b: Tensors) -> bool:
    """Equal to the bit, buffers and counters too."""
    return all(
        torch.equal(getattr(a, part), getattr(b, part))
        for part in ("vector", "buffers", "counters")
    )


def close(a: Tensors, b: Tensors, tolerance: float = 1e-6) -> bool:
    """||a - b|| <= tolerance * ||b||, and buffers alike."""
    buffers = torch.allclose(a.buffers, b.buffers, rtol=tolerance, atol=tolerance)
    return buffers and (a - b).norm() <= tolerance * max(b.norm(), 1e-12)


# -- the server's half alone, on numbers that fit in the head --------------------------------------
def vector(*values: float, buffers: Sequence[float] = ()) -> Tensors:
    """A model of one parameter tensor `w` (and one buffer `b`)."""
    slots = [Slot("w", (len(values),), "parameter")] + (
        [Slot("b", (len(buffers),), "buffer")] if buffers else []
    )
    return Tensors(
        Layout(tuple(slots)),
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(list(buffers), dtype=torch.float32),
        torch.zeros(0, dtype=torch.int64),
    )


class Desk:
    """A server host for such models. lr: eta_l; lr_decay: since round 1."""

    def __init__(
        self, clients: int, lr: float = 1.0, lr_decay: float = 1.0, momentum: float = 0.0
    ) -> None:
        self.clients = clients
        self.lr = lr
        self.lr_decay = lr_decay
        self.momentum = momentum
        self.phase = 0
        self.round = 1
        self.staleness = 0
        self.reported: dict[str, Any] = {}
        self.warnings: list[str] = []

    def report(self, **values: Any) -> None:
        self.reported.update(values)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def serve(algorithm: Any, server: Any, ups: Mapping[int, Any], host: Desk) -> Any:
    """The server's next state, after these replies."""
    fold = algorithm.init_accumulator(server, host.phase)
    for client in sorted(ups):
        fold = algorithm.accumulate(fold, server, client, ups[client], host)
    return algorithm.server_update(fold, server, sorted(ups), host)


def reply(algorithm: Any, n: int = 1, steps: int = 1, **fields: Any) -> Any:
    """A client's reply. fields: numbers, or lists of them, for parameters."""
    values = {}
    for name, value in fields.items():
        tensors = algorithm.Up.fields[name].form in ("tensors", "parameters")
        numbers = value if isinstance(value, (list, tuple)) else [value]
        values[name] = vector(*numbers) if tensors else value
    return algorithm.Up(**values, run=Statistics(n, steps, 0.0))

"""A federation small enough for a unit test: random images, a small net, every message kept to be looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fednet import registry, seeds
from fednet.algorithms.hosts import HubHost, Setting, SiteHost
from fednet.algorithms.scratch import Scratch
from fednet.tensors import Layout, Tensors

CLASSES = 4
SIZES = (50, 34, 24, 42)


class Task:
    """Classification, as far as these tests need it."""

    @staticmethod
    def loss(outputs, y):
        return F.cross_entropy(outputs, y)

    @staticmethod
    def losses(outputs, y):
        return F.cross_entropy(outputs, y, reduction="none")

    @staticmethod
    def counts(outputs, y):
        right = outputs.argmax(1) == y
        return torch.stack([torch.bincount(y[right], minlength=outputs.shape[1]), torch.bincount(y, minlength=outputs.shape[1])])


class Net(nn.Module):
    """conv (with BatchNorm on request), two Linear layers: the last three are what the methods split at."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(3 * 9, 8)
        self.head = nn.Linear(8, CLASSES)

    def features(self, x):
        return F.relu(self.fc1(F.avg_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1)))

    def forward(self, x):
        return self.head(self.features(x))


class Projected(Net):
    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__(batch_norm)
        self.projector = nn.Linear(8, 8)

    def encode(self, x):
        return super().features(x)

    def projection(self, x):
        return self.projector(self.encode(x))

    def features(self, x):
        return self.projection(x)


def build(seed: int, kind: type[nn.Module] = Net, **options: Any) -> nn.Module:
    with seeds.scope(seed, "init"):
        return kind(**options)


def images(rng: np.random.Generator, y: np.ndarray) -> torch.Tensor:
    """(n, 1, 8, 8) uint8: noise about a level of each class, so that there is something to learn."""
    noise = rng.integers(0, 120, (len(y), 1, 8, 8))
    return torch.from_numpy((noise + 30 * y[:, None, None, None]).astype(np.uint8))


def normalise(x: torch.Tensor) -> torch.Tensor:
    return x.float() / 255 - 0.5


class Federation:
    """`name`'s method over four clients. Options of the method go by keyword; `train` changes the run's train section.

    labels: per client the classes of its samples (default: SIZES samples, all classes unequally). After a round,
    `downs`, `ups` and `locals` hold by client what crossed and the whole local models.
    """

    def __init__(self, name: str, *, train: dict[str, Any] | None = None, labels: list[np.ndarray] | None = None,
                 public: int = 40, kind: type[nn.Module] = Net, batch_norm: bool = False, seed: int = 3, **options: Any) -> None:
        defaults = dict(epochs=2, steps=None, batch_size=16, optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0,
                        schedule="constant", clip_norm=None, precision="fp32")
        self.config = SimpleNamespace(seed=seed, rounds=10, train=SimpleNamespace(**{**defaults, **(train or {})}),
                                      evaluate=SimpleNamespace(batch_size=512))
        rng = seeds.rng(seed, "test data")
        if labels is None:
            labels = [np.concatenate([np.arange(CLASSES), rng.choice(CLASSES, n - CLASSES, p=np.roll([0.6, 0.2, 0.1, 0.1], i))])
                      for i, n in enumerate(SIZES)]
        self.raw = [(images(rng, y), torch.from_numpy(y).long()) for y in labels]
        y = np.arange(public) % CLASSES
        shown = (images(rng, y), torch.from_numpy(y).long())
        self.public = SimpleNamespace(train=shown, inputs=normalise) if public else None

        self.model = build(seed, kind, batch_norm=batch_norm)
        part = registry.algorithm.get(name)
        self.method = part(msgspec.convert(options, part.Config), clients=len(labels))
        layout = Layout.of(self.model)
        initial = Tensors.of(self.model, layout)
        head = ("head.weight", "head.bias")
        self.setting = Setting(layout=layout, shared=self.method.shared(layout, self.model), head=head, initial=initial,
                               config=self.config, task=Task, classes=CLASSES, normalise=normalise,
                               factory=lambda s: build(s, kind, batch_norm=batch_norm))
        self.scratch = Scratch(build(seed, kind, batch_norm=batch_norm), layout)
        self.hub = HubHost(self.setting, Scratch(build(seed, kind, batch_norm=batch_norm), layout), len(labels), self.public)
        self.server = self.method.prepare(self.method.init_server(initial.select(self.setting.shared)), self.hub)
        self.clients: dict[int, Any] = {}
        self.enrolments: dict[int, Any] = {}
        self.n_rounds = 0

    def host(self, client: int) -> SiteHost:
        x, y = self.raw[client]
        return SiteHost(self.setting, self.scratch, client, max(1, self.n_rounds), train=(normalise(x), y))

    def round(self, cohort: tuple[int, ...] = (0, 1, 2, 3)) -> Federation:
        self.n_rounds += 1
        self.hub.begin(self.n_rounds, 0, cohort)
        method, self.downs, self.ups, self.locals, self.said = self.method, {}, {}, {}, {}
        before = self.server
        fold = method.start(before, 0)
        for i in cohort:
            host = self.host(i)
            if i not in self.clients:
                self.clients[i] = method.init_client(self.setting.initial)
                self.enrolments[i] = method.enroll(before, i, self.hub)
                if self.enrolments[i] is not None:
                    self.clients[i] = method.enrolled(self.clients[i], self.enrolments[i], host)
            self.downs[i] = method.broadcast(before, 0, i)
            self.clients[i], self.ups[i] = method.local(0, self.clients[i], self.downs[i], host)
            self.locals[i], self.said[i] = host.trained, host.reported
            fold = method.fold(fold, before, i, self.ups[i], self.hub)
        self.server = method.finish(fold, before, cohort, self.hub)
        return self

    def rounds(self, n: int, cohort: tuple[int, ...] = (0, 1, 2, 3)) -> Federation:
        for _ in range(n):
            self.round(cohort)
        return self

    def personal(self, client: int) -> Any:
        return self.method.personal(self.clients[client], self.locals[client], self.host(client))


def same(a: Tensors, b: Tensors) -> bool:
    """Equal to the bit, buffers too."""
    return a.sha256() == b.sha256()


def distance(a: Tensors, b: Tensors) -> float:
    """Largest relative difference of the parameters, to the largest of b."""
    return float((a.vector - b.vector).abs().max() / b.vector.abs().max())

"""One method over four clients with raw images and a net of three layers: what tests of a single
method look at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fednet import seeds
from fednet.data import Data
from fednet.tensors import Tensors
from tests.algorithms import harness
from tests.algorithms.harness import same

__all__ = [
    "CLASSES",
    "SIZES",
    "Federation",
    "Net",
    "Projected",
    "batch",
    "build",
    "distance",
    "normalise",
    "same",
]

CLASSES = 4
SIZES = (50, 34, 24, 42)


class Net(nn.Module):
    """conv (with BatchNorm on request) and two Linear layers."""

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
    """The same with a projection before the head."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__(batch_norm)
        self.projector = nn.Linear(8, 8)

    def features(self, x):
        return self.projector(super().features(x))


def build(seed: int, kind: type[nn.Module] = Net, **options: Any) -> nn.Module:
    with seeds.scope(seed, "init"):
        return kind(**options)


def images(rng: np.random.Generator, y: np.ndarray) -> torch.Tensor:
    """(n, 1, 8, 8) uint8: noise about a level of each class, so that there is something to
    learn.
    """
    noise = rng.integers(0, 120, (len(y), 1, 8, 8))
    return torch.from_numpy((noise + 30 * y[:, None, None, None]).astype(np.uint8))


def normalise(x: torch.Tensor) -> torch.Tensor:
    return (x.float() / 255 - 0.5) / 0.5


def batch(classes: tuple[int, ...] = (0, 1, 2, 3), n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Model inputs and their classes."""
    rng = seeds.rng(1, "batch")
    y = rng.choice(classes, n)
    return normalise(images(rng, y)), torch.from_numpy(y)


@dataclasses.dataclass
class Small(harness.Federation):
    kind: type[nn.Module] = Net
    batch_norm: bool = False

    def build(self, seed: int) -> nn.Module:
        return build(seed, self.kind, batch_norm=self.batch_norm)

    @property
    def public_data(self) -> Data | None:
        y = np.arange(self.public) % CLASSES
        shown = images(seeds.rng(self.seed, "public"), y), torch.from_numpy(y)
        return Data(train=shown, classes=CLASSES, mean=(0.5,), std=(0.5,)) if self.public else None

    def setting(self, algorithm: Any) -> Any:
        return dataclasses.replace(super().setting(algorithm), normalise=normalise)


class Federation(harness.Run):
    """A run of the method `name` that goes round by round. Options of the method go by keyword;
    `train` changes the run's train section. labels: by client the classes of its samples (default:
    SIZES samples, classes unequally).
    """

    def __init__(
        self,
        name: str,
        *,
        train: dict[str, Any] | None = None,
        labels: list[np.ndarray] | None = None,
        public: int = 40,
        kind: type[nn.Module] = Net,
        batch_norm: bool = False,
        seed: int = 3,
        **options: Any,
    ) -> None:
        rng = seeds.rng(seed, "test data")
        if labels is None:
            rest = (
                rng.choice(CLASSES, n - CLASSES, p=np.roll([0.6, 0.2, 0.1, 0.1], i))
                for i, n in enumerate(SIZES)
            )
            labels = [np.concatenate([np.arange(CLASSES), y]) for y in rest]
        ends = np.cumsum([len(y) for y in labels])
        y = np.concatenate(labels)
        parts = [np.arange(a, b) for a, b in zip([0, *ends], ends)]
        federation = Small(
            clients=len(labels),
            model={"name": "small"},
            train={"epochs": 2, **(train or {})},
            data=(normalise(images(rng, y)), torch.from_numpy(y)),
            classes=CLASSES,
            parts=parts,
            public=public,
            seed=seed,
            rounds=10,
            kind=kind,
            batch_norm=batch_norm,
        )
        self.hosts: dict[int, Any] = {}
        super().__init__(federation, federation.make(name, **options))

    def site(self, client: int, phase: int = 0, round: int | None = None) -> Any:
        host = super().site(client, phase, round)
        if round == len(self.servers):  # the round that is being run
            self.hosts[client] = host
        return host

    def rounds(self, n: int, cohort: tuple[int, ...] = (0, 1, 2, 3)) -> Federation:
        for _ in range(n):
            self.round(cohort)
        return self

    @property
    def server(self) -> Any:
        return self.servers[-1]

    @property
    def downs(self) -> dict[int, Any]:
        return {client: down for client, (down, _) in self.trips[-1].items()}

    @property
    def said(self) -> dict[int, dict[str, float]]:
        """What the clients reported in the last round."""
        return {client: host.reported for client, host in self.hosts.items()}

    def host(self, client: int) -> Any:
        """The client's host in the round that ended last."""
        return self.site(client, round=max(1, len(self.servers) - 1))

    def personal(self, client: int) -> Any:
        return self.algorithm.personal_model(
            self.clients[client], self.locals[client], self.host(client)
        )


def distance(a: Tensors, b: Tensors) -> float:
    """Largest difference of the parameters, relative to the largest of b."""
    return float((a.vector - b.vector).abs().max() / b.vector.abs().max())

"""A method recomputed from its paper, in float64 and plain PyTorch, beside fednet's own.

Batches are whole local sets, so that no order of samples matters; a model is one flat vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.algorithms.harness import Federation

LR = 0.1


def whole_batches(**changes: Any) -> Federation:
    """A federation whose local epochs are one step each, on all of a client's samples."""
    train = {"batch_size": 1000, "lr": LR, **changes.pop("train", {})}
    return Federation(train=train, **changes)


class Reference:
    """The model and the data of a federation, in float64."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.module = federation.build(federation.seed).double()
        self.start = parameters_to_vector(self.module.parameters()).detach()

    def samples(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.federation.samples(client)
        return x.double(), y

    def load(self, w: torch.Tensor) -> torch.nn.Module:
        vector_to_parameters(w, self.module.parameters())
        return self.module

    def gradient(
        self, w: torch.Tensor, client: int, loss: Callable[..., torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Of the client's mean loss at w; loss(module, x, y): cross-entropy if not given."""
        module = self.load(w)
        x, y = self.samples(client)
        value = F.cross_entropy(module(x), y) if loss is None else loss(module, x, y)
        return parameters_to_vector(torch.autograd.grad(value, list(module.parameters()))).detach()

    def loss(self, w: torch.Tensor, client: int) -> float:
        x, y = self.samples(client)
        with torch.no_grad():
            return float(F.cross_entropy(self.load(w)(x), y))

    def descend(
        self,
        w: torch.Tensor,
        client: int,
        steps: int,
        momentum: float = 0.0,
        change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda g, w: g,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """SGD from w; change(gradient, w): the gradient that is stepped along."""
        velocity = torch.zeros_like(w)
        for _ in range(steps):
            velocity = momentum * velocity + change(self.gradient(w, client, loss), w)
            w = w - LR * velocity
        return w


def agrees(found: Any, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether fednet's float32 parameters are the reference's, relative to their length."""
    return float((found.vector.double() - wanted).norm()) <= tolerance * float(wanted.norm())


def averaged(federation: Federation, local: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The model after the federation's rounds of FedAvg with this local training:
    local(reference, w, client).
    """
    reference = Reference(federation)
    w = reference.start
    sizes = [len(part) for part in federation.parts or ()]
    for _ in range(federation.rounds):
        trained = [local(reference, w, client) for client in range(federation.clients)]
        w = sum(n * y for n, y in zip(sizes, trained)) / sum(sizes)
    return w

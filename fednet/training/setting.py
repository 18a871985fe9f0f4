"""The constants of a run that both sides share: configuration, model layout, task."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fednet import seeds
from fednet.config import Config
from fednet.tensors import Inputs, Layout, Tensors, map_inputs, to_device
from fednet.training.tasks import LearningTask
from fednet.wire.payload import Samples

if TYPE_CHECKING:
    from fednet.secagg import SecureClient, Terms

Pair = tuple[Inputs, torch.Tensor]
"""(x, y): model inputs and targets."""


@dataclass(frozen=True)
class Splits:
    """The samples of one client that are in memory already. A `data.federation.Site` has the same
    fields, and makes the pairs when they are used.
    """

    train: Pair
    test: Pair

    @property
    def n(self) -> int:
        return len(self.train[1])


class SecureMachines(Protocol):
    """Keeps the secure-aggregation machines of a site's clients during a round."""

    def machine(
        self, terms: Terms, round_number: int, client: int, fresh: bool
    ) -> SecureClient: ...

    def leaves(self, client: int, round_number: int, vector: bytes) -> None: ...


@dataclass(frozen=True, eq=False)
class Setting:
    """The constants of a run."""

    layout: Layout
    """Of the whole model."""
    shared: Layout
    """Of the part of the model that is sent."""
    head: tuple[str, ...]
    """Names of the last Linear's tensors."""
    initial: Tensors
    """The whole model as initialised."""
    config: Config
    """The run's configuration."""
    task: LearningTask
    classes: int
    factory: Callable[[int], nn.Module]
    """factory(seed): a module freshly initialised from that seed."""
    counts_width: int = 1
    """C of what the task counts, (2, C)."""
    more: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of the counts that `evaluate.metrics` need, by name."""
    normalise: Callable[[Inputs, torch.device], Inputs] | None = None
    """Makes model inputs of raw samples (`Data.inputs`)."""
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None
    """augment(x, generator): the function that `data.augment` names."""
    features: int = 0
    """Width of the head's input; 0 without a linear head."""
    input_shape: tuple[int, ...] = ()
    """Of one sample."""
    batch_norm: bool = False
    """Whether the model has BatchNorm that is trained."""
    convolutions: bool = True
    """Whether it may have convolutions of images; without any, no module is made to try it."""
    built: nn.Module | None = None
    """The module as it was initialised, of a model that is the same when it is copied: to copy it
    takes a fifth of the time that it takes to draw its values again. Its parameters may lie in
    `initial`; nobody changes it.
    """

    def module(self) -> nn.Module:
        """Returns a new module of the model, as it was initialised."""
        if self.built is None:
            return self.factory(self.config.seed)
        return copy.deepcopy(self.built)

    def borrowed(self) -> nn.Module:
        """Returns the same for one who does not write to its parameters, but may put others in
        their places: these are not copied.
        """
        if self.built is None:
            return self.module()
        # (Of `p.detach()` torch counts changes together with those of p, in all threads.)
        given = {id(p): nn.Parameter(p.data, p.requires_grad) for p in self.built.parameters()}
        return copy.deepcopy(self.built, dict(given))

    @functools.cached_property
    def blank(self) -> nn.Module:
        """A module to inspect, and to fill with values that are written to a file."""
        return self.module()

    @functools.cached_property
    def innermost(self) -> bool:
        """Whether the model has convolutions, and computes correctly with their channels innermost.
        Many models do not: they have `x.view(-1, n)` after a convolution. With GroupNorm, torch
        computes its variance on a CPU as the mean square minus the square of the mean, which loses
        digits.
        """
        if not self.convolutions:
            return False
        made = self.borrowed().eval()
        parts = list(made.modules())
        if any(isinstance(part, nn.GroupNorm) for part in parts):
            return False
        if len(self.input_shape) != 3:
            return True
        last = torch.channels_last
        one = torch.zeros(1, *self.input_shape).to(memory_format=last)
        with torch.no_grad(), seeds.scope(self.config.seed, "trial"):
            try:
                made.to(memory_format=last)(one)
            except Exception:  # a user's own model may raise anything; the trial reports it
                return False
        return True

    def lr(self, round: int) -> float:
        """Returns the local learning rate of a round, from 1."""
        return float(self.config.train.lr_at(round, self.config.rounds))

    def inputs(self, samples: Samples, device: torch.device) -> Pair:
        """Returns raw samples as model inputs (x, y) on `device`."""
        if self.normalise is None:
            return move_inputs(samples.x, device), samples.y.to(device)
        return self.normalise(samples.x, device), samples.y.to(device)


def move_inputs(x: Inputs, device: torch.device) -> Inputs:
    return map_inputs(x, lambda part: to_device(part, device))

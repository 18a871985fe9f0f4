"""The one loop of stochastic gradient descent, with hooks: LT(w, loss, E, B)
of the methods' pseudo-code.

Nothing in it waits for the device before the end of the training: the loss is summed where it is
computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors
from fednet.training.correction import NEUTRAL, Correction, Hooks
from fednet.training.graphs import Captured, Replay, kept, usable
from fednet.training.innermost import laid
from fednet.training.optimizers import optimizer
from fednet.training.samples import batches, length, piece, take
from fednet.training.scratch import Scratch
from fednet.wire.payload import Run

if TYPE_CHECKING:
    from fednet.config.schema import TrainSection

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """What `host.train` returns. x: the local model after training; run: n_i, K_i, mean loss;
    extra: as given, trained.
    """

    x: Tensors
    run: Run
    extra: Tensors | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to descend. steps: so many optimizer steps instead of epochs. clip_norm: of the raw
    gradient, L2.
    """

    lr: float
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    # fp32 | tf32 (a switch of the device's, set elsewhere) | bf16 | fp16: autocast
    precision: str = "fp32"

    @classmethod
    def of(
        cls, train: TrainSection, lr: float, epochs: int | None = None, steps: int | None = None
    ) -> Recipe:
        """The run's; with other epochs or steps where they are given."""
        return cls(
            lr=lr,
            epochs=train.epochs if epochs is None else epochs,
            steps=train.steps if epochs is None and steps is None else steps,
            batch_size=train.batch_size,
            optimizer=train.optimizer,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
            precision=train.precision,
        )


@dataclass(frozen=True, slots=True)
class Course:
    """What a descent was. steps: optimizer steps; loss: mean over the samples of all steps (0 if
    there were none).
    """

    steps: int
    loss: float
    extra: Tensors | None = None


@dataclass(eq=False)
class Descent:
    """One training, from what `scratch` holds. data: samples (x, y), in batches of the order that
    `order` draws. train_mode: else the model is in eval mode. progress(step, steps): called after
    each optimizer step; what it raises ends the training. graphs: see `train.graphs`.
    """

    scratch: Scratch
    data: tuple[Inputs, torch.Tensor]
    recipe: Recipe
    order: np.random.Generator
    hooks: Hooks = NEUTRAL
    train_mode: bool = True
    progress: Callable[[int, int], None] | None = None
    graphs: bool = False

    @cached_property
    def n(self) -> int:
        """Samples."""
        return length(self.data[0])

    @cached_property
    def cuts(self) -> list[tuple[int, int]]:
        """(start, end) of the batches of one epoch."""
        batch_norm = self.scratch.batch_norm and self.train_mode
        return batches(self.n, self.recipe.batch_size, batch_norm)

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        if not self.cuts:
            return 0
        given = self.recipe.steps
        return given if given is not None else self.recipe.epochs * len(self.cuts)

    @cached_property
    def trained(self) -> list[str]:
        """The names of the parameters that are trained, in the model's order; `only` may name a
        tied one by any of its names. ConfigError for one that the model does not have.
        """
        only, layout = self.hooks.only, self.scratch.layout.parameters
        if only is None:
            return list(layout.names)
        if missing := [name for name in only if not layout.has(name)]:
            raise ConfigError(
                f"no trainable parameter of the model is named {', '.join(sorted(missing))}."
            )
        return list(layout.select(only).names)


def autocast(precision: str, device: torch.device) -> tuple[AbstractContextManager[object], float]:
    """(context for the forward pass, factor on the loss). In fp16 small gradients would vanish: the
    loss is multiplied by a fixed power of two, exact to take back, and free of the wait for the
    device that a dynamic factor costs.
    """
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16), 1.0
    if precision == "fp16":
        return torch.autocast(device.type, torch.float16), 1024.0
    return contextlib.nullcontext(), 1.0


# -- the loop --------------------------------------------------------------------------------------
def descend(
    descent: Descent,
    loss: Loss,
    *,
    extra: Tensors | None = None,
    augment: Callable[[Inputs], Inputs] | None = None,
) -> Course:
    """Descends in place, with a new optimizer. loss(module, x, y), with `extra`, tensors that are
    trained beside the model, loss(module, x, y, extra).
    """
    scratch = descent.scratch
    if descent.hooks.only is not None:
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in descent.trained)
    try:
        if descent.train_mode:
            scratch.train_mode(alone=descent.recipe.batch_size == 1 or descent.n == 1)
        else:
            scratch.module.eval()
        beside = (
            {name: t.clone().requires_grad_(True) for name, t in extra.items()}
            if extra is not None
            else None
        )
        if not descent.steps or not (descent.trained or beside):
            return Course(0, 0.0, extra)
        course = _run(descent, loss, beside, augment)
        if extra is not None and beside is not None:
            course = Course(course.steps, course.loss, Tensors.pack(extra.layout, beside))
        return course
    finally:
        for parameter in scratch.parameters.values():
            parameter.requires_grad_(True).grad = None


def _run(
    descent: Descent,
    loss: Loss,
    beside: dict[str, torch.Tensor] | None,
    augment: Callable[[Inputs], Inputs] | None,
) -> Course:
    """All steps of a descent that has some."""
    scratch, recipe = descent.scratch, descent.recipe
    module, device = scratch.module, scratch.device
    parameters = [scratch.parameters[name] for name in descent.trained]
    others = [] if beside is None else list(beside.values())
    extras = () if beside is None else (beside,)
    change = Correction.of(scratch, descent.trained, descent.hooks)
    take_step = _stepping(parameters, others, recipe, change)
    cast, scale = autocast(recipe.precision, device)
    replay = None if change is not None else _replay(descent, beside)
    total = torch.zeros((), dtype=torch.float64, device=device) if replay is None else replay.total
    total.zero_()

    def take(x: Inputs, y: torch.Tensor) -> None:
        with cast:
            value = loss(module, x, y, *extras)
        if scale == 1.0:
            value.backward()
        else:
            (value * scale).backward()
            torch._foreach_mul_(
                [p.grad for p in (*parameters, *others) if p.grad is not None], 1.0 / scale
            )
        if recipe.clip_norm is not None:
            # What is trained beside the model must not change the model's step.
            for group in (parameters, others):
                if group:
                    torch.nn.utils.clip_grad_norm_(group, recipe.clip_norm)
        take_step()
        # To None, so that autograd hands over the next gradient, adding nothing.
        for p in (*parameters, *others):
            p.grad = None
        total.add_(value.detach(), alpha=len(y))

    if replay is not None and replay.trainings == 1:
        replay.step = Captured(take)
    steps, seen, step = descent.steps, 0, 0
    while step < steps:
        xs, ys = _shuffled(descent, augment)
        for start, end in descent.cuts[: steps - step]:
            whole = end - start == recipe.batch_size
            captured = replay.step if replay is not None and whole else None
            (captured or take)(piece(xs, start, end), ys[start:end])
            seen += end - start
            step += 1
            if descent.progress is not None:
                descent.progress(step, steps)
    if replay is not None:
        replay.trainings += 1
    return Course(step, float(total) / seen)


def _replay(descent: Descent, beside: object) -> Replay | None:
    """None where a training's steps cannot be captured: they draw, or depend on steps before. A
    host asks for graphs only with the task's own loss; a method's may differ in each training.
    """
    scratch, recipe = descent.scratch, descent.recipe
    if not descent.graphs or not usable(scratch.device) or scratch.may_draw or beside:
        return None
    if recipe.optimizer != "sgd" or recipe.momentum or not descent.train_mode:
        return None
    key = (recipe, tuple(descent.trained))
    return kept(
        scratch.replays,
        key,
        lambda: Replay(torch.zeros((), dtype=torch.float64, device=scratch.device)),
    )


def _shuffled(
    descent: Descent, augment: Callable[[Inputs], Inputs] | None
) -> tuple[Inputs, torch.Tensor]:
    """The samples in the next epoch's order: one gather an epoch, of which a batch is a view."""
    (x, y), scratch = descent.data, descent.scratch
    order = descent.order.permutation(descent.n)
    index = torch.from_numpy(order).to(scratch.device, non_blocking=True)
    xs, ys = take(x, index), y.index_select(0, index)
    if augment is not None:
        xs = augment(xs)
    return laid(xs, scratch.channels_last), ys


def _stepping(
    parameters: list[nn.Parameter],
    others: list[torch.Tensor],
    recipe: Recipe,
    change: Correction | None,
) -> Callable[[], object]:
    """What takes one step of a new optimizer, with the gradients there are; `others`, beside the
    model, are not corrected.
    """
    if change is None or recipe.optimizer != "sgd":
        descent = optimizer(
            recipe.optimizer,
            [*parameters, *others],
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        return descent.step if change is None else change.around(parameters, descent.step)
    corrected = change.sgd(parameters, recipe.lr, recipe.momentum, recipe.weight_decay)
    if not others:
        return corrected
    beside = optimizer(
        recipe.optimizer,
        others,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )

    def both() -> None:
        corrected()
        beside.step()

    return both


def full_gradient(
    scratch: Scratch,
    data: tuple[Inputs, torch.Tensor],
    loss: Loss,
    batch_size: int,
    precision: str,
) -> tuple[Tensors, float]:
    """(gradient, loss) of the mean loss over all samples at what `scratch` holds; the module in
    eval mode, so that its buffers stay as they are. Batches are accumulated, weighted by their
    size.
    """
    module, (x, y) = scratch.module.eval(), data
    n = length(x)
    total = torch.zeros((), dtype=torch.float64, device=scratch.device)
    cast, scale = autocast(precision, scratch.device)
    try:
        for start in range(0, n, batch_size):
            end = min(start + batch_size, n)
            with cast:
                value = loss(module, piece(x, start, end), y[start:end])
            share = (end - start) / n
            (value if share * scale == 1.0 else value * (share * scale)).backward()
            total.add_(value.detach(), alpha=share)
        gradient = scratch.values()
        gradient.vector.zero_()
        for name, p in scratch.parameters.items():
            if p.grad is not None:
                gradient[name].copy_(p.grad if scale == 1.0 else p.grad / scale)
        return gradient, float(total)
    finally:
        for p in scratch.parameters.values():
            p.grad = None

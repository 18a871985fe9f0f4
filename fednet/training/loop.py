"""The loop of local training, with hooks: LT(w, loss, E, B) of the methods' pseudo-code.

It does not wait for the device before the end of the training: the loss is summed on the device.
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

from fednet.config.schema import scheduled
from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors
from fednet.training.correction import NEUTRAL, Correction, Hooks
from fednet.training.graphs import Captured, Replay, kept, usable
from fednet.training.optimizers import SGD, Optimizer, optimizer, restore, set_rate, states
from fednet.training.samples import batches, channels_innermost, length, piece, take
from fednet.training.scratch import Scratch
from fednet.wire.payload import Run

if TYPE_CHECKING:
    from fednet.config.schema import TrainSection

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `host.train`. x: the local model; run: n_i, K_i, mean loss; extra: the extra
    tensors after training.
    """

    x: Tensors
    run: Run
    extra: Tensors | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to descend. steps: so many optimizer steps instead of epochs. schedule: of the rate over
    the steps. clip_norm: of the raw gradient, L2.
    """

    lr: float
    epochs: int
    batch_size: int
    steps: int | None = None
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    clip_norm: float | None = None
    # fp32 | tf32 (a switch of the device's, set elsewhere) | bf16 | fp16: autocast
    precision: str = "fp32"

    @classmethod
    def of(
        cls, train: TrainSection, lr: float, epochs: int | None = None, steps: int | None = None
    ) -> Recipe:
        """Returns the run's recipe, with other epochs or steps if they are given."""
        return cls(
            lr=lr,
            epochs=train.epochs if epochs is None else epochs,
            steps=train.steps if epochs is None and steps is None else steps,
            batch_size=train.batch_size,
            optimizer=train.optimizer,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            schedule=train.local_schedule,
            clip_norm=train.clip_norm,
            precision=train.precision,
        )


@dataclass(frozen=True, slots=True)
class Course:
    """The result of a descent. steps: optimizer steps; loss: mean over the samples of all steps, 0
    without any.
    """

    steps: int
    loss: float
    extra: Tensors | None = None


@dataclass(eq=False)
class Descent:
    """One training of the model in `scratch`. data: samples (x, y); `order` draws their order.
    progress(step, steps): called after each optimizer step; an exception ends the training. graphs:
    see `train.graphs`. memory: the optimizer's state, by names of tensors, read before the first
    step and written after the last; None: it starts empty.
    """

    scratch: Scratch
    data: tuple[Inputs, torch.Tensor]
    recipe: Recipe
    order: np.random.Generator
    hooks: Hooks = NEUTRAL
    progress: Callable[[int, int], None] | None = None
    graphs: bool = False
    memory: dict[str, torch.Tensor] | None = None

    @cached_property
    def n(self) -> int:
        """Samples."""
        return length(self.data[0])

    @cached_property
    def cuts(self) -> list[tuple[int, int]]:
        """(start, end) of the batches of one epoch."""
        return batches(self.n, self.recipe.batch_size, self.scratch.batch_norm)

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        if not self.cuts:
            return 0
        given = self.recipe.steps
        return given if given is not None else self.recipe.epochs * len(self.cuts)

    @cached_property
    def trained(self) -> list[str]:
        """Names of the trained parameters, in the model's order. `only` may name a tied one by any
        of its names. Raises ConfigError for one that the model does not have.
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
    """Returns (context of the forward pass, factor on the loss). In fp16 small gradients would
    vanish, so the loss is multiplied by a fixed power of two, which is exact to divide by. A
    dynamic factor would wait for the device.
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
    """Trains in place, with a new optimizer that has the state in `memory`. loss(module, x, y), or
    loss(module, x, y, extra) with `extra`, tensors that are trained beside the model.
    """
    scratch = descent.scratch
    if descent.hooks.only is not None:
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in descent.trained)
    try:
        scratch.train_mode(alone=descent.recipe.batch_size == 1 or descent.n == 1)
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
    """Takes all steps of a descent that has some."""
    scratch, recipe = descent.scratch, descent.recipe
    module, device = scratch.module, scratch.device
    parameters = [scratch.parameters[name] for name in descent.trained]
    others = [] if beside is None else list(beside.values())
    extras = () if beside is None else (beside,)
    change = Correction.of(scratch, descent.trained, descent.hooks)
    # The extra tensors are not corrected.
    groups: list[list[torch.Tensor]] = [group for group in ([*parameters], others) if group]
    made = [
        optimizer(
            recipe.optimizer,
            group,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        for group in groups
    ]
    names = [*descent.trained, *(f"+{name}" for name in beside or ())]
    if descent.memory is not None:
        _remember(made, names, descent.memory)
    take_steps = [one.step for one in made]
    if change is not None:
        first = made[0]
        if isinstance(first, SGD):
            take_steps[0] = change.sgd(first)
        else:
            take_steps[0] = change.around(parameters, first.step)
    cast, scale = autocast(recipe.precision, device)
    replay = None if change is not None else _replay(descent, beside)
    total = torch.zeros((), dtype=torch.float64, device=device) if replay is None else replay.total
    total.zero_()

    def train_batch(x: Inputs, y: torch.Tensor) -> None:
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
            # The extra tensors must not change the model's step.
            for group in groups:
                torch.nn.utils.clip_grad_norm_(group, recipe.clip_norm)
        for take_step in take_steps:
            take_step()
        # None, so that autograd stores the next gradient without an addition.
        for p in (*parameters, *others):
            p.grad = None
        total.add_(value.detach(), alpha=len(y))

    if replay is not None and replay.trainings == 1:
        replay.step = Captured(train_batch)
    steps, seen, step = descent.steps, 0, 0
    while step < steps:
        xs, ys = _shuffled(descent, augment)
        for start, end in descent.cuts[: steps - step]:
            whole = end - start == recipe.batch_size
            captured = replay.step if replay is not None and whole else None
            if recipe.schedule != "constant":
                for one in made:
                    set_rate(one, scheduled(recipe.schedule, recipe.lr, step + 1, steps))
            (captured or train_batch)(piece(xs, start, end), ys[start:end])
            seen += end - start
            step += 1
            if descent.progress is not None:
                descent.progress(step, steps)
    if replay is not None:
        replay.trainings += 1
    if descent.memory is not None:
        parts = zip(names, (state for one in made for state in states(one)))
        descent.memory.update({f"{n}/{what}": x for n, own in parts for what, x in own.items()})
    return Course(step, float(total) / seen)


def _replay(descent: Descent, beside: object) -> Replay | None:
    """Returns the captured step of this kind of training. None if steps cannot be captured, because
    they draw or depend on earlier steps. A host sets `graphs` only with the task's own loss, since
    a method's loss may differ in each training.
    """
    scratch, recipe = descent.scratch, descent.recipe
    if not descent.graphs or not usable(scratch.device) or scratch.may_draw or beside:
        return None
    if recipe.optimizer != "sgd" or recipe.momentum:
        return None
    if recipe.schedule != "constant":
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
    """Returns the samples in the next epoch's order. They are gathered once; a batch is a view."""
    (x, y), scratch = descent.data, descent.scratch
    order = descent.order.permutation(descent.n)
    index = torch.from_numpy(order).to(scratch.device, non_blocking=True)
    xs, ys = take(x, index), y.index_select(0, index)
    if augment is not None:
        xs = augment(xs)
    return channels_innermost(xs) if scratch.channels_last else xs, ys


def _remember(made: list[Optimizer], names: list[str], memory: dict[str, torch.Tensor]) -> None:
    """Gives the optimizers the state in `memory`. names: of their parameters, in order."""
    kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for key, value in memory.items():
        name, _, what = key.rpartition("/")
        kept[name][what] = value
    rest = list(kept.values())
    for one in made:
        restore(one, rest)
        rest = rest[len(states(one)) :]


def full_gradient(
    scratch: Scratch,
    data: tuple[Inputs, torch.Tensor],
    loss: Loss,
    batch_size: int,
    precision: str,
) -> tuple[Tensors, float]:
    """Returns (gradient, loss) of the mean loss over all samples, for the model in `scratch`. It is
    in eval mode, so its buffers do not change. Batches are weighted by their size.
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

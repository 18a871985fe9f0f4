"""The loop of local training, with hooks: LT(w, loss, E, B) of the methods' pseudo-code.

It does not wait for the device before the end of the training: the loss is summed on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from fednet.config.schema import TrainSection, learning_rate_at
from fednet.errors import ConfigError
from fednet.tensors import Inputs, Tensors, by_name
from fednet.training import graphs
from fednet.training.optimizers import Corrected, Optimizer, optimizer
from fednet.training.samples import batches, length, piece, take
from fednet.training.scratch import Scratch
from fednet.wire.payload import LocalRun

if TYPE_CHECKING:
    from fednet.data.federation import Site
    from fednet.training.tasks import LearningTask

Pair = tuple[Inputs, torch.Tensor]
Loss = Callable[..., torch.Tensor]
# Of samples (x, y), for one epoch.
Augment = Callable[[Inputs, torch.Tensor], tuple[Inputs, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `host.train`."""

    x: Tensors
    """The local model."""
    run: LocalRun
    """n_i, K_i, mean loss."""
    extra: Tensors | None = None
    """The extra tensors after training."""


@dataclass(frozen=True, eq=False, slots=True)
class Hooks:
    """A method's changes to a descent. The raw gradient is clipped, then multiplied by
    `scale_grad`, then `add_to_grad` and proximal * (w - toward) are added to it; `add_to_step` is
    added to the weights after each optimizer step. toward: None for the start of the descent. only:
    names of the parameters to train; None: all.

    A hook at its neutral value is skipped: it costs nothing and does not change bits.
    """

    proximal: float = 0.0
    toward: Tensors | None = None
    add_to_grad: Tensors | None = None
    scale_grad: float = 1.0
    add_to_step: Tensors | None = None
    only: Sequence[str] | None = None

    @property
    def neutral(self) -> bool:
        """Whether gradients and steps stay as they are."""
        changes = self.add_to_grad is not None or self.add_to_step is not None
        return self.proximal == 0.0 and self.scale_grad == 1.0 and not changes


@dataclass(eq=False)
class Descent:
    """One training of the model in `scratch`, by itself or as a lane of a pack. A lane's scratch is
    there for its shapes alone: what it trains is `start`. Raises ConfigError for a name in
    `hooks.only` that the model does not have.
    """

    scratch: Scratch
    data: Pair | Site
    """Samples (x, y). A lane may have its site instead: they are gathered from where they lie."""
    recipe: TrainSection
    """The `train` section as it holds for this training: with its rate, and with steps only where
    they replace epochs.
    """
    order: np.random.Generator
    """Draws the order of the samples."""
    hooks: Hooks = Hooks()
    progress: Callable[[int, int], None] | None = None
    """progress(step, steps) is called after each optimizer step; an exception ends the training."""
    graphs: bool = False
    """Whether steps are CUDA graphs, see `train.graphs`."""
    memory: dict[str, torch.Tensor] | None = None
    """The optimizer's state by names of tensors, read before the first step and written after the
    last; None: it starts empty.
    """
    draws: int = 0
    """Of a lane: a number of this client's task, from which its dropout is drawn."""
    start: Tensors | None = None
    """Of a lane: the whole model that it begins with."""
    run: LocalRun | None = None
    """Of a lane: what came of it."""
    after: Tensors | None = None
    """Of a lane: the whole model that came of it."""
    error: BaseException | None = None
    """Of a lane: why nothing came of it."""

    def __post_init__(self) -> None:
        recipe = self.recipe
        only = self.hooks.only
        self.n = length(self.data[0]) if isinstance(self.data, tuple) else self.data.n
        # Rows of a lane's batch as it is computed: the batch size, or the power of two above n
        # where all samples are fewer. It depends on this client alone, else its bits would depend
        # on the others.
        self.width = min(recipe.batch_size, 1 << (self.n - 1).bit_length())
        self.cuts = batches(self.n, recipe.batch_size, self.scratch.batch_norm)
        self.steps = recipe.epochs * len(self.cuts)
        if recipe.steps is not None and self.cuts:
            self.steps = recipe.steps
        self.trained = list(self.scratch.parameters)
        if only is not None:
            layout = self.scratch.layout.parameters
            if missing := [name for name in only if not layout.has(name)]:
                raise ConfigError(
                    f"no trainable parameter of the model is named {', '.join(sorted(missing))}."
                )
            self.trained = list(layout.select(only).names)

    @property
    def pair(self) -> Pair:
        """Samples (x, y)."""
        return self.data if isinstance(self.data, tuple) else self.data.train

    @property
    def sample_nbytes(self) -> int:
        """Bytes of one sample, without its target."""
        if isinstance(self.data, tuple):
            return sum(p[:1].nbytes for p in by_name(self.data[0]).values())
        return self.data.data.input_nbytes

    @property
    def settings(self) -> tuple[object, ...]:
        """The values of the recipe, to compare trainings by. A method may have given it numbers of
        numpy's. Other clients' own settings are no part of it.
        """
        return msgspec.structs.astuple(msgspec.structs.replace(self.recipe, per_client=()))

    @property
    def kind(self) -> tuple[object, ...]:
        """What the lanes of one pack have in common."""
        hooks = self.hooks
        if isinstance(self.data, tuple):
            x, y = self.data
            inputs = tuple([(name, p.dtype, p.shape[1:]) for name, p in by_name(x).items()])
            form: tuple[object, ...] = inputs, y.dtype, y.shape[1:]
        else:
            form = self.data.data.inputs_form
        return (
            self.settings,
            self.width,
            form,
            tuple(self.trained),
            hooks.proximal,
            hooks.toward is None,
            hooks.add_to_grad is None,
            hooks.scale_grad,
            hooks.add_to_step is None,
        )


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


def descend(
    descent: Descent,
    task: LearningTask,
    loss: Loss | None = None,
    *,
    extra: Tensors | None = None,
    augment: Augment | None = None,
) -> tuple[LocalRun, Tensors | None]:
    """Trains in place, with a new optimizer that has the state in `memory`. loss(module, x, y), or
    loss(module, x, y, extra) with `extra`, tensors that are trained beside the model; default: the
    task's. Returns (the run, the extra tensors after it).
    """
    scratch = descent.scratch
    recipe = descent.recipe
    hooks = descent.hooks
    if hooks.only is not None:
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in descent.trained)
    removed_after = scratch.train_mode(alone=recipe.batch_size == 1 or descent.n == 1)
    try:
        beside = {}
        if extra is not None:
            beside = {name: t.clone().requires_grad_(True) for name, t in extra.items()}
        if not descent.steps or not (descent.trained or beside):
            return LocalRun(descent.n, 0, 0.0), extra
        run = _descend(descent, task, loss, None if extra is None else beside, augment)
        return run, None if extra is None else Tensors.pack(extra.layout, beside)
    finally:
        for hook in removed_after:
            hook.remove()
        for parameter in scratch.parameters.values():
            parameter.requires_grad_(True).grad = None


class _Optimizers:
    """The optimizers of a descent: one of the model's parameters that are trained and, so that
    neither changes the other's steps, one of the tensors beside them.
    """

    def __init__(self, descent: Descent, beside: dict[str, torch.Tensor]) -> None:
        recipe = descent.recipe
        assert recipe.lr is not None
        own = {name: descent.scratch.parameters[name] for name in descent.trained}
        self.groups: list[list[torch.Tensor]] = []
        self.tensors: list[torch.Tensor] = []  # of all groups
        self.made: list[Optimizer] = []
        # By the name in the descent's memory: the tensor, and the optimizer that has its state.
        self._by_name: dict[str, tuple[torch.Tensor, Optimizer]] = {}
        for prefix, group in (("", own), ("+", beside)):
            if not group:
                continue
            tensors = list(group.values())
            one = optimizer(
                recipe.optimizer,
                tensors,
                lr=recipe.lr,
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
            self.groups.append(tensors)
            self.tensors += tensors
            self.made.append(one)
            for name, p in group.items():
                self._by_name[prefix + name] = p, one

    def recall(self, memory: dict[str, torch.Tensor]) -> None:
        """Takes up the state that an earlier descent left in memory."""
        for key, value in memory.items():
            name, _, what = key.rpartition("/")
            p, one = self._by_name[name]
            # In the parameter's own order in memory; Adam's number of steps is a scalar.
            held = value.to(p.device, copy=True)
            if value.shape == p.shape:
                held = torch.empty_like(p, requires_grad=False).copy_(value)
            one.state.setdefault(p, {})[what] = held

    def remember(self, memory: dict[str, torch.Tensor]) -> None:
        """Leaves the state in memory."""
        for name, (p, one) in self._by_name.items():
            memory.update({f"{name}/{what}": x for what, x in one.state.get(p, {}).items()})

    def set_rate(self, rate: float) -> None:
        for one in self.made:
            one.param_groups[0]["lr"] = rate


def _steppers(descent: Descent, made: Sequence[Optimizer]) -> list[Optimizer | Corrected]:
    """Returns what takes a step: the optimizers, that of the model's parameters corrected as the
    hooks say. The tensors beside them are not corrected.
    """
    hooks = descent.hooks
    trained = descent.trained
    if not trained or hooks.neutral:
        return [*made]
    scratch = descent.scratch
    anchor = None
    added = None
    drift = None
    if hooks.proximal != 0.0:
        toward = scratch.values() if hooks.toward is None else hooks.toward
        anchor = scratch.flat(toward, trained)
    if hooks.add_to_grad is not None:
        added = scratch.flat(hooks.add_to_grad, trained)
    if hooks.add_to_step is not None:
        drift = scratch.flat(hooks.add_to_step, trained)
    corrected = Corrected(
        made[0], hooks.scale_grad, added, hooks.proximal, anchor, hooks.toward is None, drift
    )
    return [corrected, *made[1:]]


def _captured_step(descent: Descent) -> graphs.Captured | None:
    """Returns the captured step of such descents; None where steps are not replayed. Steps that
    draw, or depend on earlier ones, cannot be captured. There are no tensors beside the model.
    """
    scratch = descent.scratch
    recipe = descent.recipe
    device = scratch.device
    plain = descent.hooks.neutral or not descent.trained
    alike = (recipe.optimizer, recipe.momentum, recipe.local_schedule) == ("sgd", 0.0, "constant")
    if device.type not in graphs.DEVICES or scratch.may_draw:
        return None
    if not plain or not alike:
        return None
    key = (descent.settings, tuple(descent.trained))
    return graphs.get_or_make(scratch.replays, key, lambda: graphs.Captured(device))


def _shuffle(descent: Descent, augment: Augment | None) -> tuple[Inputs, torch.Tensor]:
    """Returns the samples in the order of the next epoch, on the device: gathered once, so that a
    batch is a view.
    """
    scratch = descent.scratch
    order = torch.from_numpy(descent.order.permutation(descent.n))
    index = order.to(scratch.device, non_blocking=True)
    x, y = descent.pair
    x = take(x, index)
    y = y.index_select(0, index)
    if augment is not None:
        x, y = augment(x, y)
    if scratch.channels_last and isinstance(x, torch.Tensor) and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, y


def _descend(
    descent: Descent,
    task: LearningTask,
    loss: Loss | None,
    beside: dict[str, torch.Tensor] | None,
    augment: Augment | None,
) -> LocalRun:
    """Takes all steps of a descent that has some."""
    recipe = descent.recipe
    module = descent.scratch.module
    device = descent.scratch.device
    assert recipe.lr is not None
    optimizers = _Optimizers(descent, beside or {})
    parameters = optimizers.tensors
    if descent.memory is not None:
        optimizers.recall(descent.memory)
    steppers = _steppers(descent, optimizers.made)
    cast, scale = autocast(recipe.precision, device)
    extras = () if beside is None else (beside,)
    replay = _captured_step(descent) if descent.graphs and not beside else None
    total = torch.zeros((), dtype=torch.float64, device=device) if replay is None else replay.total
    total.zero_()

    def train_batch(x: Inputs, y: torch.Tensor) -> None:
        with cast:
            if loss is None:
                value = task.loss(module(x), y)
            else:
                value = loss(module, x, y, *extras)
        if scale == 1.0:
            value.backward()
        else:
            (value * scale).backward()
            found = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(found, 1.0 / scale)
        if recipe.clip_norm is not None:
            # The extra tensors must not change the model's step.
            for group in optimizers.groups:
                torch.nn.utils.clip_grad_norm_(group, recipe.clip_norm)
        for stepper in steppers:
            stepper.step()
        # None, so that autograd stores the next gradient without an addition.
        for p in parameters:
            p.grad = None
        total.add_(value.detach(), alpha=len(y))

    # The first training of a kind chooses kernels, the second is captured.
    if replay is not None and replay.trainings == 1:
        replay.step = train_batch
    seen = 0
    step = 0
    while step < descent.steps:
        x, y = _shuffle(descent, augment)
        for start, end in descent.cuts[: descent.steps - step]:
            step += 1
            if recipe.local_schedule != "constant":
                rate = learning_rate_at(recipe.local_schedule, recipe.lr, step, descent.steps)
                optimizers.set_rate(rate)
            if replay is not None and replay.trainings and end - start == recipe.batch_size:
                replay(piece(x, start, end), y[start:end])
            else:
                train_batch(piece(x, start, end), y[start:end])
            seen += end - start
            if descent.progress is not None:
                descent.progress(step, descent.steps)
        del x, y  # else they would lie beside those of the next epoch
    if replay is not None:
        replay.trainings += 1
    if descent.memory is not None:
        optimizers.remember(descent.memory)
    return LocalRun(descent.n, step, float(total) / seen)

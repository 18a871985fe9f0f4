"""The one loop of stochastic gradient descent, with hooks: LT(w, loss, E, B)
of the methods' pseudo-code.

Nothing in it waits for the device before the end of the training: the loss is summed where it is
computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fednet.errors import ConfigError
from fednet.tensors import Tensors
from fednet.training.correction import Correction
from fednet.training.descent import optimizer
from fednet.training.scratch import Scratch
from fednet.wire.payload import Run

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
    """How to descend. steps: so many optimizer steps instead of epochs. last_batch: see `batches`.
    clip_norm: of the raw gradient, L2.
    """

    lr: float
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64
    last_batch: str = "auto"
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    # fp32 | tf32 (a switch of the device's, set elsewhere) | bf16 | fp16: autocast
    precision: str = "fp32"


@dataclass(frozen=True, slots=True)
class Course:
    """What a descent was. steps: optimizer steps; loss: mean over the samples of all steps (0 if
    there were none).
    """

    steps: int
    loss: float
    extra: Tensors | None = None


# -- samples ---------------------------------------------------------------------------------------
def length(x: Any) -> int:
    return int((next(iter(x.values())) if isinstance(x, dict) else x).shape[0])


def take(x: Any, index: torch.Tensor) -> Any:
    """The rows `index` of x, gathered: a tensor or a dict of tensors."""
    if isinstance(x, dict):
        return {name: part.index_select(0, index) for name, part in x.items()}
    return x.index_select(0, index)


def piece(x: Any, start: int, end: int) -> Any:
    """Rows start..end of x, as views."""
    return (
        {name: part[start:end] for name, part in x.items()} if isinstance(x, dict) else x[start:end]
    )


def joined(
    x: Any, y: torch.Tensor, more: tuple[Any, torch.Tensor] | None
) -> tuple[Any, torch.Tensor]:
    """Samples (x, y) followed by `more`."""
    if more is None or not len(more[1]):
        return x, y
    other = more[0]
    both = (
        {k: torch.cat([v, other[k]]) for k, v in x.items()}
        if isinstance(x, dict)
        else torch.cat([x, other])
    )
    return both, torch.cat([y, more[1].to(y.dtype)])


# -- modes and batches -----------------------------------------------------------------------------
def autocast(precision: str, device: torch.device) -> tuple[Any, float]:
    """(context for the forward pass, factor on the loss). In fp16 small gradients would vanish: the
    loss is multiplied by a fixed power of two, exact to take back, and free of the wait for the
    device that a dynamic factor costs.
    """
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16), 1.0
    if precision == "fp16":
        return torch.autocast(device.type, torch.float16), 1024.0
    return contextlib.nullcontext(), 1.0


FEW = 2  # samples of a last batch whose variance BatchNorm should not learn


def batches(
    n: int, size: int, last: str = "auto", batch_norm: bool = False
) -> list[tuple[int, int]]:
    """(start, end) of the batches of one epoch.

    last: what becomes of a last batch of fewer than `size` samples: keep; drop; merge it with the
    one before; auto: keep it, but under BatchNorm drop one of FEW samples or less. A batch that is
    the only one stays. Under BatchNorm a last batch of one sample has no variance, and is dropped
    by `keep` too.
    """
    cuts = [(start, min(start + size, n)) for start in range(0, n, size)]
    left = n % size
    if not left or len(cuts) == 1:
        return cuts
    if last == "merge":
        return [*cuts[:-2], (cuts[-2][0], n)]
    few = {"auto": FEW, "keep": 1, "drop": size}[last]
    if left <= few and (batch_norm or last == "drop"):
        cuts.pop()
    return cuts


def chosen(scratch: Scratch, only: Sequence[str] | None) -> list[str]:
    """The parameters of these names, None for all, in the model's order. ConfigError for a name
    that it does not have.
    """
    if only is None:
        return list(scratch.parameters)
    if missing := set(only) - set(scratch.parameters):
        raise ConfigError(
            f"no trainable parameter of the model is named {', '.join(sorted(missing))}."
        )
    return [name for name in scratch.parameters if name in set(only)]


# -- the loop --------------------------------------------------------------------------------------
def descend(
    scratch: Scratch,
    data: tuple[Any, torch.Tensor],
    recipe: Recipe,
    order: np.random.Generator,
    loss: Loss,
    *,
    proximal: float = 0.0,
    toward: Tensors | None = None,
    add_to_grad: Tensors | None = None,
    scale_grad: float = 1.0,
    add_to_step: Tensors | None = None,
    only: Sequence[str] | None = None,
    extra: Tensors | None = None,
    train_mode: bool = True,
    augment: Callable[[Any], Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Course:
    """Descends from what `scratch` holds, in place, with a new optimizer.

    loss(module, x, y), with `extra` loss(module, x, y, extra). The raw gradient is clipped, then
    multiplied by `scale_grad`, then `add_to_grad` and proximal * (w - toward) are added to it;
    `add_to_step` is added to the weights after each optimizer step. A hook at its neutral value is
    skipped, not computed: it costs nothing and leaves the bits alone. `toward`: default, where the
    descent starts.
    """
    module, (x, y) = scratch.module, data
    trained = chosen(scratch, only)
    if only is not None:
        for name, parameter in scratch.parameters.items():
            parameter.requires_grad_(name in trained)
    try:
        n, size = length(x), recipe.batch_size
        if train_mode:
            scratch.train_mode(alone=size == 1 or n == 1)
        else:
            module.eval()
        cuts = batches(n, size, recipe.last_batch, scratch.batch_norm and train_mode)
        steps = recipe.steps if recipe.steps is not None else recipe.epochs * len(cuts)
        beside = (
            {name: t.clone().requires_grad_(True) for name, t in extra.items()}
            if extra is not None
            else None
        )
        if not cuts or not steps or not (trained or beside):
            return Course(0, 0.0, extra)
        change = Correction.of(
            scratch, trained, proximal, toward, add_to_grad, scale_grad, add_to_step
        )
        course = _run(
            scratch,
            trained,
            (x, y),
            cuts,
            steps,
            recipe,
            order,
            loss,
            change,
            beside,
            augment,
            progress,
        )
        if extra is not None and beside is not None:
            course = Course(course.steps, course.loss, Tensors.pack(extra.layout, beside))
        return course
    finally:
        for parameter in scratch.parameters.values():
            parameter.requires_grad_(True).grad = None


def _run(
    scratch: Scratch,
    trained: list[str],
    data: tuple[Any, torch.Tensor],
    cuts: list[tuple[int, int]],
    steps: int,
    recipe: Recipe,
    order: np.random.Generator,
    loss: Loss,
    change: Correction | None,
    beside: dict[str, torch.Tensor] | None,
    augment: Callable[[Any], Any] | None,
    progress: Callable[[int, int], None] | None,
) -> Course:
    module, device, (x, y) = scratch.module, scratch.device, data
    parameters = [scratch.parameters[name] for name in trained]
    others = [] if beside is None else list(beside.values())
    extras = () if beside is None else (beside,)
    take_step = _stepping(parameters, others, recipe, change)
    cast, scale = autocast(recipe.precision, device)
    n, seen, step = length(x), 0, 0
    total = torch.zeros((), dtype=torch.float64, device=device)
    while step < steps:
        index = torch.from_numpy(order.permutation(n)).to(device, non_blocking=True)
        # One gather an epoch: a batch is then a view.
        xs, ys = (
            take(x, index),
            y.index_select(0, index),
        )
        if augment is not None:
            xs = augment(xs)
        if scratch.channels_last and isinstance(xs, torch.Tensor) and xs.dim() == 4:
            xs = xs.contiguous(memory_format=torch.channels_last)
        for start, end in cuts[: steps - step]:
            with cast:
                value = loss(module, piece(xs, start, end), ys[start:end], *extras)
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
            total.add_(value.detach(), alpha=end - start)
            seen += end - start
            step += 1
            if progress is not None:
                progress(step, steps)
    return Course(step, float(total) / seen)


def _stepping(
    parameters: list[nn.Parameter],
    others: list[torch.Tensor],
    recipe: Recipe,
    change: Correction | None,
) -> Callable[[], Any]:
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
    data: tuple[Any, torch.Tensor],
    loss: Loss,
    batch_size: int,
    precision: str = "fp32",
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

"""N clients trained at once: their descents as one, every operation batched over the lanes
(`train.pack`).

A small model leaves a GPU idle between its kernels; N of the same shape take hardly longer than
one. The forward pass is torch.func's vmap over stacked weights, the backward pass autograd's own,
the step the same fused one as in `descend`, over stacked tensors.

There are always exactly N lanes, whoever is in them: idle ones go through the motions with a copy
of the first. So each operation has the same shape, and each lane the same arithmetic, whatever the
others hold: a client's bits depend neither on its company nor on its place. They are not those of
`descend`, whose kernels are others; the mathematics is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import vmap

from fednet.tensors import Inputs, Tensors, mapped
from fednet.training.correction import Correction
from fednet.training.lanes import Feed, Lane, computed
from fednet.training.loop import Course
from fednet.training.optimizers import optimizer

if TYPE_CHECKING:
    from fednet.training.tasks import Task

# Devices on which a lane's weights are stepped as tensors of their own: a processor computes the
# last few elements of a tensor another way than the others, so that in one long tensor a lane's
# bits would depend on its place.
APART = ("cpu",)


def descend(lanes: Sequence[Lane], n: int, task: Task) -> None:
    """Descends in at most n lanes of one kind, each from what its scratch holds, in place; sets
    each one's course, or its error where its own `progress` raised one. The module of the first
    one's scratch does the work. Nothing waits for the device before the end.
    """
    assert 0 < len(lanes) <= n
    first = lanes[0]
    for name, parameter in first.scratch.parameters.items():
        parameter.requires_grad_(name in first.trained)
    try:
        first.scratch.train_mode(alone=False)
        _run(list(lanes), n, task)
    finally:
        for parameter in first.scratch.parameters.values():
            parameter.requires_grad_(True)
        # What a lane holds is its own thread's again, in another stream.
        if first.scratch.device.type == "cuda":
            torch.cuda.current_stream(first.scratch.device).synchronize()


def _run(lanes: list[Lane], n: int, task: Task) -> None:
    first, device = lanes[0], lanes[0].scratch.device
    rows = lanes + [first] * (n - len(lanes))
    held = {
        name: _stacked([lane.scratch.parameters[name].detach() for lane in rows])
        for name in first.scratch.parameters
    }
    parameters = [nn.Parameter(held[name]) for name in first.trained]
    held |= dict(zip(first.trained, parameters))
    apart = device.type in APART
    weights = [part for p in parameters for part in _parts(p.detach(), apart)]
    take_step, still = _stepping(rows, weights, apart)
    for i in range(len(lanes), n):
        still(i)
    forward = vmap(functools.partial(computed, first.scratch.module))
    feed = Feed(lanes, n)
    total = torch.zeros(n, dtype=torch.float64, device=device)
    losses: dict[int, torch.Tensor] = {}
    most = max(lane.steps for lane in lanes)
    for start in range(0, most, feed.chunk):
        xs, ys, shares, sizes = feed.next(min(feed.chunk, most - start))
        for k in range(len(shares)):
            outputs = forward(held, _step(xs, k))
            # All lanes' samples as one batch: a sample's loss is its own.
            each = task.losses(outputs.flatten(0, 1), ys[:, k].flatten(0, 1)).view(n, -1)
            value = (each * shares[k]).sum(1)
            value.sum().backward()
            if first.recipe.clip_norm is not None:
                _clip(parameters, first.recipe.clip_norm)
            _hand_over(parameters, weights, apart)
            take_step()
            total += value.detach() * sizes[k]
            step = start + k + 1
            for i, lane in enumerate(lanes):
                if (
                    step > lane.steps
                    or lane.error is not None
                    or (_tell(lane, step) and step < lane.steps)
                ):
                    continue
                if lane.error is None:
                    for name, p in zip(first.trained, parameters):
                        lane.scratch.parameters[name].detach().copy_(p.detach()[i])
                    losses[i] = total[i].clone()
                # It goes on to no avail, without a gradient: to leave it out of each step would
                # cost the others.
                still(i)
            if all(lane.error is not None or lane.steps <= step for lane in lanes):
                break
        else:
            continue
        break
    if losses:
        for i, summed in zip(losses, torch.stack(list(losses.values())).tolist()):
            lanes[i].course = Course(lanes[i].steps, summed / feed.seen[i])


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(N, ...), in the usual order in memory."""
    return torch.stack(list(parts)).contiguous()


def _parts(x: torch.Tensor, apart: bool) -> Sequence[torch.Tensor]:
    """A stacked tensor as what a step takes: whole, or each lane's row by itself."""
    return x.unbind(0) if apart else [x]


def _hand_over(parameters: list[nn.Parameter], weights: list[torch.Tensor], apart: bool) -> None:
    """The gradients, None where the loss does not reach them, to the parts that a step takes."""
    into = iter(weights)
    for p in parameters:
        for part in _parts(p.detach() if p.grad is None else p.grad, apart):
            next(into).grad = None if p.grad is None else part
        p.grad = None


def _step(xs: Inputs, k: int) -> Inputs:
    return mapped(xs, lambda part: part[:, k])


def _tell(lane: Lane, step: int) -> bool:
    """Whether the lane is to go on: it may be cancelled, or fail as was planned, at each step."""
    try:
        if lane.progress is not None:
            lane.progress(step, lane.steps)
    except BaseException as broken:  # raised again by the thread whose lane it is
        lane.error = broken
    return lane.error is None


def _stepping(
    lanes: Sequence[Lane], weights: list[torch.Tensor], apart: bool
) -> tuple[Callable[[], object], Callable[[int], None]]:
    """One step of all lanes: a descent's own, with tensors that are N times as long or,
    apart, with N times as many. And what takes from a lane all that would drive it without a
    gradient.
    """
    first, recipe, n = lanes[0], lanes[0].recipe, len(lanes)

    def flat(which: Callable[[Lane], Tensors | None]) -> list[torch.Tensor] | None:
        given = [(lane, x) for lane in lanes if (x := which(lane)) is not None]
        if not given:
            return None
        views = zip(*(lane.scratch.views(x, lane.trained) for lane, x in given))
        return [
            part.reshape(-1).clone()
            for parts in views
            for part in (parts if apart else [_stacked(parts)])
        ]

    anchor = None
    if first.hooks.proximal != 0.0:
        anchor = (
            [w.clone().view(-1) for w in weights]
            if first.hooks.toward is None
            else flat(lambda lane: lane.hooks.toward)
        )
    change = Correction.between(
        first.hooks.scale_grad,
        flat(lambda lane: lane.hooks.add_to_grad),
        first.hooks.proximal,
        anchor,
        first.hooks.toward is None,
        flat(lambda lane: lane.hooks.add_to_step),
    )

    def still(i: int) -> None:
        for vectors in () if change is None else (change.added, change.constant, change.drift):
            if vectors is not None:
                for v in vectors[i::n] if apart else [v.view(n, -1)[i] for v in vectors]:
                    v.zero_()

    if change is not None:
        return change.sgd(weights, recipe.lr, recipe.momentum, recipe.weight_decay), still
    return optimizer(
        "sgd", weights, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    ).step, still


def _clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """torch's clip_grad_norm_, of each lane for itself."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch.stack(
        [torch.linalg.vector_norm(g.unsqueeze(-1).flatten(1), dim=1) for g in gradients], dim=1
    )
    factor = (most / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))

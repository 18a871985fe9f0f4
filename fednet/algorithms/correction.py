"""What a method puts between a gradient and its step: FedProx's pull, SCAFFOLD's and FedCM's constants.

    gradient <- scale * gradient + added + proximal * (w - anchor);  a step of the optimizer;  w <- w + drift

where each part is there only if it does something. On a CPU a model's step is bound by memory, so there the correction and
SGD's step are taken together, one cache-sized block of the weights after the other: all that the correction costs is to
read what it adds. The bits are those of one operation after the other over the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fednet.algorithms.scratch import Scratch
from fednet.tensors import CHUNK, Tensors


@dataclass(frozen=True, eq=False, slots=True)
class Correction:
    """The parts, each as one flat vector a parameter, in the order in which the parameter's own elements lie in memory."""

    scale: float = 1.0
    added: list[torch.Tensor] | None = None
    proximal: float = 0.0
    anchor: list[torch.Tensor] | None = None
    drift: list[torch.Tensor] | None = None

    @classmethod
    def of(cls, scratch: Scratch, trained: list[str], proximal: float, toward: Tensors | None, add_to_grad: Tensors | None,
           scale_grad: float, add_to_step: Tensors | None) -> Correction | None:
        """None where nothing is to be done. toward: default, what the scratch holds."""
        if not trained or (proximal == 0.0 and add_to_grad is None and scale_grad == 1.0 and add_to_step is None):
            return None
        anchor = (scratch.values() if toward is None else toward) if proximal != 0.0 else None
        added, pulled, drift = (None if x is None else scratch.flat(x, trained) for x in (add_to_grad, anchor, add_to_step))
        return cls(scale_grad, added, proximal, pulled, drift)


def flat(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient as one vector in the parameter's order in memory; a view where it lies so, as it does but for rare layers."""
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def whole(change: Correction, parameters: Sequence[nn.Parameter], step: Callable[[], Any]) -> Callable[[], None]:
    """The correction, the optimizer's step and the drift, each over all parameters: what a GPU is best at."""
    weights = [p.detach().as_strided((p.numel(),), (1,)) for p in parameters]

    @torch.no_grad()
    def take() -> None:
        for p in parameters:
            if p.grad is None:  # the loss does not reach it: its gradient is 0, its correction is not
                p.grad = torch.zeros_like(p)
            elif p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
        gradients: Any = [flat(p.grad, p) for p in parameters if p.grad is not None]
        if change.scale != 1.0:
            torch._foreach_mul_(gradients, change.scale)
        if change.added is not None:
            torch._foreach_add_(gradients, change.added)
        if change.anchor is not None:  # the difference first: at the anchor it is exactly 0
            torch._foreach_add_(gradients, torch._foreach_sub(weights, change.anchor), alpha=change.proximal)  # type: ignore[arg-type]
        step()
        if change.drift is not None:
            torch._foreach_add_(weights, change.drift)  # type: ignore[arg-type]

    return take


@dataclass(frozen=True, eq=False, slots=True)
class _Block:
    """The elements start..end of one parameter, and what is beside them."""

    start: int
    end: int
    weights: torch.Tensor
    added: torch.Tensor | None
    anchor: torch.Tensor | None
    drift: torch.Tensor | None
    momentum: list[torch.Tensor]


def blockwise_sgd(change: Correction, parameters: Sequence[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> Callable[[], None]:
    """The correction and a step of fused SGD, block by block."""
    blocks: list[list[_Block]] = []
    for k, p in enumerate(parameters):
        w = p.detach().as_strided((p.numel(),), (1,))
        buffer = torch.empty_like(w) if momentum else None

        def part(of: list[torch.Tensor] | None, a: int, b: int, k: int = k) -> torch.Tensor | None:
            return None if of is None else of[k][a:b]

        blocks.append([_Block(a, b, w[a:b], part(change.added, a, b), part(change.anchor, a, b), part(change.drift, a, b),
                              [] if buffer is None else [buffer[a:b]]) for a, b in _cuts(p.numel())])
    largest = max((b.end - b.start for each in blocks for b in each), default=0)
    space, room = (torch.empty(largest, device=parameters[0].device) for _ in range(2))
    first = True

    @torch.no_grad()
    def take() -> None:
        nonlocal first
        for p, own in zip(parameters, blocks):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad  # not reached by the loss: its correction is not 0
            raw = flat(gradient, p)
            for b in own:
                g, out = raw[b.start:b.end], space[:b.end - b.start]
                if change.scale != 1.0:
                    g = torch.mul(g, change.scale, out=out)
                if b.added is not None:
                    g = torch.add(g, b.added, out=out)
                if b.anchor is not None:  # the difference first: at the anchor it is exactly 0
                    away = torch.sub(b.weights, b.anchor, out=room[:b.end - b.start])
                    g = torch.add(g, away, alpha=change.proximal, out=out)
                # what torch.optim.SGD(fused=True) calls
                torch._fused_sgd_([b.weights], [g], b.momentum, weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=0.0,
                                  nesterov=False, maximize=False, is_first_step=first and momentum != 0)
                if b.drift is not None:
                    b.weights.add_(b.drift)
        first = False

    return take


def _cuts(n: int) -> list[tuple[int, int]]:
    return [(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]

"""Corrections of gradients and steps: FedProx's proximal term, SCAFFOLD's and FedCM's constants.

    gradient <- scale * gradient + added + proximal * (w - anchor)
    a step of the optimizer
    w <- w + drift

where parts without an effect are left out. All but w and the gradient is constant during a
training, so the sum is one constant and a multiple of w: constant = added - proximal * anchor. A
step of a large model is bound by memory; this one costs one read more than plain SGD's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fednet.tensors import Tensors
from fednet.training.optimizers import SGD
from fednet.training.scratch import Scratch


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


NEUTRAL = Hooks()


@dataclass(frozen=True, eq=False, slots=True)
class Correction:
    """gradient <- scale * gradient + constant + proximal * w. Constant, added and drift: one flat
    vector a parameter, in the parameter's own order in memory. still: the descent starts at the
    anchor, so that the proximal term is exactly 0 at the first step.
    """

    scale: float
    added: list[torch.Tensor] | None
    constant: list[torch.Tensor] | None
    proximal: float
    still: bool
    drift: list[torch.Tensor] | None

    @classmethod
    def of(cls, scratch: Scratch, trained: list[str], hooks: Hooks) -> Correction | None:
        """Returns the correction of these hooks; None if they change nothing."""
        if not trained:
            return None
        toward, anchor = hooks.toward, None
        if hooks.proximal != 0.0:
            anchor = scratch.flat(scratch.values() if toward is None else toward, trained)
        added, drift = (
            None if x is None else scratch.flat(x, trained)
            for x in (hooks.add_to_grad, hooks.add_to_step)
        )
        return cls.between(hooks.scale_grad, added, hooks.proximal, anchor, toward is None, drift)

    @classmethod
    def between(
        cls,
        scale: float,
        added: list[torch.Tensor] | None,
        proximal: float,
        anchor: list[torch.Tensor] | None,
        still: bool,
        drift: list[torch.Tensor] | None,
    ) -> Correction | None:
        """Makes a correction from flat vectors. anchor: the center of the proximal term; still: the
        descent starts there.
        """
        if proximal == 0.0 and added is None and scale == 1.0 and drift is None:
            return None
        constant = added
        if proximal != 0.0:
            assert anchor is not None
            constant = list(torch._foreach_mul(anchor, -proximal))
            if added is not None:
                torch._foreach_add_(constant, added)  # type: ignore[arg-type]
        return cls(scale, added, constant, proximal, proximal != 0.0 and still, drift)

    def sgd(self, made: SGD) -> Callable[[], None]:
        """Returns a function that takes a corrected step of `made`, by torch.optim.SGD's fused
        kernel,

            v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v

        where proximal * w is part of the weight decay. Without momentum there is no v: the kernel
        gets the raw gradient as v, scale as the momentum and the constant as the gradient, so that
        the step is one pass.
        """
        parameters, momentum, weight_decay = made.parameters, made.momentum, made.weight_decay
        weights = [_vector(p.detach()) for p in parameters]
        velocity = []
        still = all(b is None for b in made.buffers)
        if momentum:
            held = [
                torch.zeros_like(p) if b is None else b for p, b in zip(parameters, made.buffers)
            ]
            velocity = [_vector(b) for b in held]
            made.buffers = [*held]
        fused = partial(torch._fused_sgd_, dampening=0.0, nesterov=False, maximize=False)
        first = True

        def step() -> None:
            nonlocal first
            gradients, (constant, pull) = self._gradients(parameters), self._parts(first)
            if constant is not None and not momentum and self.scale:
                fused(
                    weights,
                    constant,
                    gradients,
                    lr=made.lr,
                    momentum=self.scale,
                    weight_decay=weight_decay + pull,
                    is_first_step=False,
                )
            else:
                self._scale_and_shift(gradients, constant)
                fused(
                    weights,
                    gradients,
                    velocity,
                    lr=made.lr,
                    momentum=momentum,
                    weight_decay=weight_decay + pull,
                    is_first_step=first and still and momentum != 0,
                )
            first = False

        return self._drifting(weights, step)

    def around(
        self, parameters: Sequence[nn.Parameter], take: Callable[[], object]
    ) -> Callable[[], None]:
        """Returns a function that takes a corrected step of another optimizer, whose step is
        `take`.
        """
        weights = [_vector(p.detach()) for p in parameters]
        first = True

        def step() -> None:
            nonlocal first
            gradients, (constant, pull) = self._gradients(parameters), self._parts(first)
            self._scale_and_shift(gradients, constant)
            if pull:
                torch._foreach_add_(gradients, weights, alpha=pull)  # type: ignore[arg-type]
            take()
            first = False

        return self._drifting(weights, step)

    def _parts(self, first: bool) -> tuple[list[torch.Tensor] | None, float]:
        return (self.added, 0.0) if first and self.still else (self.constant, self.proximal)

    def _gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each parameter's gradient as a vector in the parameter's order in memory; 0 if
        the loss does not depend on it.
        """
        found = []
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
            found.append(_vector(p.grad))
        return found

    def _scale_and_shift(
        self, gradients: list[torch.Tensor], constant: list[torch.Tensor] | None
    ) -> None:
        if self.scale != 1.0:
            torch._foreach_mul_(gradients, self.scale)  # type: ignore[arg-type]
        if constant is not None:
            torch._foreach_add_(gradients, constant)  # type: ignore[arg-type]

    def _drifting(
        self, weights: list[torch.Tensor], step: Callable[[], None]
    ) -> Callable[[], None]:
        drift = self.drift

        @torch.no_grad()
        def both() -> None:
            step()
            if drift is not None:
                torch._foreach_add_(weights, drift)  # type: ignore[arg-type]

        return both


def _vector(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor as one vector, in their order in memory."""
    return x.as_strided((x.numel(),), (1,))

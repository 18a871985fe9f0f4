"""What a method puts between a gradient and its step: FedProx's pull, SCAFFOLD's and FedCM's
constants.

    gradient <- scale * gradient + added + proximal * (w - anchor)
    a step of the optimizer
    w <- w + drift

where each part is there only if it does something. All but w and the gradient stays the same
through a training, so what is added is one constant and a multiple of w: constant = added -
proximal * anchor. A step of a large model is bound by memory; this way it costs what plain SGD's
does and one more read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fednet.tensors import Tensors
from fednet.training.scratch import Scratch


@dataclass(frozen=True, eq=False, slots=True)
class Hooks:
    """What a method asks of a descent. The raw gradient is clipped, then multiplied by
    `scale_grad`, then `add_to_grad` and proximal * (w - toward) are added to it; `add_to_step` is
    added to the weights after each optimizer step. toward: None for where the descent starts. only:
    names of the parameters to train, None for all.

    A hook at its neutral value is skipped, not computed: it costs nothing and leaves the bits
    alone.
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
    vector a parameter, in the order in which the parameter's own elements lie in memory. still: the
    descent starts at the anchor itself, so that nothing pulls at its first step, to the bit.
    """

    scale: float
    added: list[torch.Tensor] | None
    constant: list[torch.Tensor] | None
    proximal: float
    still: bool
    drift: list[torch.Tensor] | None

    @classmethod
    def of(cls, scratch: Scratch, trained: list[str], hooks: Hooks) -> Correction | None:
        """None where nothing is to be done."""
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
        """From flat vectors, see above. anchor: what proximal pulls to; still: the descent starts
        there.
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

    def sgd(
        self, parameters: Sequence[torch.Tensor], lr: float, momentum: float, weight_decay: float
    ) -> Callable[[], None]:
        """What takes a corrected step of SGD. It calls what torch.optim.SGD(fused=True) does,

            v <- momentum * v + (gradient + weight_decay * w);  w <- w - lr * v

        where proximal * w joins the weight decay. Without momentum there is no v to keep: the raw
        gradient stands in its place, scale in that of the momentum and the constant in the
        gradient's, and all of it is one pass.
        """
        weights = [_vector(p.detach()) for p in parameters]
        velocity = [torch.empty_like(w) for w in weights] if momentum else []
        fused = partial(torch._fused_sgd_, lr=lr, dampening=0.0, nesterov=False, maximize=False)
        first = True

        def step() -> None:
            nonlocal first
            gradients, (constant, pull) = self._gradients(parameters), self._parts(first)
            if constant is not None and not momentum and self.scale:
                fused(
                    weights,
                    constant,
                    gradients,
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
                    momentum=momentum,
                    weight_decay=weight_decay + pull,
                    is_first_step=first and momentum != 0,
                )
            first = False

        return self._drifting(weights, step)

    def around(
        self, parameters: Sequence[nn.Parameter], take: Callable[[], object]
    ) -> Callable[[], None]:
        """A corrected step of any other optimizer, whose own is `take`."""
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
        """Each parameter's gradient as a vector of its order in memory, in place; 0 where the loss
        does not reach it.
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
    """All elements of a dense tensor as one vector, in the order in which they lie."""
    return x.as_strided((x.numel(),), (1,))

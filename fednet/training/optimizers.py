"""Optimizers, by the names of `train.optimizer`, and steps that a method corrects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.sgd import sgd


def tau(k: int, rho: float) -> float:
    """Effective steps of k steps of SGD with momentum rho from rest: the sum of each gradient's
    total weight.
    """
    return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)


class SGD:
    """torch.optim.SGD, bit for bit, by torch's own function of it.

    Without the `Optimizer` around it, whose first step imports torch._dynamo (more than a second
    and 100 MB a process), and every step of which costs as much again as the update of a small
    model. It has an Optimizer's `param_groups` and `state`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.group: dict[str, Any] = {
            "params": list(parameters),
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "fused": parameters[0].device.type in ("cpu", "cuda"),
        }
        self.param_groups = [self.group]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, pull: float = 0.0) -> None:
        """One step along the gradients that there are. pull: is added to the weight decay."""
        group = self.group
        moved: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for p in group["params"]:
            if p.grad is not None:
                moved.append(p)
                gradients.append(p.grad)
        buffers: list[torch.Tensor | None] = [None] * len(moved)
        if self.state:  # torch's function begins with all buffers or with none
            buffers = [
                self.state[p]["momentum"] if p in self.state else torch.zeros_like(p) for p in moved
            ]
        sgd(
            moved,
            gradients,
            buffers,
            fused=group["fused"],
            weight_decay=group["weight_decay"] + pull,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for p, buffer in zip(moved, buffers):
            if buffer is not None:
                self.state[p] = {"momentum": buffer}


Optimizer = SGD | torch.optim.Adam


def optimizer(
    name: str,
    parameters: Sequence[torch.Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """A new optimizer, sgd, adam or adamw; fused where the device has it. Momentum is SGD's; Adam
    keeps its own betas.
    """
    if name == "sgd":
        return SGD(parameters, lr, momentum, weight_decay)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    fused = parameters[0].device.type in ("cpu", "cuda")
    return kind(parameters, lr=lr, weight_decay=weight_decay, fused=fused)


class Corrected:
    """The steps of an optimizer, corrected: FedProx's proximal term, SCAFFOLD's and FedCM's
    constants.

        gradient <- scale * gradient + added + proximal * (w - anchor)
        a step of the optimizer
        w <- w + drift

    where parts without an effect are left out. All but w and the gradient is constant during a
    training, so the sum is one constant and a multiple of w: constant = added - proximal * anchor.
    A step of a large model is bound by memory; this one costs one read more than plain SGD's.

    added, anchor, drift: one flat vector a parameter, in the parameter's own order in memory, or
    None. at_anchor: the training starts at the anchor, so that the proximal term is exactly 0 at
    the first step.
    """

    def __init__(
        self,
        made: Optimizer,
        scale: float,
        added: list[torch.Tensor] | None,
        proximal: float,
        anchor: list[torch.Tensor] | None,
        at_anchor: bool,
        drift: list[torch.Tensor] | None,
    ) -> None:
        self._made = made
        self._scale = scale
        self._proximal = proximal
        self.added = self.constant = added
        self.drift = drift
        self._at_anchor = at_anchor
        if proximal != 0.0:
            assert anchor is not None
            self.constant = list(torch._foreach_mul(anchor, -proximal))
            if added is not None:
                torch._foreach_add_(self.constant, added)  # type: ignore[arg-type]
        self._parameters: list[torch.Tensor] = made.param_groups[0]["params"]
        self._weights = [_vector(p.detach()) for p in self._parameters]

    @torch.no_grad()
    def step(self) -> None:
        made = self._made
        scale = self._scale
        weights = self._weights
        constant = self.constant
        pull = self._proximal
        if self._at_anchor:
            constant = self.added
            pull = 0.0
            self._at_anchor = False
        gradients = []
        for p in self._parameters:  # 0 if the loss does not depend on it
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.stride() != p.stride():
                p.grad = torch.empty_like(p).copy_(p.grad)
            gradients.append(_vector(p.grad))
        group = made.param_groups[0]
        if isinstance(made, SGD) and constant is not None and not group["momentum"] and scale:
            # One pass: v <- momentum * v + (g + weight_decay * w), w <- w - lr * v takes the raw
            # gradient as v, scale as the momentum and the constant as g. Without momentum there is
            # no v.
            torch._fused_sgd_(
                weights,
                constant,
                gradients,
                lr=group["lr"],
                momentum=scale,
                weight_decay=group["weight_decay"] + pull,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
        else:
            if scale != 1.0:
                torch._foreach_mul_(gradients, scale)  # type: ignore[arg-type]
            if constant is not None:
                torch._foreach_add_(gradients, constant)  # type: ignore[arg-type]
            if isinstance(made, SGD):
                made.step(pull)
            else:
                if pull:
                    torch._foreach_add_(gradients, weights, alpha=pull)  # type: ignore[arg-type]
                made.step()
        if self.drift is not None:
            torch._foreach_add_(weights, self.drift)  # type: ignore[arg-type]


def _vector(x: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor as one vector, in their order in memory."""
    return x.as_strided((x.numel(),), (1,))

"""Optimizers, by the names of `train.optimizer`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.sgd import sgd

from fednet.errors import ConfigError, unknown


def tau(k: int, rho: float) -> float:
    """Effective steps of k steps of SGD with momentum rho from rest: the sum of each gradient's
    total weight.
    """
    return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)


class SGD:
    """torch.optim.SGD, bit for bit, by torch's own function of it.

    Without the `Optimizer` around it, whose first step imports torch._dynamo (more than a second
    and 100 MB a process), and every step of which costs as much again as the update of a small
    model.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.fused = self.parameters[0].device.type in ("cpu", "cuda")
        self.buffers: list[torch.Tensor | None] = [None] * len(self.parameters)

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradients that there are."""
        moved = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        buffers = [self.buffers[i] for i in moved]
        sgd(
            [self.parameters[i] for i in moved],
            [p.grad for p in self.parameters if p.grad is not None],
            buffers,
            fused=self.fused,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for i, buffer in zip(moved, buffers):
            self.buffers[i] = buffer


Optimizer = SGD | torch.optim.Adam


def set_rate(made: Optimizer, lr: float) -> None:
    """Changes the learning rate of the next steps."""
    if isinstance(made, SGD):
        made.lr = lr
    else:
        made.param_groups[0]["lr"] = lr


def states(made: Optimizer) -> list[dict[str, torch.Tensor]]:
    """Returns the optimizer's state by parameter: its tensors by name; none before its first
    step.
    """
    if isinstance(made, SGD):
        return [{} if b is None else {"momentum": b} for b in made.buffers]
    return [dict(made.state.get(p, {})) for p in made.param_groups[0]["params"]]


def restore(made: Optimizer, kept: Sequence[dict[str, torch.Tensor]]) -> None:
    """Gives a new optimizer what `states` returned of an earlier one."""
    parameters = made.parameters if isinstance(made, SGD) else made.param_groups[0]["params"]
    for i, (p, state) in enumerate(zip(parameters, kept)):
        # In the parameter's own order in memory; Adam's number of steps is a scalar.
        own = {
            name: torch.empty_like(p, requires_grad=False).copy_(x)
            if x.shape == p.shape
            else x.to(p.device, copy=True)
            for name, x in state.items()
        }
        if isinstance(made, SGD):
            made.buffers[i] = own.get("momentum")
        elif own:
            made.state[p] = own


def optimizer(
    name: str,
    parameters: Sequence[torch.Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Optimizer:
    """A new optimizer; fused where the device has it. Momentum is SGD's;
    Adam keeps its own betas.
    """
    if name == "sgd":
        return SGD(parameters, lr, momentum, weight_decay)
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if name not in kinds:
        raise ConfigError("train.optimizer: " + unknown("optimizer", name, ["sgd", *kinds]))
    return kinds[name](
        parameters,
        lr=lr,
        weight_decay=weight_decay,
        fused=parameters[0].device.type in ("cpu", "cuda"),
    )

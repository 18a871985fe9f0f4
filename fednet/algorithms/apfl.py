"""APFL: Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020
(arXiv:2003.13461), Algorithm 1.

w_i      local version of the global model    v_i  local model    alpha_i  weight of v_i
vbar_i   = alpha_i v_i + (1 - alpha_i) w_i, the personal model

    each local step:  w_i <- w_i - eta grad f_i(w_i);    v_i <- v_i - eta grad_v f_i(vbar_i)
    adaptive:         alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(vbar_i)>, kept in [0, 1]

What the paper leaves open: v_i starts at w^0; alpha_i is adapted once a round, before its steps,
by the gradient over the whole local set. vbar_i has the buffers of w_i.

The authors' code differs in three points: it predicts by a mixture of the two models' outputs
instead of their weights, it adapts alpha_i once a round after the first minibatch, by that
minibatch's gradients, and it averages clients plainly (`weighting: uniform`).
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call

from fednet.algorithms.base import *


@algorithm("apfl")
class APFL(Algorithm):
    """A personal model is a mixture of the global one and a local one, trained together."""

    paper = "Deng et al., 2020 (arXiv:2003.13461)"
    personalised = True
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        alpha: Fraction = 0.5
        """Share of the local model in the personal mixture alpha v + (1 - alpha) w; the start value
        if adaptive.
        """
        adaptive: bool = False
        """Whether each client learns its own alpha: one gradient step per round."""

    class Client(State):
        v: Tensors | None = None
        alpha: float | None = None

    def client_update(self, phase, client, down, host):
        v = host.initial.params.select(down.x.params.layout) if client.v is None else client.v
        alpha = self.config.alpha if client.alpha is None else client.alpha
        if self.config.adaptive:
            slope = host.gradient(mixed(down.x, v, alpha)).x.params.dot(v - down.x.params)
            alpha = min(1.0, max(0.0, alpha - host.lr * slope))
            host.report(alpha=alpha)
        y = host.train(down.x, loss=both(host.task, alpha), extra=v)
        return self.Client(v=y.extra, alpha=alpha), self.Up(x=y.x, run=y.run)

    def personal_model(self, client, local, host):
        return local if client.v is None else mixed(local, client.v, client.alpha)


def mixed(w: Tensors, v: Tensors, alpha: float) -> Tensors:
    """alpha v + (1 - alpha) w, with the buffers of w."""
    part = w.select(v.layout) if w.params.layout != v.layout else w.params
    return w.merge((1 - alpha) * part + alpha * v.to(w.device))


def both(task: LearningTask, alpha: float) -> Loss:
    """loss(model, x, y, v) with the value at w_i, and the gradients of f(w_i) for w_i and of
    f(vbar_i) for v_i.
    """

    def loss(
        model: nn.Module, x: Inputs, y: torch.Tensor, v: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        w = dict(model.named_parameters())
        between = {name: alpha * part + (1 - alpha) * w[name].detach() for name, part in v.items()}
        # On copies of the buffers: w_i's running statistics are not vbar_i's.
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        personal = task.loss(functional_call(model, {**between, **buffers}, (x,)), y)
        return task.loss(model(x), y) + (personal - personal.detach())

    return loss

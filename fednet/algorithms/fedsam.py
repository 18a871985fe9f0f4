"""FedSAM: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022
(arXiv:2206.02618), Algorithm 1.

w    global model    w_i  local model    rho  radius of the perturbation
g    gradient of a batch's loss at w_i

    each local step:  w_i <- w_i - eta_l * grad of the batch's loss at w_i + rho g / ||g||

The norm is over all trained parameters. BatchNorm's running statistics see each batch once, at w_i
itself. The default radius is that of SAM (Foret et al., ICLR 2021). Clients are weighted by their
samples, as in FedAvg. The authors' code averages them plainly: `weighting: uniform`.
"""

import torch
from torch import nn
from torch.func import functional_call

from fednet.algorithms.base import *


@algorithm("fedsam")
class FedSAM(Algorithm):
    """Local steps along the gradient at the worst point nearby, so that flat minima are found."""

    paper = "Qu et al., ICML 2022 (arXiv:2206.02618)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        rho: NonNegative = 0.05
        """Radius of the neighbourhood in which the worst point is sought; 0: FedAvg."""

    def client_update(self, phase, client, down, host):
        rho = self.config.rho

        def loss(model: nn.Module, x: Inputs, y: torch.Tensor) -> torch.Tensor:
            """The value at w_i, with the gradient at w_i + rho g / ||g||."""
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            here = host.task.loss(model(x), y)
            g = torch.autograd.grad(here, list(trained.values()), allow_unused=True)
            squares = [part.square().sum() for part in g if part is not None]
            scale = rho / (torch.stack(squares).sum().sqrt() + 1e-12)
            moved = {
                name: p if part is None else p + scale * part
                for (name, p), part in zip(trained.items(), g)
            }
            # On copies of the buffers: the running statistics have seen this batch already.
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            there = host.task.loss(functional_call(model, {**moved, **buffers}, (x,)), y)
            return there + (here - there).detach()

        y = host.train(down.x, loss=loss if rho else None)
        return client, self.Up(x=y.x, run=y.run)

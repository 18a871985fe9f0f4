"""FedDecorr: Shi, Liang, Zhang, Tan and Bai, "Towards Understanding and Mitigating Dimensional
Collapse in Heterogeneous Federated Learning", ICLR 2023 (arXiv:2210.00226).

w    global model    n  samples in the batch    beta  strength
z    features of a batch, (n, d): the input of the head, standardised over the batch
K    correlation matrix of z, (d, d)

    form: code (default)   loss = CE + beta * mean over i != j of ((n - 1) K_ij)^2 / n
    form: paper            loss = CE + beta * ||K||_F^2 / d^2

The authors' code has the first form, the paper prints the second. The first is about n times as
large, and the authors' beta of 0.1 was chosen for it: with the paper's form and that beta the
method hardly differs from FedAvg. A batch of one sample has no correlation: the term is 0.
"""

from typing import Literal

import torch
from torch import nn

from fednet.algorithms.base import *

EPSILON = 1e-8


@algorithm("feddecorr")
class FedDecorr(Algorithm):
    """Features are kept from collapsing onto a few dimensions."""

    paper = "Shi et al., ICLR 2023 (arXiv:2210.00226)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        beta: NonNegative = 0.1
        """Strength of the regulariser; 0.1 belongs to `form: code`."""
        form: Literal["code", "paper"] = "code"
        """The regulariser: code, of the authors' code; paper, as printed, about n times as small
        (n: batch size).
        """

    def outputs(self, module, x):
        return module.head(module.features(x))

    def client_update(self, phase, client, down, host):
        beta = self.config.beta
        code = self.config.form == "code"

        def loss(model: nn.Module, x: Inputs, y: torch.Tensor) -> torch.Tensor:
            z = model.features(x)
            return host.task.loss(model.head(z), y) + beta * correlation(z.flatten(1), code)

        y = host.train(down.x, loss=loss if beta else None)
        return client, self.Up(x=y.x, run=y.run)


def correlation(z: torch.Tensor, code: bool = False) -> torch.Tensor:
    """Returns the second term of the loss over beta, of features z (n, d), in the paper's form or
    in that of the authors' code.
    """
    n, d = z.shape
    if n == 1:
        return z.sum() * 0.0
    z = z - z.mean(dim=0)
    z = z / (z.var(dim=0) + EPSILON).sqrt()
    products = z.T @ z
    if not code:
        return (products / (n - 1)).square().mean()
    off = products.square().sum() - products.diagonal().square().sum()
    return off / (d * (d - 1)) / n

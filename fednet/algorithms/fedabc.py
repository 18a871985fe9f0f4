"""FedABC: Wang et al., "FedABC: Targeting Fair Competition in Personalized Federated Learning",
AAAI 2023 (arXiv:2302.07450), Algorithm 1.

z, q    logits (B, C) and q = sigmoid(z): C binary classifiers without a softmax
g       focal exponent: sigma in Eq. 5, which is the sigmoid in Eq. 1 and 2; `focal_gamma`
P_i     classes with at least one training sample on client i (not: in the batch); N_i all others
m_p     a positive is kept if q < m_p: easy ones are left out
m_n     a negative of a class in P_i is kept if q > m_n; of a class in N_i, if q > m_nn.
        The comparisons are strict, are made in each step ("dynamic"), and have no gradient

    loss (Eq. 6) = 1/B * sum over kept (b, c) of   (1-q)^g * -log q        where c is b's class
                                                     q^g   * -log(1-q)     elsewhere

What the paper leaves open:
- Eq. 6 divides by the number of samples, not by the number of kept terms (`norm` has both). This
  makes a step about C times as long; set `train.clip_norm` if training diverges.
- A batch of which nothing is kept has a loss and a gradient of 0.
- A client is evaluated by its model after its own last training.

FedABC_wi, the paper's ablation, is `m_p: 1`, `m_n: 0`, `m_nn: 0` and `focal_gamma: 0`.
"""

from typing import Literal

import torch
from torch.nn import functional as F

from fednet.algorithms.base import *


@algorithm("fedabc")
class FedABC(Algorithm):
    """Binary classifiers class by class, with under-sampling of the easy and a focal weight on the
    hard samples.
    """

    paper = "Wang et al., AAAI 2023 (arXiv:2302.07450)"
    personalised = True
    classes_only = True

    class Config(WeightedConfig):
        m_p: Fraction = 0.75
        """A positive sample is used if its probability q is below this; 1: all. The paper: 0.75 for
        MNIST, 0.85 for CIFAR-10.
        """
        m_n: Fraction = 0.25
        """A negative sample of a class that the client has is used if q is above this; 0: all.
        CIFAR-10: 0.2.
        """
        m_nn: Fraction = 0.3
        """A negative sample of a class that the client lacks is used if q is above this; 0: all.
        CIFAR-10: 0.3.
        """
        focal_gamma: NonNegative = 2.0
        """Focal exponent sigma of Eq. 5: how much hard samples count more than easy ones; 0: all
        the same.
        """
        norm: Literal["samples", "kept", "samples_classes"] = "samples"
        """What the loss is divided by: the batch's samples (Eq. 6), the terms kept, or samples
        times classes.
        """

    def client_update(self, phase, client, down, host):
        present = torch.as_tensor(host.class_counts > 0, device=host.device)
        loss = lambda model, x, y: abc_loss(model(x), y, present, self.config)  # noqa: E731
        y = host.train(down.x, loss=loss)  # PM_i: the engine keeps a client's last local model
        return client, self.Up(x=y.x, run=y.run)


def abc_loss(
    z: torch.Tensor, y: torch.Tensor, present: torch.Tensor, c: FedABC.Config
) -> torch.Tensor:
    """Eq. 6 for logits z (B, C), classes y (B,) and P_i as a mask (C,); finite for any finite z.

    With -log q = softplus(-z) and -log(1-q) = softplus(z), the focal factors are exponentials of
    the same two.
    """
    positive = F.one_hot(y, z.shape[1]).bool()
    q = torch.sigmoid(z.detach())
    g = c.focal_gamma
    margin = torch.where(present, q.new_full((), c.m_n), q.new_full((), c.m_nn))
    kept = torch.where(positive, q < c.m_p, q > margin)
    not_q = F.softplus(-z)
    not_p = F.softplus(z)
    if g:
        focal_q = torch.exp(-g * not_p)
        focal_p = torch.exp(-g * not_q)
        not_q = focal_q * not_q
        not_p = focal_p * not_p
    total = (torch.where(positive, not_q, not_p) * kept).sum()
    if c.norm == "kept":
        return total / kept.sum().clamp(min=1)
    return total / (z.shape[0] if c.norm == "samples" else z.numel())

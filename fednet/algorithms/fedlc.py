"""FedLC: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022 (arXiv:2209.00189).

w     global model    n_c  training samples of class c on this client
f_c   logit of class c    tau  strength

    loss = -log softmax(f - tau * n^(-1/4))_y

Where a client has no sample of class c, n_c^(-1/4) is infinite: the class leaves the softmax and
its logit gets no gradient. `denominator: others` leaves y itself out of the sum over classes, the
form of a pairwise margin; `all` is what public re-implementations compute. A client that has one
class alone has a loss of 0 with either.

tau is 1 by default; public re-implementations take 0.1 or 0.5.
"""

from typing import Literal

import torch
from torch.nn import functional as F

from fednet.algorithms.base import *


@algorithm("fedlc")
class FedLC(Algorithm):
    """Logits are calibrated by how many samples of each class the client has."""

    paper = "Zhang et al., ICML 2022 (arXiv:2209.00189)"
    classes_only = True
    summed = {"x": "weighted"}

    class Config(AlgorithmConfig):
        tau: NonNegative = 1.0
        """Strength of the calibration by class counts; 0: plain cross-entropy."""
        denominator: Literal["all", "others"] = "all"
        """The classes in the softmax's sum: all, or the others without the sample's own (pairwise
        margin).
        """
        weighting: Weighting = "samples"

    def client_update(self, phase, client, down, host):
        margin = margins(torch.as_tensor(host.class_counts, device=host.device), self.config.tau)
        several = int(torch.isfinite(margin).sum()) > 1
        others = self.config.denominator == "others" and several
        y = host.train(down.x, loss=lambda model, x, y: calibrated(model(x) - margin, y, others))
        return client, self.Up(x=y.x, run=y.run)


def margins(counts: torch.Tensor, tau: float) -> torch.Tensor:
    """tau * n_c^(-1/4), (C,) float32; infinite for an absent class, all 0 where tau is 0."""
    return tau * counts.float() ** -0.25 if tau else torch.zeros_like(counts, dtype=torch.float32)


def calibrated(f: torch.Tensor, y: torch.Tensor, others: bool) -> torch.Tensor:
    """Returns the mean loss of calibrated logits f (n, C). others: the sum is over i != y alone."""
    if not others:
        return F.cross_entropy(f, y)
    at_y = f.gather(1, y[:, None]).squeeze(1)
    rest = f.scatter(1, y[:, None], float("-inf"))
    return (torch.logsumexp(rest, dim=1) - at_y).mean()

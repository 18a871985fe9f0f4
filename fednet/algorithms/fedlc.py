"""FedLC: Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration",
ICML 2022 (arXiv:2209.00189).

w     global model    n_c  training samples of class c on this client
f_c   logit of class c    tau  strength

    loss = -log softmax(f - tau * n^(-1/4))_y

Where a client has no sample of class c, n_c^(-1/4) is infinite: the class leaves the softmax and
its logit gets no gradient. The sum over classes has y itself in it, as in public
re-implementations; the paper's pairwise margin leaves it out. A client that has one class alone has
a loss of 0.

tau is 1 by default; public re-implementations take 0.1 or 0.5.
"""

import torch
from torch.nn import functional as F

from fednet.algorithms.base import *


@algorithm("fedlc")
class FedLC(Algorithm):
    """Logits are calibrated by how many samples of each class the client has."""

    paper = "Zhang et al., ICML 2022 (arXiv:2209.00189)"
    classes_only = True
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        tau: NonNegative = 1.0
        """Strength of the calibration by class counts; 0: plain cross-entropy."""

    def client_update(self, phase, client, down, host):
        n = torch.as_tensor(host.class_counts, device=host.device).float()
        tau = self.config.tau
        margin = tau * n**-0.25 if tau else 0.0  # (C,), infinite for an absent class
        y = host.train(down.x, loss=lambda model, x, y: F.cross_entropy(model(x) - margin, y))
        return client, self.Up(x=y.x, run=y.run)

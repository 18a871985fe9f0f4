"""FedDF: Lin, Kong, Stich and Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated
Learning", NeurIPS 2020 (arXiv:2006.07242), Algorithm 1.

x_k    local model of client k    x  global model    d  public samples, labels unused
f(x_k, d)  logits of client k's model on d

    x_0 <- mean of x_k weighted by samples
    x_j <- x_{j-1} - eta grad KL(softmax(mean_k f(x_k, d)), softmax(f(x_{j-1}, d)))

The logits are averaged uniformly, as printed. `distill_epochs` passes over the public set by plain
SGD; the paper takes 10,000 steps of Adam with a cosine schedule and stops early on a validation
set, which a server of ours does not have.
"""

import torch
from torch.nn import functional as F

from fednet.algorithms.base import *
from fednet.training.evaluation import logits


@algorithm("feddf")
class FedDF(Algorithm):
    """The server distils the clients' ensemble into their mean, on public samples."""

    paper = "Lin et al., NeurIPS 2020 (arXiv:2006.07242)"
    classes_only = True
    needs_public = True

    class Config(WeightedConfig):
        distill_epochs: Count = 1
        """Epochs of distillation over the public samples per round; 0: none."""
        distill_lr: Positive = 0.01
        """Learning rate of the distillation."""
        distill_batch: Count = 128
        """Batch size of the distillation, in samples."""

    class Accumulator(State):
        x: Sum
        logits: torch.Tensor | None = None  # sum of f(x_k, d), (n, C) float64
        models: int = 0

    def accumulate(self, accumulator, server, client_id, up, host):
        f = logits(host.model(up.x), host.public_inputs[0], self.config.distill_batch).double()
        return self.Accumulator(
            x=accumulator.x.add(up.x, self.weight(up.run)),
            logits=f if accumulator.logits is None else accumulator.logits + f,
            models=accumulator.models + 1,
        )

    def server_update(self, accumulator, server, cohort, host):
        target = (accumulator.logits / accumulator.models).softmax(dim=1).float()
        samples = Samples(host.public_inputs[0], target)
        x = host.fit(
            accumulator.x.mean(),
            samples,
            epochs=self.config.distill_epochs,
            lr=self.config.distill_lr,
            batch_size=self.config.distill_batch,
            loss=lambda model, d, target: F.kl_div(
                model(d).log_softmax(dim=1), target, reduction="batchmean"
            ),
        )
        return self.Server(x=x)

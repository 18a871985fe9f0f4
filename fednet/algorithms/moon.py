"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021 (arXiv:2103.16257),
Algorithm 1.

w      global model        w_i  local model while it trains
v_i    local model after i's last participation
z      feature of a batch under w_i; z_glob under w, z_prev under v_i
tau    temperature         mu   weight of the contrastive loss         s  cosine similarity

    l_con = -log( e^{s(z, z_glob)/tau} / (e^{s(z, z_glob)/tau} + e^{s(z, z_prev)/tau}) ),
    loss = CE + mu * l_con

What the paper leaves open: a client without a previous model (at its first participation) has
l_con = 0, as in the first round of the authors' code. The feature is the output of the projection
if the model has one, else of the penultimate layer. It is flattened, not squeezed, so that a batch
of one sample works. A client keeps one previous model.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fednet.algorithms.base import *


@algorithm("moon")
class Moon(Algorithm):
    """Model-contrastive learning: local features drawn to the global model's, away from the
    client's last.
    """

    paper = "Li et al., CVPR 2021 (arXiv:2103.16257)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        mu: NonNegative = 1.0
        """Weight of the contrastive loss; the authors advise 5 for CIFAR-10; 0: FedAvg."""
        tau: Positive = 0.5
        """Temperature of the contrastive loss."""

    class Client(State):
        v: Tensors | None = None

    def client_update(self, phase, client, down, host):
        if client.v is None or not self.config.mu:
            y = host.train(down.x)
            return self.Client(v=y.x), self.Up(x=y.x, run=y.run)
        glob = host.frozen(down.x)
        prev = host.frozen(client.v)

        def loss(model: nn.Module, x: Inputs, y: torch.Tensor) -> torch.Tensor:  # lines 16-20
            # The body sees the batch once: a second pass would count it twice in the statistics of
            # BatchNorm.
            features = model.features(x)
            outputs = model.head(features)
            with torch.no_grad():
                z_glob = glob.features(x).flatten(1)
                z_prev = prev.features(x).flatten(1)
            z = features.flatten(1)
            near = F.cosine_similarity(z, z_glob, dim=1)
            far = F.cosine_similarity(z, z_prev, dim=1)
            # A softmax over two similarities is a softplus of their difference.
            l_con = F.softplus((far - near) / self.config.tau).mean()
            return host.task.loss(outputs, y) + self.config.mu * l_con

        y = host.train(down.x, loss=loss)  # lines 14-21
        return self.Client(v=y.x), self.Up(x=y.x, run=y.run)

    def outputs(self, module, x):
        return module.head(module.features(x))

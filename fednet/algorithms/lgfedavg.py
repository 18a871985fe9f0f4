"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020 (arXiv:2001.01523), Algorithm 1.

theta^g    the upper layers, shared
theta^l_i  the lower layers of client i: its local representation

Departs from the authors' code, whose released CIFAR command shares the convolutions, the opposite
of the paper's text. This follows the text: the last `global_layers` Linear layers are shared.
Training starts from scratch, not from a model pretrained by FedAvg, unless `model.weights` names
one. A client gets the new global layers with its next task. There is no complete global model, so
only personal models are evaluated.
"""

from typing import Literal

from fednet.algorithms.base import *
from fednet.algorithms.split import last_linears, split_model, whole_model


@algorithm("lgfedavg")
class LGFedAvg(Algorithm):
    """Local lower layers, averaged upper layers."""

    paper = "Liang et al., 2020 (arXiv:2001.01523)"
    part = "upper layers"
    personalised = True
    has_global = False
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        global_layers: Count | Literal["all"] = 2
        """Number of last Linear layers that are shared; 0: none (local training), all: FedAvg."""

    class Client(State):
        own: Tensors | None = None

    def shared(self, layout, module):
        k = self.config.global_layers
        return layout if k == "all" else layout.select(filter(layout.has, last_linears(module, k)))

    def client_update(self, phase, client, down, host):
        y = host.train(whole_model(down.x, client.own, host))  # theta^l_i and theta^g together
        up, own = split_model(y.x, host)
        return self.Client(own=own), self.Up(x=up, run=y.run)

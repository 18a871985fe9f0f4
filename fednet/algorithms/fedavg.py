"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017 (arXiv:1602.05629), Algorithm 1.

w    global model        w_i  local model        n_i  training samples of client i

Departs from the paper: n in n_i / n is the sum over the participants, so that the weights sum to 1.
"""

from fednet.algorithms.base import *


@algorithm("fedavg")
class FedAvg(Algorithm):
    """Federated averaging: local SGD, then the mean of the local models."""

    paper = "McMahan et al., AISTATS 2017 (arXiv:1602.05629)"
    summed = {"x": "weighted"}

    Config = WeightedConfig

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)  # ClientUpdate
        return client, self.Up(x=y.x, run=y.run)

    # The server's half is the default of all methods: w <- sum n_i w_i / sum n_i.

"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020
(arXiv:1812.06127), Algorithm 2.

w    global model    w_i  local model    mu  strength of the proximal term (mu/2) ||w_i - w||^2

Departs from the paper: every client does the same local work, and weights are by samples, as in
FedAvg.
"""

from fednet.algorithms.base import *


@algorithm("fedprox")
class FedProx(Algorithm):
    """FedAvg whose local loss holds the local model near the global one."""

    paper = "Li et al., MLSys 2020 (arXiv:1812.06127)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        mu: NonNegative = 0.01
        """Strength of the proximal term mu/2 ||w - w^t||^2; 0: FedAvg. lr * mu should stay below 2.
        """

    def client_update(self, phase, client, down, host):
        y = host.train(down.x, proximal=self.config.mu)  # adds mu (w_i - w) to each gradient
        return client, self.Up(x=y.x, run=y.run)

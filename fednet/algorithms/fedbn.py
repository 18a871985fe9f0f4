"""FedBN: Li, Jiang, Zhang, Kamp and Dou, "FedBN: Federated Learning on Non-IID Features via Local
Batch Normalization", ICLR 2021 (arXiv:2102.07623), Algorithm 1.

w        all layers but the batch normalisation, shared
w_bn,k   the batch normalisation of client k: scale, shift and running statistics; never crosses

Clients are weighted by their samples, as in FedAvg. The authors' code averages them plainly:
`weighting: uniform`. With a model without batch normalisation this is FedAvg.
"""

from torch.nn.modules.batchnorm import _BatchNorm

from fednet.algorithms.base import *
from fednet.algorithms.split import split_model, whole_model


@algorithm("fedbn")
class FedBN(Algorithm):
    """Each client keeps its own batch normalisation; all else is averaged."""

    paper = "Li et al., ICLR 2021 (arXiv:2102.07623)"
    part = "base"
    personalised = True
    has_global = False
    summed = {"x": "weighted"}

    Config = WeightedConfig

    class Client(State):
        bn: Tensors | None = None

    def shared(self, layout, module):
        own = {
            f"{name}.{leaf}"
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm)
            for leaf in part.state_dict()
        }
        return layout.without(own)

    def client_update(self, phase, client, down, host):
        y = host.train(whole_model(down.x, client.bn, host))
        up, own = split_model(y.x, host)
        return self.Client(bn=own), self.Up(x=up, run=y.run)

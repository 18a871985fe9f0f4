"""FedBABU: Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image
Classification", ICLR 2022 (arXiv:2106.06042), Algorithm 1.

theta_ext  the body, shared
theta_cls  the head: its random start, the same for all, never trained

The body alone is trained and crosses. Personal models come from fine-tuning the whole model at the
end: `evaluate.finetune: true`, with `train.epochs` local epochs.
"""

from fednet.algorithms.base import *
from fednet.algorithms.split import last_linears


@algorithm("fedbabu")
class FedBABU(Algorithm):
    """Only the body is trained; the head stays as it was initialised until the end."""

    paper = "Oh et al., ICLR 2022 (arXiv:2106.06042)"
    part = "base"
    summed = {"x": "weighted"}

    Config = WeightedConfig

    def shared(self, layout, module):
        return layout.without(last_linears(module, 1))

    def client_update(self, phase, client, down, host):
        y = host.train(down.x, only=down.x.params.layout.names)
        return client, self.Up(x=y.x, run=y.run)

"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019
(arXiv:1912.00818), Algorithms 1 and 2.

W_B    base layers, shared
W_P,i  personalisation layers of client i: its head, which never crosses

What the paper leaves open: the head is the last Linear layer (`personal_layers` of them); at its
first participation a client starts from the common initial head.
"""

from fednet.algorithms.base import *
from fednet.algorithms.split import last_linears, split_model, whole_model


@algorithm("fedper")
class FedPer(Algorithm):
    """A shared base and each client's own head, trained together."""

    paper = "Arivazhagan et al., 2019 (arXiv:1912.00818)"
    part = "base"
    personalised = True
    has_global = False
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        personal_layers: Count = 1
        """Number of last Linear layers that stay at the client; 0: FedAvg."""

    class Client(State):
        head: Tensors | None = None

    def shared(self, layout, module):
        return layout.without(last_linears(module, self.config.personal_layers))

    def client_update(self, phase, client, down, host):
        y = host.train(whole_model(down.x, client.head, host))  # base and head jointly
        base, head = split_model(y.x, host)
        return self.Client(head=head), self.Up(x=base, run=y.run)

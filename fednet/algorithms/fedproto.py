"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022 (arXiv:2105.00243), Algorithm 1.

f(x)      features: the input of the head, (d,)   w_i   model of client i, which never leaves it
C_i^(j)   client i's prototype of class j: the mean of f over its samples of that class (Eq. 3)
C^(j)     global prototype of class j             N_j   the clients that sent one
D_ij      client i's samples of class j           lambda  weight of the prototypes in the loss

    loss = CE + lambda * mean over batch and features of (f(x) - C^(y))^2
    C^(j) <- sum over N_j of |D_ij| C_i^(j) / sum of |D_ij|
    prediction: the class whose prototype is nearest to f(x) (Eq. 9)

The second term of the loss is 0 for classes whose C^(y) is not known yet.

Departures from the paper:
- Eq. 6 divides C^(j) once more by |N_j|, which would shrink a prototype with the number of clients
  that have the class. This is read as a slip and left out.
- The loss compares each sample's features with its prototype, as the authors' code does. Eq. 8
  compares a client's prototypes with the global ones.
- The class counts |D_ij| leave the client, for the weighted mean at the server.
- A class that no client of a round has keeps its prototype.

The authors' code averages the clients' prototypes plainly (`weighting: uniform`). It collects them
during the last local epoch, while the model is still being trained; here one more pass computes
them with the trained model, as Eq. 3 says. It predicts only classes that the client has training
samples of: `predict: own_prototypes`. The default compares with all known classes, as Eq. 9 says.

Clients are evaluated with the prototypes that the server aggregated last (`evaluate.shared:
latest`), as in both codes; within a training task, with those that the task brought. `predict:
head` evaluates the model's own head instead. A client that knows no prototype yet also predicts by
its head.
"""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from fednet.algorithms.base import *

BATCH = 256
FAR = 1e6  # squared distance to a class without a prototype
Prototypes = kind("statistics", "array", dtype="float32", rank=2)
Counts = kind("statistics", "array", dtype="int64", rank=1, low=0)


@algorithm("fedproto")
class FedProto(Algorithm):
    """Clients send class prototypes, and no weights; models stay at the clients."""

    paper = "Tan et al., AAAI 2022 (arXiv:2105.00243)"
    personalised = True
    has_global = False
    classes_only = True
    architecture_free = True
    model_field = None
    shared_state = ("c", "known")

    class Config(WeightedConfig, rename={"lambda_": "lambda"}):
        lambda_: NonNegative = 1.0
        """Weight of the prototype term in the local loss; 0: local training alone."""
        predict: Literal["prototypes", "own_prototypes", "head"] = "prototypes"
        """How a client predicts: by the nearest of all prototypes, of those of its own classes
        (own_prototypes), or by its model's head.
        """

    class Down(Payload):
        c: Prototypes  # (C, d); zeros where unknown
        known: Counts  # (C,) 1 where known

    class Up(Payload):
        c: Prototypes  # (C, d); zeros where the client has no sample
        n: Counts  # (C,) |D_ij|
        run: Statistics

    class Server(State):
        c: torch.Tensor | None = None  # as they go down
        known: torch.Tensor | None = None

    class Client(State):
        w: Tensors
        c: torch.Tensor | None = None
        known: torch.Tensor | None = None

    class Accumulator(State):
        c: torch.Tensor | None = None  # (C, d) float64 sums
        n: torch.Tensor | None = None  # (C,) their weights

    # -- what crosses ------------------------------------------------------------------------------
    def sizes(self, payload, client):
        classes = len(client.class_counts)
        last = "known" if payload is self.Down else "n"
        return {"c": classes * client.features * 4, last: classes * 8}

    def prepare(self, server, host):
        return self.Server(
            c=torch.zeros(host.classes, host.features),
            known=torch.zeros(host.classes, dtype=torch.int64),
        )

    def init_client(self, x):
        return self.Client(w=x)

    def outputs(self, module, x):
        return module.head(module.features(x))

    # -- a round -----------------------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        c = down.c.to(host.device)
        known = down.known.bool().to(host.device)
        lambda_ = self.config.lambda_

        def loss(model: nn.Module, x: Inputs, y: torch.Tensor) -> torch.Tensor:
            f = model.features(x)
            target = torch.where(known[y].unsqueeze(1), c[y], f.detach())
            return F.cross_entropy(model.head(f), y) + lambda_ * F.mse_loss(f, target)

        y = host.train(client.w, loss=loss if lambda_ and bool(known.any()) else None)
        mine, n = prototypes(host.frozen(y.x), *host.data, host.classes)
        state = self.Client(w=y.x, c=down.c, known=down.known)
        return state, self.Up(c=mine, n=n, run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        n = (up.n > 0).long()
        if self.config.weighting == "samples":
            # A client may report more samples than it has, and `round.max_share` may reduce how
            # many of its samples count.
            n = up.n
            total = float(up.n.double().sum())
            if total > up.run.n:
                n = (n.double() * (up.run.n / total)).long()
        c = up.c.double() * n.unsqueeze(1)
        return self.Accumulator(
            c=c if accumulator.c is None else accumulator.c + c,
            n=n if accumulator.n is None else accumulator.n + n,
        )

    def server_update(self, accumulator, server, cohort, host):
        new = (accumulator.n > 0).unsqueeze(1)
        mean = (accumulator.c / accumulator.n.clamp(min=1).unsqueeze(1)).float()
        return self.Server(
            c=torch.where(new, mean, server.c), known=server.known | (accumulator.n > 0).long()
        )

    # -- what is evaluated -------------------------------------------------------------------------
    def personal_model(self, client, local, host):
        if self.config.predict == "head" or client.known is None:
            return local
        candidates = client.known.bool()
        if self.config.predict == "own_prototypes":
            candidates = candidates & torch.as_tensor(host.class_counts > 0)
        if not bool(candidates.any()):
            return local
        model = host.frozen(local)
        c = client.c.to(host.device)
        candidates = candidates.to(host.device)

        def outputs(x: Inputs) -> torch.Tensor:
            apart = torch.cdist(model.features(x).flatten(1), c).square()
            return -torch.where(candidates, apart, FAR)

        return outputs

    def beside(self, client):
        return {} if client.c is None else {"prototypes": client.c, "known": client.known}


@torch.no_grad()
def prototypes(
    model: nn.Module, x: Inputs, y: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ((C, d) float32 mean features by class, (C,) samples) on the CPU, in batches of the
    order given.
    """
    parts = [model.features(part).flatten(1).double() for part in x.split(BATCH)]
    f = torch.cat(parts).cpu()
    y = y.cpu()
    n = torch.bincount(y, minlength=classes)
    total = torch.zeros(classes, f.shape[1], dtype=torch.float64).index_add_(0, y, f)
    return (total / n.clamp(min=1).unsqueeze(1)).float(), n

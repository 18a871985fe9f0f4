"""FedRDS: Lv et al., "FedRDS: Federated Learning on Non-IID Data via Regularization and Data
Sharing", Applied Sciences 13(23):12962, 2023 (doi:10.3390/app132312962), Algorithm 1.

w^t      global model
D'       the server's share beta of the training data (`data.public.fraction`)
alpha    the part of D' that each client gets, once
sigma_k  the weight of the regulariser; constant through a round

    loss = CE + sigma_k / 2 ||w - w^t||^2,  over private and shared samples

What the paper leaves open:
- sigma_k. Eq. 4 has sigma_k = exp(cos(v_k, w^t)), in [0.37, 2.72], v_k being client k's model after
  its last participation. But section 4.7 tunes a fixed sigma and finds 0.01 best; both cannot hold.
  Here it is that constant, sigma0. In runs cos stays between 0.947 and 0.9999, so that sigma_k of
  Eq. 4 hardly changes: it is about 2.7.
- Clients share "the same data" in the paper, which may mean one draw for all clients, or draws from
  one pool, as here: each client has a draw of its own.
- n_k in the mean (Eq. 9) counts shared samples too.
- The "pre-trained model" of step 3 is trained for `pretrain_epochs` on D' at the server, none by
  default: the paper does not say on what, nor how long. `model.weights` can name another model.

The ablations of Fig. 6 are options: `data.public.fraction: 0` is regularisation alone, `sigma0: 0`
is data sharing alone. configs/papers/readings.py has Eq. 4 and one draw for all as subclasses.
"""

import numpy as np
import torch

from fednet import seeds
from fednet.algorithms.base import *
from fednet.plain import part_of
from fednet.training.samples import take

LABEL_BYTES = 8  # int64
PRETRAIN_BATCH = 64


@algorithm("fedrds")
class FedRDS(Algorithm):
    """A shared part of the data at every client, and a pull to the global model."""

    paper = "Lv et al., Applied Sciences 2023 (doi:10.3390/app132312962)"
    uses_public = True

    class Config(WeightedConfig):
        alpha: Fraction = 0.5
        """Share of the server's samples D' that each client gets once."""
        sigma0: NonNegative = 0.01
        """The regulariser's weight sigma_k; 0: no regulariser."""
        pretrain_epochs: Count = 0
        """Epochs for which the server trains the first model on D' (step 3)."""

    class Enrolment(Payload):
        samples: Shared

    class Server(State):
        x: Tensors
        draw: int = 0  # key of the clients' draws from D'

    class Client(State):
        x: Inputs | None = None  # shared samples, raw: (n, ...) or a dict
        y: torch.Tensor | None = None

    # -- initialisation (steps 1-3) ----------------------------------------------------------------
    def prepare(self, server, host):
        if host.public is None:
            return server
        server = server.replace(draw=int(host.rng("shared").integers(2**62)))
        epochs = self.config.pretrain_epochs
        if not epochs:
            return server
        samples = Samples(host.public_inputs[0], host.public.train[1])
        fitted = host.fit(server.x, samples, epochs=epochs, lr=host.lr, batch_size=PRETRAIN_BATCH)
        return server.replace(x=fitted)

    def enroll(self, server, client_id, host):
        if host.public is None:
            return None
        x, y = host.public.train
        draws = seeds.rng(server.draw, "shared/rows", client=client_id)  # whenever it joins
        rows = draws.choice(len(y), part_of(self.config.alpha, len(y)), replace=False)
        which = torch.from_numpy(np.sort(rows))
        return self.Enrolment(samples=Samples(take(x, which), y[which])) if len(which) else None

    def receive_enrolment(self, client, payload, host):
        return client.replace(x=payload.samples.x, y=payload.samples.y)

    def sizes(self, payload, client):
        if payload is not self.Enrolment:
            return {}
        n = part_of(self.config.alpha, client.public_n)
        return {"samples": n * (client.sample_nbytes + LABEL_BYTES)}

    # -- a round -----------------------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        sigma = self.sigma(client, down.x)
        host.report(sigma=sigma)
        more = None if client.y is None else Samples(client.x, client.y)
        # Local gradient: grad l_k + sigma (w - w^t).
        y = host.train(down.x, proximal=sigma, more=more)
        return client, self.Up(x=y.x, run=y.run)

    def sigma(self, client, w):
        """Returns sigma_k of this round, in which w is the global model."""
        return self.config.sigma0

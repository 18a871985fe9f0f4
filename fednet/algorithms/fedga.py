"""FedGA: Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning",
AAAI 2022 (arXiv:2106.13897).

w     global model
g_i   gradient of client i's mean loss at w
g     mean of g_i over the participants
beta  displacement: client i starts its local training from w - beta (g - g_i)

`mode: exact` has two exchanges a round: gradients first, then training. The server takes the mean
of the updates w - w_i: with the same participants in both exchanges the displacements sum to 0.

`mode: stale` has one exchange and no second pass over the data, which is what FedDPC's
Table 1 says FedGA costs: g_i is the client's mean gradient over its last training, (start - w_i) /
(eta_l tau_i), and g the server's mean of those of the last round. A client that has not trained yet
is not displaced. tau_i is its number of steps, under momentum rho the effective number. The
displacements of a round's participants do not sum to 0 then, so the server takes the mean of
start - w_i: with the mean of the models each displacement would return in the next g.
"""

from typing import Literal

from fednet.algorithms.base import *
from fednet.training.optimizers import tau

STALE_FORBIDS = {
    "lr": "the server divides by it for the mean gradient",
    "keep_optimizer": "a gradient is divided by tau(K, rho), of momentum that starts at zero",
    "local_schedule": "a gradient is divided by eta tau, one rate for all steps",
}


@algorithm("fedga")
class FedGA(Algorithm):
    """Clients start displaced by the difference of their gradient to the mean gradient."""

    paper = "Dandi, Barba, Jaggi, AAAI 2022 (arXiv:2106.13897)"
    weighting = "uniform"  # the mean over clients is plain

    class Config(AlgorithmConfig):
        beta: NonNegative = 0.1
        """Displacement beta: a client starts from w - beta (g - g_i); 0: FedAvg.
        """
        mode: Literal["exact", "stale"] = "exact"
        """exact: two exchanges per round, gradients first; stale: one, with the gradients of each
        client's last training.
        """

    class Ask(Payload):  # exact, trip 1
        x: Weights

    class Gradient(Payload):
        g: Control  # g_i
        run: Statistics

    class Mean(Payload):  # exact, trip 2
        g: Control

    class Down(Payload):  # stale
        x: Weights
        g: Control

    class Up(Payload):
        d: Delta  # exact: w - w_i; stale: start - w_i
        run: Statistics

    class Server(State):
        x: Tensors
        g: Tensors | None = None  # exact: between the trips only
        asked: int = 0  # clients whose gradient is in g

    class Client(State):
        x: Tensors | None = None  # exact: the w of trip 1, between the trips only
        g: Tensors | None = None  # g_i

    class Accumulator(State):
        d: TwoSums  # of what training did; stale: and of the pseudo-gradients
        g: Sum  # exact, first trip: of g_i
        trained: int = 0  # stale: clients that have a pseudo-gradient

    exchanges = (Exchange(Ask, Gradient, "gradient"), Exchange(Mean, Up, "train"))

    def __init__(self, config=None, clients=1):
        super().__init__(config, clients)
        if self.config.mode == "stale":
            self.exchanges = (Exchange(self.Down, self.Up, "train"),)
            self.forbids = STALE_FORBIDS

    def init_server(self, x):
        return self.Server(x=x, g=x.params.zeros_like() if self.config.mode == "stale" else None)

    def broadcast(self, server, phase, client_id):
        if self.config.mode == "stale":
            return self.Down(x=server.x, g=server.g)
        return self.Ask(x=server.x) if phase == 0 else self.Mean(g=server.g)

    def displaced(self, x, g, g_i):
        """w_i^0 = w - beta (g - g_i)."""
        beta = self.config.beta
        if g_i is None or not beta:
            return x
        return x.with_vector(blockwise(lambda x, g, g_i: x - beta * (g - g_i), x, g, g_i))

    def client_update(self, phase, client, down, host):
        if self.config.mode == "stale":
            start = self.displaced(down.x, down.g, client.g)
            y = host.train(start)
            d = start - y.x
            g_i = client.g
            if y.run.steps:
                g_i = d.params / (host.lr * tau(y.run.steps, host.momentum))
            return self.Client(g=g_i), self.Up(d=d.with_buffers(y.x), run=y.run)
        if phase == 0:
            found = host.gradient(down.x)
            g_i = found.x.params
            return self.Client(x=down.x, g=g_i), self.Gradient(g=g_i, run=found.run)
        y = host.train(self.displaced(client.x, down.g, client.g))
        return self.Client(), self.Up(d=(client.x - y.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        if isinstance(up, self.Gradient):
            return self.Accumulator(d=accumulator.d, g=accumulator.g.add(up.g))
        trained = self.config.mode == "stale" and up.run.steps > 0
        share = 1.0 / (host.lr * tau(up.run.steps, host.momentum)) if trained else 0.0
        return self.Accumulator(
            d=accumulator.d.add(up.d, share), g=accumulator.g, trained=accumulator.trained + trained
        )

    def server_update(self, accumulator, server, cohort, host):
        if self.config.mode == "exact" and host.phase == 0:
            return self.Server(x=server.x, g=accumulator.g.mean(), asked=accumulator.g.count)
        d = accumulator.d.plain
        if d.count < server.asked:
            host.warn(
                f"fedga: {server.asked - d.count} of {server.asked} clients were lost between the "
                f"trips; the displacements of the others do not cancel."
            )
        x = d.step(server.x, -1.0)
        if self.config.mode == "exact":
            return self.Server(x=x)
        g = accumulator.d.weighted(accumulator.trained) if accumulator.trained else server.g
        return self.Server(x=x, g=g)

"""FedGA: Dandi, Barba, Jaggi, "Implicit Gradient Alignment in Distributed and Federated Learning",
AAAI 2022 (arXiv:2106.13897).

w     global model
g_i   gradient of client i's mean loss at w
g     mean of g_i over the participants
beta  displacement: client i starts its local training from w - beta (g - g_i)

A round has two exchanges: gradients first, then training. The server takes the mean of the updates
w - w_i: with the same participants in both exchanges the displacements sum to 0.
"""

from fednet.algorithms.base import *


@algorithm("fedga")
class FedGA(Algorithm):
    """Clients start displaced by the difference of their gradient to the mean gradient."""

    paper = "Dandi, Barba, Jaggi, AAAI 2022 (arXiv:2106.13897)"
    weighting = "uniform"  # the mean over clients is plain

    class Config(AlgorithmConfig):
        beta: NonNegative = 0.1
        """Displacement beta: a client starts from w - beta (g - g_i); 0: FedAvg.
        """

    class Ask(Payload):
        x: Weights

    class Gradient(Payload):
        g: Control  # g_i
        run: Statistics

    class Mean(Payload):
        g: Control

    class Up(Payload):
        d: Delta  # w - w_i
        run: Statistics

    class Server(State):
        x: Tensors
        g: Tensors | None = None  # between the exchanges only
        asked: int = 0  # clients whose gradient is in g

    class Client(State):  # w and g_i, between the exchanges only
        x: Tensors | None = None
        g: Tensors | None = None

    class Accumulator(State):
        d: Sum
        g: Sum

    exchanges = (Exchange(Ask, Gradient, "gradient"), Exchange(Mean, Up, "train"))

    def broadcast(self, server, phase, client_id):
        return self.Ask(x=server.x) if phase == 0 else self.Mean(g=server.g)

    def client_update(self, phase, client, down, host):
        if phase == 0:
            found = host.gradient(down.x)
            g_i = found.x.params
            return self.Client(x=down.x, g=g_i), self.Gradient(g=g_i, run=found.run)
        x = client.x
        if beta := self.config.beta:
            start = blockwise(lambda x, g, g_i: x - beta * (g - g_i), x, down.g, client.g)
            x = x.with_vector(start)
        y = host.train(x)
        return self.Client(), self.Up(d=(client.x - y.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        if isinstance(up, self.Gradient):
            return accumulator.replace(g=accumulator.g.add(up.g))
        return accumulator.replace(d=accumulator.d.add(up.d))

    def server_update(self, accumulator, server, cohort, host):
        if host.phase == 0:
            return self.Server(x=server.x, g=accumulator.g.mean(), asked=accumulator.g.count)
        d = accumulator.d
        if d.count < server.asked:
            host.warn(
                f"fedga: {server.asked - d.count} of {server.asked} clients were lost between the "
                f"trips; the displacements of the others do not cancel."
            )
        return self.Server(x=d.step(server.x, -1.0))

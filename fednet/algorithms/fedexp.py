"""FedExP: Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation",
ICLR 2023 (arXiv:2301.09604), Algorithm 1.

w  global model    Delta_i = w - w_i    D  mean Delta_i    m  participants
eta_g = max(1, sum_i ||Delta_i||^2 / (2 m (||D||^2 + eps)))

The model that is evaluated is (w^{t+1} + w^t) / 2 (after round 1: w^1); clients always get w^{t+1}
itself. Norms are over trainable parameters. eps follows the square of the learning rate's decay, as
Delta_i does. `weighting: samples` is the authors' weighted form of both sums; their code multiplies
eps by m.
"""

import torch

from fednet.algorithms.base import *


@algorithm("fedexp")
class FedExP(Algorithm):
    """The server extrapolates: its step grows with how much the clients' updates disagree."""

    paper = "Jhunjhunwala, Wang, Joshi, ICLR 2023 (arXiv:2301.09604)"

    class Config(WeightedConfig):
        eps: NonNegative = 1e-3
        """Constant epsilon in the denominator of the server step."""
        weighting: Weighting = "uniform"

    class Up(Payload):
        d: Delta  # Delta_i
        run: Statistics

    class Server(State):
        x: Tensors
        last: Tensors | None = None  # the x before
        updates: int = 0

    class Accumulator(State):
        d: Sum
        squares: float = 0.0  # sum of a_i ||Delta_i||^2, a_i not yet normalised

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        return client, self.Up(d=(down.x - y.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        a = self.weight(up.run)
        return self.Accumulator(
            d=accumulator.d.add(up.d, a), squares=accumulator.squares + a * up.d.dot(up.d)
        )

    def server_update(self, accumulator, server, cohort, host):
        d = accumulator.d
        a = accumulator.d.weight
        eps = self.config.eps * host.lr_decay**2
        mean_square = float(torch.dot(d.vector, d.vector)) / a**2  # ||D||^2
        below = 2 * (mean_square + eps)
        eta_g = max(1.0, accumulator.squares / a / below) if below else 1.0
        host.report(eta_g=eta_g)
        return self.Server(x=d.step(server.x, -eta_g), last=server.x, updates=server.updates + 1)

    def global_model(self, server):
        """Returns the averaged iterate; w^1 after the first update."""
        return (server.x + server.last) / 2 if server.updates > 1 else server.x

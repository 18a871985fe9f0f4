"""FedCM: Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021
(arXiv:2106.10874).

w      global model        Delta  the last round's mean step, per unit of eta_l and local step
alpha  weight of a client's own gradient in v = alpha g + (1 - alpha) Delta

Departs from the paper: the server steps along the clients' mean update with eta_g. The paper steps
along the normalised Delta, and its eta_g is eta_g * eta_l * K here. Clients take different numbers
of steps K_i, so each update is normalised by its own K_i.
"""

from fednet.algorithms.base import *


@algorithm("fedcm")
class FedCM(Algorithm):
    """Each local step is a mix of the client's gradient and the federation's last direction."""

    paper = "Xu et al., 2021 (arXiv:2106.10874)"
    weighting = "uniform"  # the mean over clients is plain
    sgd_only = True
    momentum_free = True
    forbids = {
        "lr": "the server divides by it for the direction Delta",
        "local_schedule": "Delta is divided by eta K, one rate for all steps",
    }

    class Config(AlgorithmConfig):
        alpha: Fraction = 0.1
        """Share of the client's own gradient in each local step; the rest is the last global
        direction Delta.
        """
        server_lr: Positive = 1.0
        """Server learning rate eta_g."""

    class Down(Payload):
        x: Weights
        delta: Control

    class Up(Payload):
        d: Delta  # w - w_i
        run: Statistics

    class Server(State):
        x: Weights
        delta: Tensors

    class Accumulator(State):
        d: TwoSums  # of Delta_i, and of Delta_i / (eta_l K_i)

    def client_update(self, phase, client, down, host):
        alpha = self.config.alpha  # v = alpha g + (1 - alpha) Delta
        y = host.train(
            down.x, scale_grad=alpha, add_to_grad=(1 - alpha) * down.delta if alpha < 1 else None
        )
        return client, self.Up(d=(down.x - y.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        share = 1.0 / (host.lr * up.run.steps) if up.run.steps else 0.0
        return self.Accumulator(d=accumulator.d.add(up.d, share))

    def server_update(self, accumulator, server, cohort, host):
        d = accumulator.d.plain
        # mean_i Delta_i / (eta_l K_i)
        return self.Server(
            x=d.step(server.x, -self.config.server_lr), delta=accumulator.d.weighted(d.count)
        )

"""FedAsync: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", 2019 (arXiv:1903.03934),
Algorithm 1.

x_t     global model after t updates      x_new  a reply: local SGD from x_tau on the worker's loss
t - tau staleness of the reply                   + rho/2 ||x - x_tau||^2
alpha   mixing weight                     s      see `fednet.algorithms.staleness`

    alpha_t = alpha s(t - tau);    x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new

Each reply makes an update of its own (`schedule.buffer: 1`). In a synchronous round, the replies
are mixed in one after the other. FLGo's public implementation takes the mean of what each reply
alone would give, and has no proximal term. The staleness is 0 if no other update came since the
reply's model was sent. The model's buffers are mixed in the same way.
"""

from fednet.algorithms.base import *
from fednet.algorithms.staleness import Staleness, weight


@algorithm("fedasync")
class FedAsync(Algorithm):
    """Each reply is mixed into the global model as it comes, the less the staler it is."""

    paper = "Xie et al., 2019 (arXiv:1903.03934)"
    weighting = "uniform"  # alpha alone says what a reply counts
    own_schedule = {"mode": "async", "buffer": 1}

    class Config(AlgorithmConfig):
        alpha: Fraction = 0.6
        """Mixing weight of a reply that is not stale."""
        rho: NonNegative = 0.005
        """Strength of the local proximal term rho/2 ||x - x_tau||^2; 0: none."""
        staleness: Staleness = "poly(0.5)"
        """Factor s of alpha by staleness t - tau: constant, poly(a) or hinge(a, b); the paper's
        hinge is hinge(10, 4).
        """

    class Accumulator(State):
        x: Tensors  # with the replies so far mixed in

    def refusal(self, run):
        if run.schedule.mode == "async" and run.schedule.buffer != 1:
            return "schedule.buffer", "fedasync makes an update of each reply; set it to 1."
        return None

    def client_update(self, phase, client, down, host):
        y = host.train(down.x, proximal=self.config.rho)  # adds rho (x - x_tau) to each gradient
        return client, self.Up(x=y.x, run=y.run)

    def init_accumulator(self, server, phase):
        return self.Accumulator(x=server.x)

    def accumulate(self, accumulator, server, client_id, up, host):
        alpha_t = self.config.alpha * weight(self.config.staleness, host.staleness)
        return self.Accumulator(x=mean([(accumulator.x, 1.0 - alpha_t), (up.x, alpha_t)]))

    def server_update(self, accumulator, server, cohort, host):
        return self.Server(x=accumulator.x)

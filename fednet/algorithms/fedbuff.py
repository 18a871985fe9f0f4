"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022
(arXiv:2106.06639), Algorithms 1 and 2.

x      global model           Delta_i  a reply's update y_i - x, x being the model it started from
K      replies in the buffer (`schedule.buffer`)           tau_i  its staleness
eta_g  server rate            s        1 / sqrt(1 + tau), see `fednet.algorithms.staleness`

    x <- x + eta_g / K  sum over the buffer of s(tau_i) Delta_i

The sum is divided by K, not by the sum of the weights: a buffer of stale replies makes a shorter
step. `privacy.clip` clips updates as the paper's private runs do. The model's own buffers
(BatchNorm) are averaged without regard to staleness.

Departs from the paper: a client whose update waits in the buffer is not asked again before the
buffer is applied. FLGo's public implementation has no s, and uses the clients' learning rate as
eta_g; the paper has both as here.
"""

from fednet.algorithms.base import *
from fednet.algorithms.staleness import Staleness, weight


@algorithm("fedbuff")
class FedBuff(Algorithm):
    """Every K replies, as they come, make an update, stale ones counting less."""

    paper = "Nguyen et al., AISTATS 2022 (arXiv:2106.06639)"
    weighting = "uniform"
    sums_updates = True
    own_schedule = {"mode": "async"}

    class Config(AlgorithmConfig):
        server_lr: Positive = 1.0
        """Server learning rate eta_g."""
        staleness: Staleness = "poly(0.5)"
        """Weight of a reply by its staleness: constant, poly(a) or hinge(a, b)."""

    class Up(Payload):
        d: Delta  # Delta_i
        run: Statistics

    class Accumulator(State):
        d: Sum

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        return client, self.Up(d=(y.x - down.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        return self.Accumulator(
            d=accumulator.d.add(up.d, scale=weight(self.config.staleness, host.staleness))
        )

    def server_update(self, accumulator, server, cohort, host):
        return self.Server(x=accumulator.d.step(server.x, self.config.server_lr))

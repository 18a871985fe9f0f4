"""q-FedAvg: Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", ICLR
2020 (arXiv:1905.10497), Algorithm 2.

w    global model    w_k  local model    F_k  mean loss of w on client k's training samples
L    1 / eta_l       q    how much a client's loss counts: 0 is the uniform mean

    Delta_k = L (w - w_k)
    h_k     = q F_k^(q-1) ||Delta_k||^2 + L F_k^q
    w      <- w - sum_k F_k^q Delta_k / sum_k h_k

As in the authors' code, 1e-10 is added to F_k. Both sums are divided by L here, which cancels.
Float buffers (BatchNorm's running statistics) take no part in the update: they are averaged with
the weights F_k^q, of which the paper says nothing.
"""

from fednet.algorithms.base import *

EPSILON = 1e-10


@algorithm("qfedavg")
class QFedAvg(Algorithm):
    """Clients with a higher loss count more, so that accuracies are more alike."""

    paper = "Li et al., ICLR 2020 (arXiv:1905.10497)"
    weighting = "uniform"  # losses alone say what a reply counts
    forbids = {
        "lr": "the server divides by it, as L = 1 / eta",
        "local_schedule": "L = 1 / eta is of one rate for all steps",
    }

    class Config(AlgorithmConfig):
        q: NonNegative = 1.0
        """How much clients with a higher loss count more; 0: FedAvg."""

    class Up(Payload):
        d: Delta  # w - w_k
        loss: Scalar  # F_k
        run: Statistics

    class Accumulator(State):
        d: Sum  # of F_k^q (w - w_k)
        h: float = 0.0  # sum of h_k / L

    def client_update(self, phase, client, down, host):
        loss = host.evaluate(down.x, host.data).mean_loss
        y = host.train(down.x)
        return client, self.Up(d=(down.x - y.x).with_buffers(y.x), loss=loss, run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        q = self.config.q
        loss = up.loss + EPSILON
        square = up.d.dot(up.d)
        return self.Accumulator(
            d=accumulator.d.add(up.d, loss**q),
            h=accumulator.h + q * loss ** (q - 1) * square / host.lr + loss**q,
        )

    def server_update(self, accumulator, server, cohort, host):
        host.report(step=accumulator.d.weight / accumulator.h)
        return self.Server(x=accumulator.d.step(server.x, -1.0, divisor=accumulator.h))

"""FedNova: Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization", NeurIPS 2020 (arXiv:2007.07481).

w      global model    w_i  local model    Delta_i = w - w_i    p_i  share of the samples
a_i    (K_i,) the weight of each of client i's K_i gradients in Delta_i / eta_l
d_i    = Delta_i / ||a_i||_1, the normalised update

    w <- w - tau_eff * sum_i p_i d_i,    tau_eff = sum_i p_i ||a_i||_1

With plain SGD ||a_i||_1 is K_i. The weights under momentum and under the proximal term mu follow
from one recurrence, which serves all of the paper's local solvers. The authors' code takes
sum_i p_i K_i for tau_eff where mu > 0.

In the paper no weight is negative, so that their sum is their norm. Momentum together with a strong
proximal term overshoots: with eta_l mu = 0.5 and momentum 0.9 the fifth weight is -0.64. A sum may
then be next to 0, and dividing by it would blow the client's update up. The norm counts magnitudes,
at least 1 since the last gradient has weight 1, so that d_i never exceeds the largest gradient.
"""

from fednet.algorithms.base import *

MANY = 10**6  # steps: a client may say any number, and the server must not count to it


def gradient_weight(steps: int, lr: float, momentum: float, mu: float) -> float:
    """||a_i||_1 of that many steps of SGD with momentum and a pull mu to the start."""
    if not mu and not momentum:
        return float(steps)
    # What one gradient of 1, in the first step, has moved after each of the steps, over lr: the
    # weights a_i, the last gradient's first.
    norm = moved = 0.0
    velocity = 1.0
    for _ in range(min(steps, MANY)):
        moved += velocity
        norm += abs(moved)
        velocity = momentum * velocity - mu * lr * moved
    if steps > MANY:  # the weights have long settled
        norm += (steps - MANY) * abs(moved)
    return norm


@algorithm("fednova")
class FedNova(Algorithm):
    """Updates are divided by how much their client did, then scaled together."""

    paper = "Wang et al., NeurIPS 2020 (arXiv:2007.07481)"
    sgd_only = True
    forbids = {
        "lr": "an update is divided by its steps only, so eta is taken to be one for all",
        "keep_optimizer": "||a_i||_1 is that of momentum which starts at zero",
        "local_schedule": "||a_i||_1 is that of steps at one rate",
    }

    class Config(WeightedConfig):
        mu: NonNegative = 0.0
        """Strength of the local proximal term; 0: none."""

    class Up(Payload):
        d: Delta  # Delta_i
        run: Statistics

    class Accumulator(State):
        d: Sum  # of p_i d_i, p_i not yet normalised
        effective: float = 0.0  # sum of p_i ||a_i||_1

    def client_update(self, phase, client, down, host):
        y = host.train(down.x, proximal=self.config.mu)
        return client, self.Up(d=(down.x - y.x).with_buffers(y.x), run=y.run)

    def accumulate(self, accumulator, server, client_id, up, host):
        p = self.weight(up.run)
        norm = gradient_weight(up.run.steps, host.lr, host.momentum, self.config.mu)
        return self.Accumulator(
            d=accumulator.d.add(up.d, p, scale=1.0 / norm if norm else 0.0),
            effective=accumulator.effective + p * norm,
        )

    def server_update(self, accumulator, server, cohort, host):
        tau_eff = accumulator.effective / accumulator.d.weight
        host.report(tau_eff=tau_eff)
        return self.Server(x=accumulator.d.step(server.x, -tau_eff))

"""FedSGD: the gradient-per-round baseline of McMahan et al., AISTATS 2017 (arXiv:1602.05629),
section 2.

w    global model
g_i  gradient of client i's mean loss over its whole local set at w
eta  `train.lr`

A client computes one gradient a round and takes no local step: epochs have no effect, and the batch
size changes nothing but rounding. `train.clip_norm` clips g_i and `train.weight_decay` adds wd * w
to it, as one step of SGD would. Buffers do not change, since the gradient is computed in eval mode.
"""

from fednet.algorithms.base import *


@algorithm("fedsgd")
class FedSGD(Algorithm):
    """Federated SGD: one full local gradient a client and round."""

    paper = "McMahan et al., AISTATS 2017 (arXiv:1602.05629)"
    sgd_only = True
    momentum_free = True
    forbids = {
        "lr": "the server takes the step",
        "epochs": "a round is one gradient",
        "steps": "a round is one gradient",
        "batch_size": "a gradient is over all samples",
        "local_schedule": "a round is one gradient",
    }
    summed = {"g": "weighted"}

    Config = WeightedConfig

    class Up(Payload):
        g: Delta
        run: Statistics

    class Accumulator(State):
        g: Sum

    def client_update(self, phase, client, down, host):
        found = host.gradient(down.x)
        g = found.x
        train = host.train_config
        if train.clip_norm is not None:
            g = g * min(1.0, train.clip_norm / (g.norm() + 1e-6))
        if train.weight_decay:
            g = g + train.weight_decay * down.x
        return client, self.Up(g=g, run=found.run)

    def server_update(self, accumulator, server, cohort, host):
        # w <- w - eta sum (n_i / n) g_i
        return self.Server(x=server.x.with_vector(accumulator.g.step(server.x, -host.lr).vector))

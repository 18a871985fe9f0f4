"""DiLoCo: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (arXiv:2311.08105), Algorithm 1.

theta    global model        theta_i  replica of worker i after H inner steps (`train.steps`)
Delta    mean of theta - theta_i: the outer gradient
b        momentum of the outer optimizer, mu its decay; eta  its rate

    inner:  H steps of AdamW from theta (`train.optimizer: adamw`; with sgd this is FedAvgM, with
            Nesterov's momentum in the place of Polyak's)
    outer:  Nesterov's momentum, as torch's SGD has it
            b <- mu b + Delta;  theta <- theta - eta (Delta + mu b)

Departs from the paper: its workers keep the moments of their AdamW from round to round, here they
start at zero with each task unless `train.keep_optimizer` is true. Workers all count the same, as
in Algorithm 1; `weighting: samples` is for shards of different sizes. Buffers are averaged and take
no part.
"""

from fednet.algorithms.base import *


@algorithm("diloco")
class DiLoCo(Algorithm):
    """Many local steps of AdamW, and Nesterov's momentum at the server over their mean update."""

    paper = "Douillard et al., 2023 (arXiv:2311.08105)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        outer_lr: Positive = 0.7
        """Outer (server) learning rate eta."""
        outer_momentum: Fraction = 0.9
        """Nesterov momentum mu of the outer optimizer."""
        weighting: Weighting = "uniform"

    class Server(State):
        x: Weights
        b: Tensors

    def server_update(self, accumulator, server, cohort, host):
        mean = accumulator.x.mean()
        mu = self.config.outer_momentum
        eta = self.config.outer_lr

        def step(mean, x, b):
            delta = x - mean
            b_new = mu * b + delta
            return x - eta * (delta + mu * b_new), b_new

        x, b = blockwise(step, mean, server.x, server.b)  # OuterOpt
        return self.Server(x=mean.with_vector(x), b=server.b.with_vector(b))

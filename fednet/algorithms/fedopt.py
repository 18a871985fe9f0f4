"""Server optimizers. FedAdam, FedYogi and FedAdagrad: Reddi et al., "Adaptive Federated
Optimization", ICLR 2021 (arXiv:2003.00295), Algorithm 2. FedAvgM: Hsu, Qi and Brown, "Measuring the
Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019
(arXiv:1909.06335).

x      global model    x_i  local model    Delta  mean of x_i - x: the server's pseudo-gradient
m, v   first and second moment; beta_1, beta_2 their decay; tau  degree of adaptivity
eta    server rate

    adaptive:  m <- beta_1 m + (1 - beta_1) Delta;  v by the method
               x <- x + eta m / (sqrt(v) + tau)
    momentum:  v <- beta v + Delta;  x <- x + eta v

v starts at tau^2, the least that the paper allows. There is no bias correction, as in the paper.
Delta is weighted by samples; `weighting: uniform` is as its Algorithm 2 is printed. Buffers are
averaged and take no part. FedAvgM's momentum is the equation of its section 4.2; the experiments
there take Nesterov's in its place, which is `diloco` with outer_lr 1, weighting samples and plain
SGD.
"""

import torch

from fednet.algorithms.base import *


@algorithm("fedavgm")
class FedAvgM(Algorithm):
    """Federated averaging with momentum at the server."""

    paper = "Hsu et al., 2019 (arXiv:1909.06335)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        beta: Fraction = 0.9
        """Server momentum beta: the share of v that is kept from round to round."""
        server_lr: Positive = 1.0
        """Server learning rate eta."""

    class Server(State):
        x: Weights
        v: Tensors

    def server_update(self, accumulator, server, cohort, host):
        mean = accumulator.x.mean()
        beta = self.config.beta
        eta = self.config.server_lr

        def step(mean, x, v):
            v_new = beta * v + (mean - x)
            return x + eta * v_new, v_new

        x, v = blockwise(step, mean, server.x, server.v)
        return self.Server(x=mean.with_vector(x), v=server.v.with_vector(v))


class Adaptive(Algorithm):
    """What the three adaptive methods share; each says how v follows Delta^2."""

    paper = "Reddi et al., ICLR 2021 (arXiv:2003.00295)"
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        server_lr: Positive = 0.01
        """Server learning rate eta."""
        beta_1: Fraction = 0.9
        """Decay of the server's first moment (momentum)."""
        beta_2: Fraction = 0.99
        """Decay of the server's second moment v."""
        tau: Positive = 1e-3
        """Adaptivity tau, added to sqrt(v); v starts at tau^2."""

    class Server(State):
        x: Weights
        m: Tensors
        v: Tensors

    def second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Returns the next v. square: Delta^2, elementwise."""
        raise NotImplementedError

    def init_server(self, x):
        zero = x.params.zeros_like()
        return self.Server(
            x=x, m=zero, v=zero.with_vector(torch.full_like(zero.vector, self.config.tau**2))
        )

    def server_update(self, accumulator, server, cohort, host):
        mean = accumulator.x.mean()
        c = self.config

        def step(mean, x, m, v):
            delta = mean - x
            m_new = c.beta_1 * m + (1 - c.beta_1) * delta
            v_new = self.second(v, delta * delta)
            return x + c.server_lr * m_new / (v_new.sqrt() + c.tau), m_new, v_new

        x, m, v = blockwise(step, mean, server.x, server.m, server.v)
        return self.Server(
            x=mean.with_vector(x), m=server.m.with_vector(m), v=server.v.with_vector(v)
        )


@algorithm("fedadagrad")
class FedAdagrad(Adaptive):
    """Adagrad at the server."""

    class Config(WeightedConfig):
        server_lr: Positive = 0.1
        """Server learning rate eta."""
        beta_1: Fraction = 0.0
        """Decay of the server's first moment (momentum)."""
        tau: Positive = 1e-3
        """Adaptivity tau, added to sqrt(v); v starts at tau^2."""

    def second(self, v, square):
        return v + square


@algorithm("fedadam")
class FedAdam(Adaptive):
    """Adam at the server."""

    def second(self, v, square):
        return self.config.beta_2 * v + (1 - self.config.beta_2) * square


@algorithm("fedyogi")
class FedYogi(Adaptive):
    """Yogi at the server."""

    def second(self, v, square):
        return v - (1 - self.config.beta_2) * square * torch.sign(v - square)

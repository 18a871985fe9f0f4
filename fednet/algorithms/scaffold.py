"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020 (arXiv:1910.06378), Algorithm 1.

x  global model    c  server variate    c_i  client variate    y    local model
K  local steps     N  all clients       S    participants      tau  effective local steps under
eta_l, eta_g       local and server rate                            momentum

Departures from the paper:
- Buffers (BatchNorm statistics) are averaged and have no variate.
- Under momentum rho, option II divides by tau(K, rho) instead of K. Divided by K, c_i would be too
  large by about 1 / (1 - rho), and the method diverges.

configs/papers/readings.py has what other code computes, such as NIID-Bench's, as subclasses.
"""

from typing import Literal

from fednet.algorithms.base import *
from fednet.training.optimizers import tau


@algorithm("scaffold")
class Scaffold(Algorithm):
    """Control variates correct each client's drift."""

    paper = "Karimireddy et al., ICML 2020 (arXiv:1910.06378)"
    summed = {"dy": "weighted", "dc": "plain"}
    sgd_only = True
    forbids = {
        "keep_optimizer": "c_i is divided by tau(K, rho), of momentum which starts at zero",
        "local_schedule": "c_i is divided by eta K, one rate for all steps",
    }

    class Config(WeightedConfig):
        server_lr: Positive = 1.0
        """Server learning rate eta_g."""
        option: Literal["II", "I"] = "II"
        """How c_i is updated: II from the local update; I from the full local gradient at x, one
        more pass over the data.
        """
        weighting: Weighting = "uniform"
        """Weights of the clients' y - x in the mean; c is always updated uniformly."""

    class Down(Payload):
        x: Weights
        c: Control

    class Up(Payload):
        dy: Delta  # y - x
        dc: Control  # c_i+ - c_i
        run: Statistics

    class Server(State):
        x: Weights
        c: Tensors

    class Client(State):
        c: Tensors

    class Accumulator(State):
        dy: Sum
        dc: Sum

    def init_client(self, x):
        return self.Client(c=x.params.zeros_like())

    def with_more_clients(self, server, before, now):
        return server.replace(c=before / now * server.c)  # c_i of a new client is 0

    def client_update(self, phase, client, down, host):
        x = down.x
        c = down.c
        c_i = client.c
        y, steps = self.train(x, c - c_i, host)
        if self.config.option == "II" and steps:
            path = host.lr * steps

            def after(x, y, c, c_i):
                c_new = c_i - c + (x - y) / path  # line 12 (ii)
                return c_new, c_new - c_i, y - x

            c_new, dc, dy = blockwise(after, x, y.x, c, c_i)
            return self.Client(c=c_i.with_vector(c_new)), self.Up(
                dy=x.with_vector(dy).with_buffers(y.x), dc=c_i.with_vector(dc), run=y.run
            )
        c_new = host.gradient(x).x.params if self.config.option == "I" else c_i  # line 12 (i)
        return self.Client(c=c_new), self.Up(dy=y.x - x, dc=c_new - c_i, run=y.run)  # lines 13-14

    def train(self, x, correction, host):
        """Returns (what was trained, the effective number of its steps)."""
        y = host.train(x, add_to_grad=correction)  # line 10
        return y, tau(y.run.steps, host.momentum)

    def server_update(self, accumulator, server, cohort, host):
        x = accumulator.dy.step(server.x, self.config.server_lr)  # line 17
        c = accumulator.dc.step(server.c, divisor=host.clients)  # line 17: N, not |S|
        return self.Server(x=x, c=c)

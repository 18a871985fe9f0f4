"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020 (arXiv:1910.06378), Algorithm 1.

x  global model    c  server variate    c_i  client variate    y    local model
K  local steps     N  all clients       S    participants      tau  effective local steps under
eta_l, eta_g       local and server rate                            momentum

Departures from the paper:
- Buffers (BatchNorm statistics) are averaged and have no variate.
- Under momentum rho, option II divides by tau(K, rho) instead of K. Divided by K, c_i would be too
  large by about 1 / (1 - rho), and the method diverges.
- `correction: post` is another consistent variant: a plain momentum step, then
  y <- y - eta_l (c - c_i), divided by K. Option I together with `post` and momentum is refused: its
  c_i is one plain gradient, but momentum moves y by about 1 / (1 - rho) gradients a step.

`weighting: samples`, `variates: random` and `mean_over: participants`, with `correction: post`,
option II and momentum, are the SCAFFOLD of NIID-Bench (Li et al., ICDE 2022, arXiv:2102.02079:
experiments.py) as it was until August 2022, when the divisor |S|, by which c is N / |S| times too
large, was corrected (its issue #12).
"""

from typing import Literal

from fednet.algorithms.base import *
from fednet.errors import ConfigError
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
        correction: Literal["grad", "post"] = "grad"
        """grad: c - c_i is added to each gradient; post: y moves by it after each momentum step."""
        weighting: Weighting = "uniform"
        """Weights of the clients' y - x in the mean; c is always updated uniformly."""
        divisor: Literal["tau", "steps"] = "tau"
        """What option II divides by: tau, the effective steps under momentum, or the number of
        steps K.
        """
        variates: Literal["zero", "random"] = "zero"
        """What c and c_i start as: zero, or a network's random initial weights, as in NIID-Bench.
        """
        mean_over: Literal["all", "participants"] = "all"
        """What the change of c is divided by: the number of all clients N, or of the participants.
        """

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

    def refusal(self, run):
        if (self.config.option, self.config.correction) == ("I", "post") and run.train.momentum:
            return (
                "algorithm.correction",
                f"post with option I corrects too little under momentum, here "
                f"{run.train.momentum:g}; take correction: grad, option: II, or train.momentum: 0.",
            )
        return None

    def init_server(self, x):
        return self.Server(x=x, c=self.first(x))

    def with_more_clients(self, server, before, now):
        if self.config.variates != "zero":
            raise ConfigError(
                "algorithm.variates: no client can join the run, since c is the mean over all N "
                "variates, and those of new clients are not 0; start a run under another name."
            )
        if self.config.mean_over == "participants":
            return server
        return server.replace(c=before / now * server.c)  # c_i of a new client is 0

    def init_client(self, x):
        return self.Client(c=self.first(x))

    def first(self, x):
        """What c and all c_i start at. Random: the initial model with each tensor's entries in
        reverse, weights drawn as a network's are, at both ends without sending them.
        """
        c = x.params.zeros_like()
        if self.config.variates == "zero":
            return c
        turned = {name: t.flatten().flip(0).view_as(t) for name, t in x.params.items()}
        return Tensors.pack(c.layout, turned)

    def client_update(self, phase, client, down, host):
        x = down.x
        c = down.c
        c_i = client.c
        if self.config.correction == "grad":
            y = host.train(x, add_to_grad=c - c_i)  # line 10
            momentum = host.momentum if self.config.divisor == "tau" else 0.0
            steps = tau(y.run.steps, momentum)
        else:
            y = host.train(x, add_to_step=-host.lr * (c - c_i))
            steps = float(y.run.steps)
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

    def server_update(self, accumulator, server, cohort, host):
        x = accumulator.dy.step(server.x, self.config.server_lr)  # line 17
        # Line 17: N, not |S|.
        divisor = host.clients if self.config.mean_over == "all" else None
        return self.Server(x=x, c=accumulator.dc.step(server.c, divisor=divisor))

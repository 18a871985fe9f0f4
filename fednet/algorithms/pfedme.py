"""pFedMe: Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS
2020 (arXiv:2006.08848), Algorithm 1.

w      global model    w_i  client i's copy of it    theta_i  personal model of client i
R      local rounds    K    steps on one minibatch   lambda   strength of the pull of theta_i to w_i
eta    rate of w_i     beta weight of the new mean in w

    each local round, with one minibatch D:
        theta_i by K steps on f_i(theta; D) + lambda/2 ||theta - w_i||^2
        w_i <- w_i - eta lambda (w_i - theta_i)
    server: w <- (1 - beta) w + beta * mean w_i

R is the number of steps that the run's other methods take (`train.steps`, or epochs times batches);
`train.lr` is the rate of the K steps. As in the authors' code, theta_i starts at w and goes on from
where the previous local round left it.

The authors' code differs in two points: the mean of w_i is weighted by samples (`weighting:
samples`; the paper's is plain), and each of the K steps adds 0.001 theta_i to the gradient
(`train.weight_decay: 0.001` does so here).
"""

import torch
from torch import nn

from fednet.algorithms.base import *


@algorithm("pfedme")
class PFedMe(Algorithm):
    """Personal models by the Moreau envelope; clients move the global model toward them."""

    paper = "Dinh et al., NeurIPS 2020 (arXiv:2006.08848)"
    personalised = True
    forbids = {
        "keep_optimizer": "each of the R steps solves a problem of its own, from its beginning",
        "local_schedule": "the K steps for theta_i are those of one problem, at one rate",
    }

    class Config(WeightedConfig, rename={"lambda_": "lambda", "k": "K"}):
        k: Positive = 5
        """Steps K on one minibatch for the personal model theta_i."""
        lambda_: Positive = 15.0
        """Strength of the pull of theta_i to the local model w_i."""
        eta: Positive = 0.005
        """Learning rate of w_i."""
        beta: Positive = 1.0
        """Weight of the clients' mean in the new global model; 1: the mean itself."""
        weighting: Weighting = "uniform"

    class Client(State):
        theta: Tensors | None = None

    def client_update(self, phase, client, down, host):
        w = theta = down.x
        train = host.train_config
        loss = 0.0
        steps = train.steps  # R
        if steps is None:
            steps = train.epochs * -(-host.n // train.batch_size)
        for r in range(steps):
            found = host.train(
                theta,
                steps=int(self.config.k),
                loss=on_one_batch(host.task),
                proximal=self.config.lambda_,
                toward=w,
                stream=f"local round {r}",
            )
            theta = found.x
            w = w.plus(w - theta, -self.config.eta * self.config.lambda_).with_buffers(theta)
            loss += found.run.loss
        run = LocalRun(n=host.n, steps=steps, loss=loss / steps if steps else 0.0)
        return self.Client(theta=theta), self.Up(x=w, run=run)

    def server_update(self, accumulator, server, cohort, host):
        mean = accumulator.x.mean()
        x = server.x.plus(mean - server.x, self.config.beta)
        return self.Server(x=x.with_buffers(mean))

    def personal_model(self, client, local, host):
        return local if client.theta is None else client.theta


def on_one_batch(task: LearningTask) -> Loss:
    """Returns a loss that keeps to the first batch it is given: K steps on one minibatch."""
    kept: list[tuple[Inputs, torch.Tensor]] = []

    def loss(model: nn.Module, x: Inputs, y: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append((x, y))
        x, y = kept[0]
        return task.loss(model(x), y)

    return loss

"""FedPDC: Zhang and Zhang, "FedPDC: Federated Learning for Public Dataset Correction", 2023
(arXiv:2302.12503), Algorithms 2 and 3.

w^t, w_i  global and local model      S_s  the server's public set, balanced over classes
p_i       accuracy of w_i on S_s, 0..1: the weight of w_i in the next global model (Eq. 4)
P         the sum of the participants' p_i, by which Eq. 4 divides
p_send_i  what a participant is sent: its p_i of the round before, or 1 if it took no part in it
lambda_n  weight of the penalty in round n (from 1): a constant, or 0.5 n (Eq. 9)

What the paper leaves open:
- The penalty lambda (1 - p) of Eq. 6 and 8 does not depend on w, so its gradient is 0. `penalty:
  literal` therefore trains as FedAvg does, whatever lambda is, and reports the cross-entropy as its
  loss, so that the losses of two lambdas can be compared. Two other readings have an effect:
  `prox` adds lambda (1 - p) / 2 ||w - w^t||^2, from which the paper's proof (A.1) starts; `scale`
  makes the loss (1 + lambda (1 - p)) CE.
- Each w_i is evaluated once, after training (the order of section IV-A). This p_i weighs it in the
  round's mean and is sent to the client in the next round. If all p_i are 0, all models count the
  same.
- Algorithm 3 has 0.5 t and Eq. 9 has 0.5 n, which differ in where the count starts: n is used.
- Algorithms 2 and 3 contradict Eq. 6: they send p_t, the global model's accuracy, and add mu p_t to
  the loss, where Eq. 6 has lambda (1 - p) with the client's own p. The code follows Eq. 6. Neither
  has a gradient, so the trained models are the same. Algorithm 3's loop "for epoch 0..E" would be
  E + 1 epochs; E are trained, as the text says.
"""

import math
from typing import Literal

from fednet.algorithms.base import *


@algorithm("fedpdc")
class FedPDC(Algorithm):
    """Local models are weighted by their accuracy on a public set of the server's."""

    paper = "Zhang & Zhang, 2023 (arXiv:2302.12503)"
    needs_public = True
    weighting = "uniform"  # of the losses; models are weighted by accuracy

    class Config(AlgorithmConfig, rename={"lambda_": "lambda"}):
        lambda_: NonNegative | Literal["adaptive"] = 10.0
        """Weight of the penalty (Eq. 6), the best of the paper's 0.1, 1, 5, 10; adaptive: 0.5 n in
        round n (Eq. 9).
        """
        penalty: Literal["literal", "prox", "scale"] = "literal"
        """The penalty's reading: literal has no gradient; prox adds lambda (1 - p) / 2 ||w -
        w^t||^2; scale multiplies the loss by 1 + lambda (1 - p).
        """

    class Down(Payload):
        x: Weights
        p: Accuracy

    class Server(State):
        x: Tensors
        p: dict[int, float]  # p_i of the last round's participants

    class Accumulator(State):
        x: Sum
        p: dict[int, float]
        alike: Sum | None  # the mean to fall back on: kept while every p_i so far is 0

    def init_server(self, x):
        return self.Server(x=x, p={})

    def broadcast(self, server, phase, client_id):
        return self.Down(x=server.x, p=server.p.get(client_id, 1.0))

    # -- client (Algorithm 3) ----------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        c = self.config
        pull = (0.5 * host.round if c.lambda_ == "adaptive" else c.lambda_) * (1 - down.p)
        if c.penalty == "prox":
            y = host.train(down.x, proximal=pull)
        elif c.penalty == "scale" and pull:
            y = host.train(down.x, loss=lambda m, x, y: (1 + pull) * host.task.loss(m(x), y))
        else:
            y = host.train(down.x)  # Eq. 6 as printed: its constant has no gradient
        return client, self.Up(x=y.x, run=y.run)

    # -- server (Algorithm 2) ----------------------------------------------------------------------
    def init_accumulator(self, server, phase):
        return self.Accumulator(x=Sum.empty(), p={}, alike=Sum.empty())

    def accumulate(self, accumulator, server, client_id, up, host):
        p = host.evaluate(up.x).accuracy
        alike = None
        if accumulator.alike is not None and p == 0:
            alike = accumulator.alike.add(up.x)
        return self.Accumulator(
            x=accumulator.x.add(up.x, p), p={**accumulator.p, client_id: p}, alike=alike
        )

    def server_update(self, accumulator, server, cohort, host):
        host.report(
            accuracy_public={str(i): p for i, p in accumulator.p.items()},
            accuracy_public_sum=math.fsum(accumulator.p.values()),  # P
        )
        if accumulator.alike is not None:
            host.warn("no participant's model gets any public sample right; all count alike.")
            return self.Server(x=accumulator.alike.mean(), p=accumulator.p)
        return self.Server(x=accumulator.x.mean(), p=accumulator.p)  # Eq. 4

    def weights(self, server, runs):
        p = {i: server.p.get(i, 0.0) for i in runs}
        return p if any(p.values()) else super().weights(server, runs)

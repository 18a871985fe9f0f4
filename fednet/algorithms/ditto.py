"""Ditto: Li, Hu, Beirami and Smith, "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021 (arXiv:2012.04221), Algorithm 1.

w    global model, trained as FedAvg trains it        v_k  personal model of client k
lambda  strength of the pull of v_k to w

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w)), `personal_epochs` epochs

What the paper leaves open: v_k starts at w^0 and is trained before w_k, from the w that came down;
it has an order of samples of its own.
"""

from fednet.algorithms.base import *


@algorithm("ditto")
class Ditto(Algorithm):
    """Beside the global model each client trains one of its own, held near it."""

    paper = "Li et al., ICML 2021 (arXiv:2012.04221)"
    personalised = True
    summed = {"x": "weighted"}

    class Config(WeightedConfig, rename={"lambda_": "lambda"}):
        lambda_: NonNegative = 1.0
        """Strength of the pull of the personal model v_k to the global model w; 0: none."""
        personal_epochs: Count | None = None
        """Epochs of training of the personal model per round; null: the epochs or steps of the run.
        """

    class Client(State):
        v: Tensors | None = None

    def client_update(self, phase, client, down, host):
        v = host.train(
            host.initial.select(host.shared) if client.v is None else client.v,
            epochs=self.config.personal_epochs,
            proximal=self.config.lambda_,
            toward=down.x,
            stream="personal",
        )
        y = host.train(down.x)
        return self.Client(v=v.x), self.Up(x=y.x, run=y.run)

    def personal_model(self, client, local, host):
        return local if client.v is None else client.v

"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021
(arXiv:2111.04263), Algorithm 1.

theta    global model          theta_k  local model       L_k  client k's loss
g_k      the linear term of client k, the gradient of L_k at its last theta_k
h        the server's state    m  all clients             alpha  strength of the regulariser

    client: theta_k <- argmin L_k(theta') - <g_k, theta'> + alpha/2 ||theta' - theta||^2
            g_k <- g_k - alpha (theta_k - theta)
    server: h <- h - alpha/m sum_k (theta_k - theta)    theta <- mean_k theta_k - h / alpha

The argmin is the local training of the run. What the paper leaves open: buffers are averaged and
take no part in h. The authors' code divides alpha by each client's share of the samples; here alpha
is the same for all, as printed.
"""

from fednet.algorithms.base import *


@algorithm("feddyn")
class FedDyn(Algorithm):
    """Each client's loss is changed as it goes, so that all agree at a stationary point."""

    paper = "Acar et al., ICLR 2021 (arXiv:2111.04263)"
    weighting = "uniform"  # P_t uniformly
    summed = {"x": "plain"}

    class Config(AlgorithmConfig):
        alpha: Positive = 0.01
        """Strength alpha of the dynamic regulariser: alpha/2 ||theta' - theta||^2 and a linear
        term; the paper tries 0.1, 0.01 and 0.001.
        """

    class Server(State):
        x: Weights
        h: Tensors

    class Client(State):
        g: Tensors

    def init_client(self, x):
        return self.Client(g=x.params.zeros_like())

    def with_more_clients(self, server, before, now):
        return server.replace(h=before / now * server.h)  # theta_k - theta was 0 for a new client

    def client_update(self, phase, client, down, host):
        g = client.g.select(down.x.params.layout)
        y = host.train(down.x, proximal=self.config.alpha, add_to_grad=-g)
        g = g.plus(y.x.params - down.x.params, -self.config.alpha)
        return self.Client(g=g), self.Up(x=y.x, run=y.run)

    def server_update(self, accumulator, server, cohort, host):
        alpha = self.config.alpha
        mean = accumulator.x.mean()
        share = alpha * accumulator.x.count / host.clients

        def step(mean, theta, h):
            h_new = h - share * (mean - theta)
            return mean - h_new / alpha, h_new

        x, h = blockwise(step, mean, server.x, server.h)
        return self.Server(x=mean.with_vector(x), h=server.h.with_vector(h))

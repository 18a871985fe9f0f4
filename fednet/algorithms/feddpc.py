"""FedDPC: "FedDPC: Handling Data Heterogeneity and Partial Client Participation in Federated
Learning", Algorithm 1.

w    global model                        D_j    client j's update (w - w_j) / eta_l
r_j  D_j less its projection on G        G      Delta_{t-1}, the last global update
u_j  r_j, scaled adaptively              eta_g  server rate
m    participants

    proj = (<D_j, G> / <G, G>) G,  r_j = D_j - proj           Eq. 2, lines 16-18
    u_j = (lambda + ||D_j|| / ||r_j||) r_j                    Eq. 3, line 19
    Delta_t = (1/m) sum u_j,  w <- w - eta_g Delta_t          Eq. 4, lines 21-22

What the paper leaves open: with G = 0 (round 1) nothing is projected, and the ratio is 1; a
residual of at most 1e-6 of D_j is rounding noise and counts as u_j = 0; eta_g is eta_l unless it is
set; products and norms are over the whole vector, in float64. `projection: false` and `scaling:
false` switch off one half of the method each; without both it is FedAvg.

The code never computes r_j. With c_j = <D_j, G> / <G, G> and f_j = lambda + ||D_j|| / ||r_j||,
||r_j||^2 = ||D_j||^2 - c_j^2 <G, G> and Delta_t = (sum f_j D_j - (sum f_j c_j) G) / m: G is
subtracted once, from the sum.
"""

import math

import msgspec

from fednet.algorithms.base import *

NOISE = 1e-6  # residuals below this share of the update are rounding


@algorithm("feddpc")
class FedDPC(Algorithm):
    """Updates lose what they share with the last global update, and are scaled by how much that
    was.
    """

    paper = (
        "FedDPC: Handling Data Heterogeneity and Partial Client Participation in Federated Learning"
    )
    weighting = "uniform"  # the mean over clients is plain (Eq. 4)
    forbids = {"lr": "D_j is divided by it, and the server multiplies by one eta for all"}

    class Config(AlgorithmConfig):
        lam: float = msgspec.field(default=1.0, name="lambda")
        """Added to the adaptive factor of each residual (Eq. 3); may be negative."""
        server_lr: Positive | None = None
        """Server learning rate eta_g; null: the clients' of the round."""
        projection: bool = True
        """Whether updates lose their projection on the last global update (Eq. 2)."""
        scaling: bool = True
        """Whether residuals are scaled by lambda + ||D_j|| / ||r_j|| (Eq. 3)."""

    class Up(Payload):
        d: Delta  # D_j
        run: Statistics

    class Server(State):
        x: Weights
        delta: Tensors  # G

    class Accumulator(State):
        u: Sum  # of f_j D_j
        gg: float  # <G, G>
        along: float = 0.0  # sum of f_j c_j

    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        d = down.x.with_vector(blockwise(lambda x, y: (x - y) / host.lr, down.x, y.x))
        return client, self.Up(d=d.with_buffers(y.x), run=y.run)

    def init_accumulator(self, server, phase):
        gg = server.delta.dot(server.delta) if self.config.projection else 0.0
        return self.Accumulator(u=Sum.empty(), gg=gg)

    def accumulate(self, accumulator, server, client_id, up, host):
        gg = accumulator.gg
        c = up.d.dot(server.delta) / gg if gg > 0.0 else 0.0
        f = 1.0
        if self.config.scaling:
            dd = up.d.dot(up.d)  # ||D_j||^2
            rr = dd - c * c * gg  # ||r_j||^2
            if rr > NOISE**2 * dd:
                f = self.config.lam + math.sqrt(dd / rr)
            else:
                f = 0.0
                host.warn(
                    f"feddpc: client {client_id}'s update is parallel to the last global update; "
                    f"it counts as 0."
                )
        u = accumulator.u.add(up.d, scale=f)
        return self.Accumulator(u=u, gg=gg, along=accumulator.along + f * c)

    def server_update(self, accumulator, server, cohort, host):
        m = accumulator.u.count
        along = accumulator.along
        eta_g = host.lr if self.config.server_lr is None else self.config.server_lr

        def step(u, g, x):
            delta = ((u - along * g.double()) / m).float()
            return delta, x - eta_g * delta

        delta, x = blockwise(step, accumulator.u.vector, server.delta, server.x)
        return self.Server(x=accumulator.u.around(x), delta=server.delta.with_vector(delta))

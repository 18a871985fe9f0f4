"""Methods that stand beside those of the papers' tables: what other code computes, and other
readings of a paper. Each is a subclass that changes what differs. rows.yaml says which rows of a
table they are, and how to run them:

    fednet reproduce niidbench/cifar10 --only SCAFFOLD --load configs/papers/readings.py \\
        --set algorithm.name=scaffold-niidbench
"""

import math

from fednet.algorithms.base import Tensors, Weighting, algorithm
from fednet.algorithms.condensation import by_layer, condense
from fednet.algorithms.feddc import FedDC, FedDCPlus
from fednet.algorithms.fedrds import FedRDS
from fednet.algorithms.scaffold import Scaffold
from fednet.errors import ConfigError


# -- SCAFFOLD --------------------------------------------------------------------------------------
@algorithm("scaffold-steps")
class ScaffoldSteps(Scaffold):
    """SCAFFOLD that divides by the number of steps K, also under momentum."""

    def train(self, x, correction, host):
        y = host.train(x, add_to_grad=correction)
        return y, float(y.run.steps)


@algorithm("scaffold-post")
class ScaffoldPost(Scaffold):
    """SCAFFOLD that corrects y after each step: a plain momentum step, then
    y <- y - eta_l (c - c_i). It divides by K.
    """

    def refusal(self, run):
        if self.config.option == "I" and run.train.momentum:
            # c_i is one plain gradient, but y moves by about 1 / (1 - rho) gradients a step.
            return (
                "algorithm.option",
                f"I corrects too little under momentum, here {run.train.momentum:g}; take option: "
                f"II, or train.momentum: 0.",
            )
        return None

    def train(self, x, correction, host):
        y = host.train(x, add_to_step=-host.lr * correction)
        return y, float(y.run.steps)


@algorithm("scaffold-participants")
class ScaffoldParticipants(Scaffold):
    """SCAFFOLD that divides the change of c by |S|, by which c is N / |S| times too large."""

    def with_more_clients(self, server, before, now):
        return server

    def server_update(self, accumulator, server, cohort, host):
        x = accumulator.dy.step(server.x, self.config.server_lr)
        return self.Server(x=x, c=accumulator.dc.step(server.c))


@algorithm("scaffold-random")
class ScaffoldRandom(Scaffold):
    """SCAFFOLD whose variates start as a network's random initial weights."""

    def init_server(self, x):
        return self.Server(x=x, c=self.first(x))

    def init_client(self, x):
        return self.Client(c=self.first(x))

    def with_more_clients(self, server, before, now):
        raise ConfigError(
            "algorithm.name: no client can join the run, since c is the mean over all N variates, "
            "and those of new clients are not 0; start a run under another name."
        )

    def first(self, x):
        """Returns the initial model with each tensor's entries in reverse: weights that are drawn
        as a network's are, at both ends without sending them.
        """
        turned = {name: t.flatten().flip(0).view_as(t) for name, t in x.params.items()}
        return Tensors.pack(x.params.layout, turned)


@algorithm("scaffold-random-post")
class ScaffoldRandomPost(ScaffoldRandom, ScaffoldPost):
    """SCAFFOLD with random variates, which corrects y after each step."""


@algorithm("scaffold-niidbench")
class ScaffoldNIIDBench(ScaffoldRandomPost):
    """The SCAFFOLD of NIID-Bench today (Li et al., ICDE 2022, arXiv:2102.02079: experiments.py)."""

    class Config(ScaffoldRandomPost.Config):
        weighting: Weighting = "samples"


@algorithm("scaffold-niidbench-2021")
class ScaffoldNIIDBench2021(ScaffoldNIIDBench, ScaffoldParticipants):
    """The SCAFFOLD of NIID-Bench until August 2022, when |S| was corrected (its issue #12)."""


# -- FedDC -----------------------------------------------------------------------------------------
@algorithm("feddc-layer")
class FedDCLayer(FedDC):
    """FedDC that compares gradients by one cosine a layer, as Eq. 6 prints it."""

    def condense(self, *given):
        return condense(*given, self.config, compared=by_layer)


@algorithm("feddc-every")
class FedDCEvery(FedDC):
    """FedDC that condenses at every participation, as Algorithm 1 prints it. On a CPU this takes
    hours.
    """

    def client_update(self, phase, client, down, host):
        return super().client_update(phase, self.Client(), down, host)


@algorithm("feddcplus-every")
class FedDCPlusEvery(FedDCEvery, FedDCPlus):
    """FedDC+ that condenses at every participation."""


# -- FedRDS ----------------------------------------------------------------------------------------
@algorithm("fedrds-eq4")
class FedRDSEq4(FedRDS):
    """FedRDS with sigma_k = exp(cos(v_k, w^t)), as Eq. 4 prints it. v_k is the client's model after
    its last participation; at the first one it is w^t.
    """

    class Client(FedRDS.Client):
        v: Tensors | None = None

    def client_update(self, phase, client, down, host):
        client, up = super().client_update(phase, client, down, host)
        return client.replace(v=up.x), up

    def sigma(self, client, w):
        """The cosine is over all parameters, in float64; 0 where either model is zero."""
        v = client.v
        if v is None:
            return math.e
        norms = v.norm() * w.norm()
        cosine = min(1.0, max(-1.0, v.dot(w) / norms)) if norms else 0.0
        return math.exp(cosine)


@algorithm("fedrds-scaled")
class FedRDSScaled(FedRDSEq4):
    """FedRDS with sigma0 times Eq. 4."""

    def sigma(self, client, w):
        return self.config.sigma0 * super().sigma(client, w)


@algorithm("fedrds-one-draw")
class FedRDSOneDraw(FedRDS):
    """FedRDS that sends the same samples to all clients."""

    def enroll(self, server, client_id, host):
        return super().enroll(server, -1, host)

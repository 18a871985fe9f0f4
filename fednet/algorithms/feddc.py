"""FedDC and FedDC+: Kim and Choi, "Stable Federated Learning with Dataset Condensation", Journal of
Computing Science and Engineering 16(1):52-62, 2022 (doi:10.5626/JCSE.2022.16.1.52), Algorithm 1.

theta  global model    theta_i  local model    D_i  local data    P_i  classes present in D_i
S_i    one condensed image a class of P_i (see `condensation`)
S      union of the participants' S_i
K, v   iterations of the condensation, and the norm its gradient is clipped to (Eq. 8)

A participant trains theta_i and uploads it with S_i; the server averages and then fine-tunes the
mean on S (Eq. 7). FedDC+ has momentum and weight decay in the optimizer that makes the condensed
images, and nowhere else. Weight decay is added after the clipping, as torch's SGD does. The
momentum starts at 0 with each condensation.

What the paper leaves open:
- v is 1, images start as noise, and a real batch has 256 images: measured, or taken from the
  reference code of the matching.
- The paper condenses at every participation. D_i does not change, so a client here condenses once
  and uploads the same S_i each time.
- D compares gradients output by output, as the reference code of the matching does. Eq. 6 prints
  one cosine a layer.
- S is not balanced if some clients lack classes; all images count the same.
- The fine-tuning batch is larger than |S| = 100, so that an epoch is one full-batch step, as Eq. 7
  says. Its learning rate is the clients' unless it is set.

If a client has one image of a class, S_i shows that image recognisably (docs/runs.md): `cond_min`
leaves out the classes of which a client has fewer images.

configs/papers/readings.py has Eq. 6, and a condensation at every participation, as subclasses.
"""

import functools
import math

import torch

from fednet.algorithms.base import *
from fednet.algorithms.condensation import AtLeastOne, Condensation, check, condense, present

FLOAT_BYTES = 4
LABEL_BYTES = 8


@algorithm("feddc")
class FedDC(Algorithm):
    """Clients send one condensed image a class; the server fine-tunes the mean on them."""

    paper = "Kim & Choi, JCSE 2022 (doi:10.5626/JCSE.2022.16.1.52)"
    classes_only = True

    class Config(Condensation):
        ft_epochs: Count = 10
        """Epochs of the server's fine-tuning on all condensed images; 0: none."""
        ft_lr: NonNegative | None = None
        """Learning rate of the fine-tuning; null: the clients' of the round."""
        ft_batch: AtLeastOne = 256
        """Batch size of the fine-tuning, in images."""

    class Up(Payload):
        x: Weights
        s: Condensed
        run: Statistics

    class Client(State):
        x: torch.Tensor | None = None  # S_i: (C_i, c, h, w) model inputs
        y: torch.Tensor | None = None

    class Accumulator(State):
        x: Sum
        images: tuple[torch.Tensor, ...] = ()
        labels: tuple[torch.Tensor, ...] = ()

    def refusal(self, run):
        if run.train.only or run.model.adapters is not None:
            return (
                "train.only" if run.train.only else "model.adapters",
                "a condensed image's gradients are matched in nets that were never trained; of a "
                "model of which a part stays as it is there are none.",
            )
        return None

    def sizes(self, payload, client):
        if payload is not self.Up:
            return {}
        one = math.prod(client.input_shape) * FLOAT_BYTES + LABEL_BYTES
        return {"s": len(present(client.class_counts, self.config.cond_min)) * one}

    def outputs(self, module, x):
        if module.training:  # else there is one sample in all, and BatchNorm is not tried on it
            check(module, x)
        return super().outputs(module, x)

    # -- client ------------------------------------------------------------------------------------
    def client_update(self, phase, client, down, host):
        y = host.train(down.x)
        if client.y is None:
            # From random streams of its own and untrained nets: S_i does not depend on w^t.
            fresh = functools.partial(host.fresh, "condense")
            with host.drawing("condense/draws"):
                s, distance = self.condense(host.model(host.initial), fresh, *host.data, host.rng)
            host.report(condensation_distance=distance)
            client = self.Client(x=s.x, y=s.y)
        return client, self.Up(x=y.x, s=Samples(client.x, client.y), run=y.run)

    def condense(self, *given):
        """Calls `condensation.condense` with these arguments and the method's settings."""
        return condense(*given, self.config)

    # -- server ------------------------------------------------------------------------------------
    def accumulate(self, accumulator, server, client_id, up, host):
        return self.Accumulator(
            x=accumulator.x.add(up.x, self.weight(up.run)),
            images=(*accumulator.images, up.s.x),
            labels=(*accumulator.labels, up.s.y),
        )

    def server_update(self, accumulator, server, cohort, host):
        theta = accumulator.x.mean()
        s = Samples(torch.cat(accumulator.images), torch.cat(accumulator.labels))
        host.report(condensed_images=len(s))
        if not self.config.ft_epochs or not len(s):
            return server.replace(x=theta)
        lr = host.lr if self.config.ft_lr is None else self.config.ft_lr
        theta = host.fit(  # Eq. 7
            theta, s, epochs=self.config.ft_epochs, lr=lr, batch_size=self.config.ft_batch
        )
        return server.replace(x=theta)


@algorithm("feddcplus")
class FedDCPlus(FedDC):
    """FedDC whose condensation has momentum and weight decay."""

    class Config(FedDC.Config):
        cond_momentum: Fraction = 0.9
        """Momentum of the condensation."""
        cond_weight_decay: NonNegative = 4e-5
        """Weight decay of the condensation."""

    def condense(self, *given):
        momentum = self.config.cond_momentum
        weight_decay = self.config.cond_weight_decay
        return condense(*given, self.config, momentum=momentum, weight_decay=weight_decay)

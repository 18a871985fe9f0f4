"""FedRoD: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image
Classification", ICLR 2022 (arXiv:2107.00778), with the linear P-head.

h    features: the input of the head     P_i    personal head of client i: never crosses
G    generic head, shared                n_i,c  training samples of class c on client i
z_G  = G(h(x))                           gamma  exponent of the prior

    loss_G = CE(z_G + gamma * log n_i, y)                     balanced softmax; trains h and G
    loss_P = CE(stopgrad(z_G) + P_i(stopgrad(h(x))), y)       trains P_i alone
    generic prediction: argmax z_G;  personal prediction: argmax z_G + P_i(h(x));
    both without the prior

What the paper leaves open: a class that the client lacks has log 0 = -inf, which removes it from
the softmax, so that the loss is finite and its logit gets no gradient. Both losses see the same h,
so one step on their sum is a step on each. P starts at zero, so that personal and generic
predictions are the same at first. There is no hypernetwork mode.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from fednet.algorithms.base import *
from fednet.errors import ConfigError
from fednet.models import head_names


@algorithm("fedrod")
class FedRoD(Algorithm):
    """A generic head by balanced softmax, and on top of it each client's own linear head."""

    paper = "Chen & Chao, ICLR 2022 (arXiv:2107.00778)"
    personalised = True
    classes_only = True
    summed = {"x": "weighted"}

    class Config(WeightedConfig):
        gamma: NonNegative = 1.0
        """Exponent of the class prior in the balanced softmax; 0: plain softmax."""

    class Client(State):
        p: Tensors | None = None

    def shared(self, layout, module):
        names = head_names(module)
        if any(name.endswith("lora_A") for name in names):
            raise ConfigError(
                "model.adapters.target: fedrod trains a personal head P of the same shape as the "
                "generic head G; put no adapter on the head, and let train.only name it."
            )
        if still := [name for name in names if not layout.has(name)]:
            raise ConfigError(
                f"train.only: fedrod trains a generic head G, and P of the same shape; let it name "
                f"{' and '.join(still)} too."
            )
        return layout

    def client_update(self, phase, client, down, host):
        n = torch.as_tensor(host.class_counts, device=host.device)
        gamma = self.config.gamma
        prior = gamma * n.float().log() if gamma else 0.0  # (C,); without it no class is left out
        p = client.p
        if p is None:
            p = host.initial.select(host.layout.select(host.head)).zeros_like()
        y = host.train(down.x, loss=both_losses(prior, *host.head), extra=p)
        return self.Client(p=y.extra), self.Up(x=y.x, run=y.run)

    def outputs(self, module, x):
        return module.head(module.features(x))

    def personal_model(self, client, local, host):
        if client.p is None:
            return local
        model = host.frozen(local)
        p = dict(client.p.to(host.device).items())

        def outputs(x: Inputs) -> torch.Tensor:
            h = model.features(x)
            return model.head(h) + p_head(h, p, *host.head)

        return outputs

    def beside(self, client):
        return {} if client.p is None else {f"p_{n}": t for n, t in client.p.items()}


def p_head(
    h: torch.Tensor, p: Mapping[str, torch.Tensor], weight: str, bias: str | None = None
) -> torch.Tensor:
    """P_i(h), (n, C), of features h, (n, d); p: the personal head's tensors, by name."""
    return F.linear(h, p[weight], None if bias is None else p[bias])


def both_losses(
    prior: torch.Tensor | float, weight: str, bias: str | None = None
) -> Callable[..., torch.Tensor]:
    """loss(model, x, y, p) with the value of loss_G and the gradients of loss_G + loss_P."""

    def loss(
        model: nn.Module, x: Inputs, y: torch.Tensor, p: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        h = model.features(x)
        z = model.head(h)
        personal = F.cross_entropy(z.detach() + p_head(h.detach(), p, weight, bias), y)
        return F.cross_entropy(z + prior, y) + (personal - personal.detach())

    return loss

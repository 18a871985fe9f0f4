"""The two models of FedABC's experiments."""

from __future__ import annotations

from torch import nn

from fednet.models import flat, image
from fednet.models.parts import Net, chain, dense, two_convs
from fednet.registry import model


@model("abc_mlp")
def abc_mlp(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Fully connected 260, 200 (FedABC on MNIST)."""
    body = chain(flatten=nn.Flatten(), **dense((flat(input_shape), 260, 200)))
    return Net(body, nn.Linear(200, classes))


@model("abc_conv")
def abc_conv(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64, fc 120, fc 64 (FedABC on CIFAR-10)."""
    # The paper states no kernel size and no padding: those of the cited line of work.
    layers, left = two_convs(*image("abc_conv", input_shape, 16), (64, 64))
    return Net(chain(**layers, **dense((left, 120, 64))), nn.Linear(64, classes))

"""The models of FedRDS's experiments. The paper gives sizes for MNIST only; the others' are
ours.
"""

from __future__ import annotations

from torch import nn

from fednet.models import image
from fednet.models.parts import Net, chain, dense, two_convs
from fednet.registry import model


@model("rds_mnist")
def rds_mnist(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two padded 5x5 convolutions of 32 and 64, fc 512 (FedRDS on MNIST)."""
    layers, left = two_convs(*image("rds_mnist", input_shape, 4), (32, 64), padding=2)
    return Net(chain(**layers, **dense((left, 512))), nn.Linear(512, classes))


@model("rds_fmnist")
def rds_fmnist(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two padded 5x5 convolutions of 16 and 32 and the head (FedRDS on Fashion-MNIST)."""
    layers, left = two_convs(*image("rds_fmnist", input_shape, 4), (16, 32), padding=2)
    return Net(chain(**layers), nn.Linear(left, classes))


@model("rds_cifar")
def rds_cifar(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64, fc 384, fc 192 (FedRDS on SVHN and CIFAR-10)."""
    layers, left = two_convs(*image("rds_cifar", input_shape, 16), (64, 64))
    return Net(chain(**layers, **dense((left, 384, 192))), nn.Linear(192, classes))

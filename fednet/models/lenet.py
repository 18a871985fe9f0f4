"""LeNet-5, and the same with FedPDC's and MOON's projection head."""

from __future__ import annotations

from torch import nn

from fednet.models import image
from fednet.models.parts import Net, ProjectedNet, chain, dense, two_convs
from fednet.registry import model


def _body(name: str, input_shape: tuple[int, ...]) -> nn.Sequential:
    c, h, w = image(name, input_shape, 16)
    layers, flat = two_convs(c, h, w, (6, 16))
    return chain(**layers, **dense((flat, 120, 84)))


@model("lenet5")
def lenet5(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: conv 6, conv 16, fc 120, fc 84 (FedDPC's CIFAR-10
    model).
    """
    return Net(_body("lenet5", input_shape), nn.Linear(84, classes))


@model("pdc_cnn")
def pdc_cnn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5's body, projection 84-84-256, linear head (FedPDC's and MOON's CNN)."""
    return ProjectedNet(_body("pdc_cnn", input_shape), 84, 256, classes)

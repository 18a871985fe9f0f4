"""The ConvNet of dataset condensation (Zhao et al. 2021), FedDC's three-layered CNN."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from torch import nn

from fednet.models import image
from fednet.models.parts import NORMS, Net, chain, padding_of_first
from fednet.registry import model


@model("convnet3")
def convnet3(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    norm: Annotated[
        Literal["instance", "none"], "Normalisation after each convolution."
    ] = "instance",
    width: Annotated[
        int, msgspec.Meta(ge=1), "Filters of each convolution; FedDC's CNN has 128. [filters]"
    ] = 128,
) -> nn.Module:
    """Three times conv 3x3 of `width`, norm, ReLU, average pooling (FedDC's CNN)."""
    c, h, w = image("convnet3", input_shape, 8)
    padding = padding_of_first(h, w)
    layers: dict[str, nn.Module] = {}
    h, w = h + 2 * padding - 2, w + 2 * padding - 2
    for k in (1, 2, 3):
        layers[f"conv{k}"] = nn.Conv2d(
            c if k == 1 else width, width, 3, padding=padding if k == 1 else 1
        )
        if (normed := NORMS[norm]) is not None:
            layers[f"norm{k}"] = normed(width)
        layers |= {f"relu{k}": nn.ReLU(), f"pool{k}": nn.AvgPool2d(2)}
    return Net(
        chain(**layers, flatten=nn.Flatten()), nn.Linear(width * (h // 8) * (w // 8), classes)
    )

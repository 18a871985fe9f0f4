"""VGG-11 for small images (Simonyan and Zisserman 2015, configuration A without the large dense layers)."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fednet.models import declared, image
from fednet.models.parts import NORMS, Net, chain, padding_of_first
from fednet.registry import model

PLAN = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")  # widths of 3x3 convolutions; M: max pooling


@model("vgg11")
@declared
def vgg11(*, input_shape: tuple[int, ...], classes: int,
          norm: Literal["instance", "batch", "none"] = "instance") -> nn.Module:
    """Eight 3x3 convolutions of 64 to 512, five poolings, one linear layer (FedDC's VGG-11)."""
    c, h, w = image("vgg11", input_shape, 28)
    padding = padding_of_first(h, w)
    if min(h, w) < 32 and padding == 1:
        image("vgg11", input_shape, 32)
    h, w = h + 2 * padding - 2, w + 2 * padding - 2
    layers: dict[str, nn.Module] = {}
    k = 0
    for width in PLAN:
        if isinstance(width, str):
            layers[f"pool{k}"] = nn.MaxPool2d(2)
            continue
        k += 1
        layers[f"conv{k}"] = nn.Conv2d(c, width, 3, padding=padding if k == 1 else 1)
        if (normed := NORMS[norm]) is not None:
            layers[f"norm{k}"] = normed(width)
        layers[f"relu{k}"] = nn.ReLU()
        c = width
    return Net(chain(**layers, flatten=nn.Flatten()), nn.Linear(512 * (h // 32) * (w // 32), classes))

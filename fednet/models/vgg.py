"""VGG-11 for small images (Simonyan and Zisserman 2015, configuration A without the large dense
layers).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from torch import nn

from fednet.models import image
from fednet.models.parts import NORMS, Net, chain, padding_of_first
from fednet.registry import model

# Widths of 3x3 convolutions, of the first; M: max pooling.
PLAN = (1, "M", 2, "M", 4, 4, "M", 8, 8, "M", 8, 8, "M")


@model("vgg11")
def vgg11(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    norm: Annotated[
        Literal["instance", "batch", "none"], "Normalisation after each convolution."
    ] = "instance",
    width: Annotated[
        int,
        msgspec.Meta(ge=1),
        "Filters of the first convolution; the others keep their ratio to it. [filters]",
    ] = 64,
) -> nn.Module:
    """Eight 3x3 convolutions of 64 to 512, five poolings, one linear layer (FedDC's VGG-11)."""
    c, h, w = image("vgg11", input_shape, 28)
    padding = padding_of_first(h, w)
    if min(h, w) < 32 and padding == 1:
        image("vgg11", input_shape, 32)
    h, w = h + 2 * padding - 2, w + 2 * padding - 2
    layers: dict[str, nn.Module] = {}
    k = 0
    for step in PLAN:
        if isinstance(step, str):
            layers[f"pool{k}"] = nn.MaxPool2d(2)
            continue
        k += 1
        wide = step * width
        layers[f"conv{k}"] = nn.Conv2d(c, wide, 3, padding=padding if k == 1 else 1)
        if (normed := NORMS[norm]) is not None:
            layers[f"norm{k}"] = normed(wide)
        layers[f"relu{k}"] = nn.ReLU()
        c = wide
    return Net(chain(**layers, flatten=nn.Flatten()), nn.Linear(c * (h // 32) * (w // 32), classes))

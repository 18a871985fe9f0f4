"""A multi-layer perceptron of any depth, for inputs of any shape."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from torch import nn

from fednet.models import flat
from fednet.models.parts import Net, chain, dense
from fednet.registry import model

Width = Annotated[int, msgspec.Meta(ge=1)]


@model("mlp")
def mlp(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    hidden: Annotated[
        tuple[Width, ...],
        "Width of each hidden layer; []: multinomial logistic regression. [units]",
    ] = (200, 200),
    norm: Annotated[Literal["none", "batch"], "batch: BatchNorm before each ReLU."] = "none",
) -> nn.Module:
    """Fully connected layers with ReLU; the default is the 2NN of McMahan et al. 2017."""
    sizes = (flat(input_shape), *hidden)
    layers = dense(sizes)
    if norm == "batch":
        layers = {
            name: part
            for k, width in enumerate(hidden, 1)
            for name, part in (
                (f"fc{k}", layers[f"fc{k}"]),
                (f"fc{k}_norm", nn.BatchNorm1d(width)),
                (f"fc{k}_relu", layers[f"fc{k}_relu"]),
            )
        }
    return Net(chain(flatten=nn.Flatten(), **layers), nn.Linear(sizes[-1], classes))

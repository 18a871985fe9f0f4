"""A multi-layer perceptron of any depth, for inputs of any shape."""

from __future__ import annotations

from typing import Annotated

import msgspec
from torch import nn

from fednet.models import declared, flat
from fednet.models.parts import Net, chain, dense
from fednet.registry import model

Width = Annotated[int, msgspec.Meta(ge=1)]


@model("mlp")
@declared
def mlp(
    *, input_shape: tuple[int, ...], classes: int, hidden: tuple[Width, ...] = (200, 200)
) -> nn.Module:
    """Fully connected layers with ReLU, `hidden` their widths; the default is the 2NN of McMahan et
    al. 2017.
    """
    sizes = (flat(input_shape), *hidden)  # hidden: [] is multinomial logistic regression
    return Net(chain(flatten=nn.Flatten(), **dense(sizes)), nn.Linear(sizes[-1], classes))

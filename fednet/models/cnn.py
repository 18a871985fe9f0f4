"""The CNN of pfl-research's CIFAR-10 benchmark (arXiv:2404.06430)."""

from __future__ import annotations

from torch import nn

from fednet.models import image
from fednet.models.parts import Net, chain
from fednet.registry import model


@model("pfl_cnn")
def pfl_cnn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Conv 3x3 of 32 and 64, max pooling 2x2, dropout 0.25, fc 128, dropout 0.5 (pfl-research's
    CIFAR-10 model, 1.6 M parameters).
    """
    c, h, w = image("pfl_cnn", input_shape, 6)
    body = chain(
        conv1=nn.Conv2d(c, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        drop1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * ((h - 4) // 2) * ((w - 4) // 2), 128),
        relu3=nn.ReLU(),
        drop2=nn.Dropout(0.5),
    )
    return Net(body, nn.Linear(128, classes))

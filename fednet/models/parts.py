"""What the models are put together from."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn


class Net(nn.Module):
    """body -> head. features(x): (n, d), what the head gets; forward(x): (n, classes), no
    softmax.
    """

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.features(x))
        return out


class ProjectedNet(nn.Module):
    """body -> projector -> head, as in MOON and FedPDC. No ReLU between the projector's output and
    the head.
    """

    def __init__(self, body: nn.Module, width: int, out: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.projector = chain(
            fc1=nn.Linear(width, width), relu=nn.ReLU(), fc2=nn.Linear(width, out)
        )
        self.head = nn.Linear(out, classes)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """(n, width): what the projector gets."""
        out: torch.Tensor = self.body(x)
        return out

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        """(n, out): MOON's contrastive feature."""
        out: torch.Tensor = self.projector(self.body(x))
        return out

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.features(x))
        return out


def chain(**layers: nn.Module) -> nn.Sequential:
    """A Sequential whose layers have names."""
    return nn.Sequential(OrderedDict(layers))


def two_convs(
    c: int, h: int, w: int, widths: tuple[int, int], padding: int = 0
) -> tuple[dict[str, nn.Module], int]:
    """Twice conv 5x5, ReLU, max pooling 2x2, then flatten; and the number of values that leaves."""
    first, second = widths
    layers = {
        "conv1": nn.Conv2d(c, first, 5, padding=padding),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(first, second, 5, padding=padding),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
    }

    def left(side: int) -> int:
        for _ in range(2):
            side = (side - 4 + 2 * padding) // 2
        return side

    return layers, second * left(h) * left(w)


def dense(sizes: tuple[int, ...]) -> dict[str, nn.Module]:
    """fc1, relu, fc2, relu, ... for sizes (in, a, b, ...): every layer followed by ReLU."""
    layers: dict[str, nn.Module] = {}
    for k, (a, b) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"fc{k}"] = nn.Linear(a, b)
        layers[f"fc{k}_relu"] = nn.ReLU()
    return layers


def instance_norm(channels: int) -> nn.Module:
    """InstanceNorm with affine parameters and no running statistics, as GroupNorm of one channel a
    group.
    """
    return nn.GroupNorm(channels, channels)


NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "instance": instance_norm,
    "batch": nn.BatchNorm2d,
    "none": None,
}


def padding_of_first(h: int, w: int) -> int:
    """A 3x3 convolution's padding of 1; of 3 for 28x28 images, which makes them 32x32, as the
    reference does.
    """
    return 3 if (h, w) == (28, 28) else 1

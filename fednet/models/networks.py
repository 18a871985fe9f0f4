"""Multi-layer perceptrons and convolutional networks, with what they are put together from."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from torch import nn

from fednet.models import image
from fednet.registry import model

Width = Annotated[int, msgspec.Meta(ge=1)]


class Net(nn.Module):
    """body -> head. features(x): (n, d), what the head gets; forward(x): (n, classes), no
    softmax.
    """

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


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

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """(n, out): MOON's contrastive feature."""
        return self.projector(self.body(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def chain(**layers: nn.Module) -> nn.Sequential:
    """A Sequential whose layers have names."""
    return nn.Sequential(OrderedDict(layers))


def two_convs(
    c: int, h: int, w: int, widths: tuple[int, int], padding: int = 0
) -> tuple[dict[str, nn.Module], int]:
    """Twice conv 5x5, ReLU, max pooling 2x2, then flatten; and the number of values that leaves.

    ReLU is computed after the pooling, of a quarter of the elements: it commutes with a maximum,
    and the gradients have the same bits too.
    """
    first, second = widths
    layers = {
        "conv1": nn.Conv2d(c, first, 5, padding=padding),
        "pool1": nn.MaxPool2d(2),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(first, second, 5, padding=padding),
        "pool2": nn.MaxPool2d(2),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
    }

    def left(side: int) -> int:
        for _ in range(2):
            side = (side - 4 + 2 * padding) // 2
        return side

    return layers, second * left(h) * left(w)


def dense(
    sizes: tuple[int, ...], norm: Callable[[int], nn.Module] | None = None
) -> dict[str, nn.Module]:
    """fc1, relu, fc2, relu, ... for sizes (in, a, b, ...): every layer followed by its norm and
    ReLU.
    """
    layers: dict[str, nn.Module] = {}
    for k, (a, b) in enumerate(itertools.pairwise(sizes), 1):
        layers[f"fc{k}"] = nn.Linear(a, b)
        if norm is not None:
            layers[f"fc{k}_norm"] = norm(b)
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


def normed_convs(
    image: tuple[int, int, int],
    widths: tuple[int | None, ...],
    norm: Callable[[int], nn.Module] | None,
    pool: type[nn.Module],
    classes: int,
) -> Net:
    """Convolutions 3x3 of these widths, each with its norm and ReLU; None: pooling 2x2. Then a
    linear head.
    """
    c, h, w = image
    # 28x28 images become 32x32 at the first one, as in the reference.
    padding = 3 if (h, w) == (28, 28) else 1
    h = h + 2 * padding - 2
    w = w + 2 * padding - 2
    layers: dict[str, nn.Module] = {}
    k = 0
    for width in widths:
        if width is None:
            layers[f"pool{k}"] = pool(2)
            h = h // 2
            w = w // 2
            continue
        k += 1
        layers[f"conv{k}"] = nn.Conv2d(c, width, 3, padding=padding)
        if norm is not None:
            layers[f"norm{k}"] = norm(width)
        layers[f"relu{k}"] = nn.ReLU()
        c = width
        padding = 1
    return Net(chain(**layers, flatten=nn.Flatten()), nn.Linear(c * h * w, classes))


# -- mlp -------------------------------------------------------------------------------------------
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
    sizes = (math.prod(input_shape), *hidden)
    layers = dense(sizes, nn.BatchNorm1d if norm == "batch" else None)
    return Net(chain(flatten=nn.Flatten(), **layers), nn.Linear(sizes[-1], classes))


# -- LeNet-5, and with the projection head of FedPDC and MOON --------------------------------------
def _lenet(name: str, input_shape: tuple[int, ...]) -> nn.Sequential:
    c, h, w = image(name, input_shape, 16)
    layers, flat = two_convs(c, h, w, (6, 16))
    return chain(**layers, **dense((flat, 120, 84)))


@model("lenet5")
def lenet5(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: conv 6, conv 16, fc 120, fc 84 (FedDPC's CIFAR-10
    model).
    """
    return Net(_lenet("lenet5", input_shape), nn.Linear(84, classes))


@model("pdc_cnn")
def pdc_cnn(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5's body, projection 84-84-256, linear head (FedPDC's and MOON's CNN)."""
    return ProjectedNet(_lenet("pdc_cnn", input_shape), 84, 256, classes)


# -- dataset condensation (Zhao et al. 2021) -------------------------------------------------------
@model("convnet3")
def convnet3(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    width: Annotated[Width, "Filters of each convolution; FedDC's CNN has 128. [filters]"] = 128,
) -> nn.Module:
    """Three times conv 3x3 of `width`, InstanceNorm, ReLU, average pooling (FedDC's CNN)."""
    widths = (width, None) * 3
    shape = image("convnet3", input_shape, 8)
    return normed_convs(shape, widths, instance_norm, nn.AvgPool2d, classes)


# -- VGG-11 (Simonyan and Zisserman 2015) without the large dense layers ---------------------------
# Widths of 3x3 convolutions, of the first; None: max pooling.
PLAN = (1, None, 2, None, 4, 4, None, 8, 8, None, 8, 8, None)


@model("vgg11")
def vgg11(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    norm: Annotated[
        Literal["instance", "batch", "none"], "Normalisation after each convolution."
    ] = "instance",
    width: Annotated[
        Width, "Filters of the first convolution; the others keep their ratio to it. [filters]"
    ] = 64,
) -> nn.Module:
    """Eight 3x3 convolutions of 64 to 512, five poolings, one linear layer (FedDC's VGG-11)."""
    shape = image("vgg11", input_shape, 28)
    if shape[1:] != (28, 28):
        image("vgg11", input_shape, 32)
    widths = tuple(None if step is None else step * width for step in PLAN)
    return normed_convs(shape, widths, NORMS[norm], nn.MaxPool2d, classes)


# -- FedABC ----------------------------------------------------------------------------------------
@model("abc_mlp")
def abc_mlp(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Fully connected 260, 200 (FedABC on MNIST)."""
    body = chain(flatten=nn.Flatten(), **dense((math.prod(input_shape), 260, 200)))
    return Net(body, nn.Linear(200, classes))


@model("abc_conv")
def abc_conv(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 convolutions of 64, fc 120, fc 64 (FedABC on CIFAR-10)."""
    # The paper states no kernel size and no padding: those of the cited line of work.
    layers, left = two_convs(*image("abc_conv", input_shape, 16), (64, 64))
    return Net(chain(**layers, **dense((left, 120, 64))), nn.Linear(64, classes))


# -- FedRDS, which gives sizes for MNIST only ------------------------------------------------------
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


# -- pfl-research's CIFAR-10 benchmark (arXiv:2404.06430) ------------------------------------------
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
        pool=nn.MaxPool2d(2),  # before ReLU: see `two_convs`
        relu2=nn.ReLU(),
        drop1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * ((h - 4) // 2) * ((w - 4) // 2), 128),
        relu3=nn.ReLU(),
        drop2=nn.Dropout(0.5),
    )
    return Net(body, nn.Linear(128, classes))

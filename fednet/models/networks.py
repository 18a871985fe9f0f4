"""Multi-layer perceptrons and convolutional networks, with what they are put together from."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from torch import nn

from fednet.models import flat, image
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
    c, h, w = image("convnet3", input_shape, 8)
    padding = padding_of_first(h, w)
    layers: dict[str, nn.Module] = {}
    h, w = h + 2 * padding - 2, w + 2 * padding - 2
    for k in (1, 2, 3):
        layers[f"conv{k}"] = nn.Conv2d(c, width, 3, padding=padding)
        c, padding = width, 1
        layers[f"norm{k}"] = instance_norm(width)
        layers |= {f"relu{k}": nn.ReLU(), f"pool{k}": nn.AvgPool2d(2)}
    return Net(
        chain(**layers, flatten=nn.Flatten()), nn.Linear(width * (h // 8) * (w // 8), classes)
    )


# -- VGG-11 (Simonyan and Zisserman 2015) without the large dense layers ---------------------------
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
        Width, "Filters of the first convolution; the others keep their ratio to it. [filters]"
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
        layers[f"conv{k}"] = nn.Conv2d(c, wide, 3, padding=padding)
        if (normed := NORMS[norm]) is not None:
            layers[f"norm{k}"] = normed(wide)
        layers[f"relu{k}"] = nn.ReLU()
        c, padding = wide, 1
    return Net(chain(**layers, flatten=nn.Flatten()), nn.Linear(c * (h // 32) * (w // 32), classes))


# -- FedABC ----------------------------------------------------------------------------------------
@model("abc_mlp")
def abc_mlp(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Fully connected 260, 200 (FedABC on MNIST)."""
    body = chain(flatten=nn.Flatten(), **dense((flat(input_shape), 260, 200)))
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
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        drop1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * ((h - 4) // 2) * ((w - 4) // 2), 128),
        relu3=nn.ReLU(),
        drop2=nn.Dropout(0.5),
    )
    return Net(body, nn.Linear(128, classes))

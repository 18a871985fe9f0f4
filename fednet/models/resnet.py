"""ResNet-18 and -50 (He et al. 2016): with BatchNorm and a projection head, or with GroupNorm.

Blocks as in the paper, the bottleneck's stride in its 3x3 convolution; convolutions have no bias;
shortcuts are 1x1 convolutions with a norm where the shape changes. Stem `cifar`: 3x3, nothing is
scaled down before the first stage. Stem `imagenet`: 7x7 of stride 2, then 3x3 max pooling of stride
2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from torch import nn

from fednet.errors import ConfigError
from fednet.models import image
from fednet.models.networks import Net, ProjectedNet, chain
from fednet.registry import model

Stem = Annotated[
    Literal["cifar", "imagenet"],
    "First layers. cifar: one 3x3 convolution; imagenet: 7x7 of stride 2, then 3x3 max pooling of "
    "stride 2.",
]
Norm = Callable[[int], nn.Module]


def _conv(c: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c, out, kernel, stride, padding=kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """ReLU(branch(x) + shortcut(x)); basic: two 3x3; bottleneck: 1x1, 3x3, 1x1 of four times the
    width.
    """

    def __init__(self, c: int, width: int, stride: int, norm: Norm, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        if bottleneck:
            self.branch = chain(
                conv1=_conv(c, width, 1),
                norm1=norm(width),
                relu1=nn.ReLU(),
                conv2=_conv(width, width, 3, stride),
                norm2=norm(width),
                relu2=nn.ReLU(),
                conv3=_conv(width, out, 1),
                norm3=norm(out),
            )
        else:
            self.branch = chain(
                conv1=_conv(c, width, 3, stride),
                norm1=norm(width),
                relu1=nn.ReLU(),
                conv2=_conv(width, out, 3),
                norm2=norm(out),
            )
        same = stride == 1 and c == out
        self.shortcut = (
            nn.Identity() if same else chain(conv=_conv(c, out, 1, stride), norm=norm(out))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def _body(
    channels: int, depths: tuple[int, ...], stem: Stem, norm: Norm, bottleneck: bool
) -> nn.Sequential:
    """Images to (n, 512) or, with bottlenecks, (n, 2048)."""
    if stem == "cifar":
        layers = {"stem": chain(conv=_conv(channels, 64, 3), norm=norm(64), relu=nn.ReLU())}
    else:
        layers = {
            "stem": chain(
                conv=_conv(channels, 64, 7, 2),
                norm=norm(64),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(3, 2, padding=1),
            )
        }
    c = 64
    for s, depth in enumerate(depths):
        width = 64 * 2**s
        blocks = []
        for k in range(depth):
            blocks.append(ResidualBlock(c, width, 2 if s and not k else 1, norm, bottleneck))
            c = 4 * width if bottleneck else width
        layers[f"stage{s + 1}"] = nn.Sequential(*blocks)
    return chain(**layers, pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())


@model("resnet18_bn_proj")
def resnet18_bn_proj(
    *, input_shape: tuple[int, ...], classes: int, stem: Stem = "cifar"
) -> nn.Module:
    """ResNet-18 with BatchNorm, projection 512-512-256, linear head (FedPDC on Tiny-ImageNet)."""
    c, _, _ = image("resnet18_bn_proj", input_shape, 8)
    return ProjectedNet(_body(c, (2, 2, 2, 2), stem, nn.BatchNorm2d, False), 512, 256, classes)


@model("resnet50_bn_proj")
def resnet50_bn_proj(
    *, input_shape: tuple[int, ...], classes: int, stem: Stem = "cifar"
) -> nn.Module:
    """ResNet-50 with BatchNorm, projection 2048-2048-256, linear head (FedPDC and MOON on
    CIFAR).
    """
    c, _, _ = image("resnet50_bn_proj", input_shape, 8)
    return ProjectedNet(_body(c, (3, 4, 6, 3), stem, nn.BatchNorm2d, True), 2048, 256, classes)


@model("resnet18_gn")
def resnet18_gn(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    stem: Stem = "cifar",
    gn_groups: Annotated[
        int, msgspec.Meta(ge=1), "Groups of each GroupNorm; a divisor of 64. [groups]"
    ] = 2,
) -> nn.Module:
    """ResNet-18 with GroupNorm and a linear head (FedDPC on CIFAR-100 and
    Tiny-ImageNet).
    """
    c, _, _ = image("resnet18_gn", input_shape, 8)
    if 64 % gn_groups:
        raise ConfigError(
            f"model.gn_groups: {gn_groups} does not divide the 64 channels of the first stage; "
            "allowed are 1, 2, 4, 8, 16, 32 and 64."
        )
    return Net(
        _body(c, (2, 2, 2, 2), stem, lambda n: nn.GroupNorm(gn_groups, n), False),
        nn.Linear(512, classes),
    )

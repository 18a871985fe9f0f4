"""Augmentations: functions of a batch of images (n, c, h, w) and a CPU generator that return a new
batch; `augment_with_targets` moves masks with their images.

Random numbers are drawn on the CPU, so they are the same for every device. Pixels are only moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from fednet.data.base import Data
from fednet.data.raw import IGNORED
from fednet.errors import ConfigError, unknown

Augmentation = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
PAD = 4


def flip(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mirrors each image left to right with probability 1/2."""
    mirrored = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    return torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x)


def crop_flip(x: torch.Tensor, generator: torch.Generator, mode: str = "constant") -> torch.Tensor:
    """Pads each image by 4 zeros a side, crops it to its size at a random place, and mirrors it:
    the usual augmentation for CIFAR. In normalised inputs zero is the mean colour.
    """
    n, _, h, w = x.shape
    top, left = torch.randint(0, 2 * PAD + 1, (2, n), generator=generator).to(x.device)
    padded = F.pad(x, (PAD, PAD, PAD, PAD), mode=mode)
    places = padded.unfold(2, h, 1).unfold(3, w, 1)  # (n, c, 2 PAD + 1, 2 PAD + 1, h, w), no copy
    return flip(places[torch.arange(n, device=x.device), :, top, left], generator)


def crop_reflect_flip(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """As `crop_flip`, but pads by the image's mirrored border, as NIID-Bench does for CIFAR-10."""
    return crop_flip(x, generator, "reflect")


KNOWN: dict[str, Augmentation | None] = {
    "none": None,
    "flip": flip,
    "crop_flip": crop_flip,
    "crop_reflect_flip": crop_reflect_flip,
}


def augment_with_targets(
    change: Augmentation, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and their targets as `change` moves them. Targets of the images' height
    and width, (n, h, w) or (n, k, h, w), are moved as their image; where that is padded by zeros, a
    mask of classes has no label.
    """
    if y.ndim < 3:
        return change(x, generator), y
    nothing = 0 if y.is_floating_point() else IGNORED  # what becomes 0, as is padded
    mask = y.unsqueeze(1) if y.ndim == 3 else y
    out = change(torch.cat([x, (mask - nothing).to(x.dtype)], 1), generator)
    images, masks = out.split([x.shape[1], mask.shape[1]], 1)
    return images.contiguous(), (masks.to(y.dtype) + nothing).reshape(y.shape)


def get(name: str) -> Augmentation | None:
    """Returns the augmentation of that name, None for `none`. Raises ConfigError for another
    name.
    """
    if name not in KNOWN:
        raise ConfigError(f"data.augment: {unknown('augmentation', name, KNOWN)}")
    return KNOWN[name]


def check(name: str, data: Data) -> None:
    """Raises ConfigError if the augmentation is unknown, the samples are not images of its size, or
    their targets cannot be moved with them.
    """
    x, y = data.train
    change = get(name)
    if change is None:
        return
    if isinstance(x, dict):
        raise ConfigError(_not_images(name, "a dict"))
    check_shape(name, x.shape[1:])
    if y.ndim > 2 and (y.ndim > 4 or y.shape[-2:] != x.shape[-2:]):
        raise ConfigError(
            f"data.augment: {name} moves pixels, and targets of shape {list(y.shape[1:])} cannot "
            f"be moved with images of shape {list(x.shape[1:])}; give targets of the images' "
            f"height and width, or use none."
        )
    if y.ndim > 2 and y.is_floating_point() and change is crop_flip:
        raise ConfigError(
            f"data.augment: {name} pads images, and values have no mark for a pixel without a "
            f"target; use flip or crop_reflect_flip."
        )


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raises ConfigError if the augmentation is unknown, or samples of that shape are not images of
    its size.
    """
    change = get(name)
    if change is None:
        return
    if len(shape) != 3:
        raise ConfigError(_not_images(name, f"of shape {list(shape)}"))
    if change is crop_reflect_flip and min(shape[1:]) <= PAD:
        raise ConfigError(
            f"data.augment: {name} mirrors {PAD} pixels at each side, and images of shape "
            f"{list(shape)} have too few; use crop_flip, or images of {PAD + 1} by {PAD + 1} "
            f"pixels or more."
        )


def _not_images(name: str, what: str) -> str:
    return f"data.augment: {name} is for images (c, h, w), and a sample here is {what}; use none."

"""Whether a model computes correctly with channels-last images and kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fednet import seeds
from fednet.tensors import Inputs


def laid(x: Inputs, innermost: bool) -> Inputs:
    """Returns x, with images in channels-last layout if `innermost`."""
    if innermost and isinstance(x, torch.Tensor) and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def bears_channels_last(
    module: Callable[[], nn.Module], input_shape: tuple[int, ...], seed: int
) -> bool:
    """Returns False if the model has no convolution, or fails on a channels-last sample although it
    works on a contiguous one: many models have `x.view(-1, n)` after a convolution. module():
    makes a new model.

    Returns False with GroupNorm as well: for channels-last, torch computes its variance on a CPU as
    the mean square minus the square of the mean. That loses digits if a mean is many standard
    deviations, and saves little time.
    """
    made = module().eval()
    parts = list(made.modules())
    if not any(isinstance(part, nn.Conv2d) for part in parts):
        return False
    if any(isinstance(part, nn.GroupNorm) for part in parts):
        return False
    return (
        len(input_shape) != 3
        or _works(made, input_shape, seed, torch.channels_last)
        or not _works(module().eval(), input_shape, seed, torch.contiguous_format)
    )


def _works(
    made: nn.Module, input_shape: tuple[int, ...], seed: int, form: torch.memory_format
) -> bool:
    with torch.no_grad(), seeds.scope(seed, "trial"):
        try:
            made.to(memory_format=form)(torch.zeros(1, *input_shape).to(memory_format=form))
        except Exception:  # a user's own model may raise anything; the trial says it
            return False
    return True

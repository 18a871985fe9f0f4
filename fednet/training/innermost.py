"""Whether a model can be worked on with the channels of its images and kernels innermost."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fednet import seeds
from fednet.tensors import Inputs


def laid(x: Inputs, innermost: bool) -> Inputs:
    """x, images with their channels innermost where that is asked for."""
    if innermost and isinstance(x, torch.Tensor) and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def bears_channels_last(
    module: Callable[[], nn.Module], input_shape: tuple[int, ...], seed: int
) -> bool:
    """False where it has no kernels, or fails on one sample so laid and not on one as it comes:
    with `x.view(-1, n)` after a convolution, say, which many a model has. module(): a new one.

    False with GroupNorm too: so laid, torch takes its variance on a CPU as the mean square less the
    square of the mean, which leaves few digits where a mean is many standard deviations, and gains
    little time.
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
        or (not _works(module().eval(), input_shape, seed, torch.contiguous_format))
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

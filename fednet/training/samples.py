"""Samples (x, y), x a tensor or a dict of tensors, and the batches that they are cut into."""

from __future__ import annotations

import torch

from fednet.tensors import Inputs

FEW = 2  # samples of a last batch that is too small for BatchNorm's statistics


def length(x: Inputs) -> int:
    """Samples in x: the length of its first axis."""
    return (next(iter(x.values())) if isinstance(x, dict) else x).shape[0]


def take(x: Inputs, index: torch.Tensor) -> Inputs:
    """The rows `index` of x, gathered: a tensor or a dict of tensors."""
    if isinstance(x, dict):
        return {name: part.index_select(0, index) for name, part in x.items()}
    return x.index_select(0, index)


def piece(x: Inputs, start: int, end: int) -> Inputs:
    if isinstance(x, dict):
        return {name: part[start:end] for name, part in x.items()}
    return x[start:end]


def batch_count(n: int, size: int, batch_norm: bool = False) -> int:
    """The number of batches of one epoch, see `batches`. None is listed: a site may say that it has
    billions of samples.
    """
    count = -(-n // size)
    if batch_norm and count > 1 and 0 < n % size <= FEW:
        count -= 1
    return count


def batches(n: int, size: int, batch_norm: bool = False) -> list[tuple[int, int]]:
    """(start, end) of the batches of one epoch. The last may be smaller. With BatchNorm a last
    batch of at most FEW samples, whose statistics mean little, is left out unless it is the only
    one.
    """
    count = batch_count(n, size, batch_norm)
    return [(start, min(start + size, n)) for start in range(0, count * size, size)]

"""Samples (x, y), x a tensor or a dict of tensors, and the batches that they are cut into."""

from __future__ import annotations

import torch

from fednet.tensors import Inputs, mapped

FEW = 2  # samples of a last batch whose variance BatchNorm should not learn


def length(x: Inputs) -> int:
    """Samples in x: the length of its first axis."""
    return int((next(iter(x.values())) if isinstance(x, dict) else x).shape[0])


def take(x: Inputs, index: torch.Tensor) -> Inputs:
    """The rows `index` of x, gathered: a tensor or a dict of tensors."""
    return mapped(x, lambda part: part.index_select(0, index))


def piece(x: Inputs, start: int, end: int) -> Inputs:
    """Rows start..end of x, as views."""
    return mapped(x, lambda part: part[start:end])


def joined(
    x: Inputs, y: torch.Tensor, more: tuple[Inputs, torch.Tensor] | None
) -> tuple[Inputs, torch.Tensor]:
    """The samples (x, y) followed by those of `more`, along the first axis; (x, y) where `more` is
    None.
    """
    if more is None or not len(more[1]):
        return x, y
    other = more[0]
    if isinstance(x, dict) and isinstance(other, dict):
        both: Inputs = {k: torch.cat([v, other[k]]) for k, v in x.items()}
    else:
        assert isinstance(x, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        both = torch.cat([x, other])
    return both, torch.cat([y, more[1].to(y.dtype)])


def batches(
    n: int, size: int, last: str = "auto", batch_norm: bool = False
) -> list[tuple[int, int]]:
    """(start, end) of the batches of one epoch.

    last: what becomes of a last batch of fewer than `size` samples: keep; drop; merge it with the
    one before; auto: keep it, but under BatchNorm drop one of FEW samples or less. A batch that is
    the only one stays. Under BatchNorm a last batch of one sample has no variance, and is dropped
    by `keep` too.
    """
    cuts = [(start, min(start + size, n)) for start in range(0, n, size)]
    left = n % size
    if not left or len(cuts) == 1:
        return cuts
    if last == "merge":
        return [*cuts[:-2], (cuts[-2][0], n)]
    few = {"auto": FEW, "keep": 1, "drop": size}[last]
    if left <= few and (batch_norm or last == "drop"):
        cuts.pop()
    return cuts

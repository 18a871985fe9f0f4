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


def batch_count(n: int, size: int, last: str = "auto", batch_norm: bool = False) -> int:
    """The number of batches of one epoch, see `batches`."""
    count = -(-n // size)
    left = n % size
    if not left or count == 1:
        return count
    few = {"auto": FEW, "keep": 1, "drop": size, "merge": size}[last]
    removed = left <= few and (batch_norm or last in ("drop", "merge"))
    return count - 1 if removed else count


def batches(
    n: int, size: int, last: str = "auto", batch_norm: bool = False
) -> list[tuple[int, int]]:
    """(start, end) of the batches of one epoch.

    last: what becomes of a last batch of fewer than `size` samples: keep; drop; merge it with the
    one before; auto: keep it, but under BatchNorm drop one of FEW samples or less. A batch that is
    the only one stays. Under BatchNorm a last batch of one sample has no variance, and is dropped
    by `keep` too.
    """
    count = batch_count(n, size, last, batch_norm)
    cuts = [(start, min(start + size, n)) for start in range(0, count * size, size)]
    if last == "merge" and cuts:
        cuts[-1] = (cuts[-1][0], n)
    return cuts

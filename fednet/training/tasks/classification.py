"""One class a sample, or one a position of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fednet.registry import task


@task("classification")
class Classification:
    """Cross-entropy; correct and total by class.

    outputs: logits (n, C), or (n, t, C) for sequences, as a Linear head gives them; y: (n,) or (n,
    t) int64 classes.
    """

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, a scalar with a graph."""
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten())

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(n,) cross-entropy of each sample; the mean over its positions for sequences."""
        each = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
        return each if y.ndim == 1 else each.view(len(y), -1).mean(1)

    def counts(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(2, C) int64: correct and total by true class. The first of equal logits is the
        prediction.
        """
        classes = outputs.shape[-1]
        right = y[outputs.argmax(dim=-1) == y]
        return torch.stack([torch.bincount(v.reshape(-1), minlength=classes) for v in (right, y)])

    def accuracy(self, counts: Any) -> float:
        """Correct over total, in 0..1; 0 where there is nothing to judge. counts: (2, C), a tensor
        or an array.
        """
        correct, total = int(counts[0].sum()), int(counts[1].sum())
        return correct / total if total else 0.0

"""Classification by cross-entropy: one class a sample, or one at each position of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fednet.registry import task


@task("classification")
class Classification:
    """Cross-entropy over classes; accuracy by exact counts."""

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """outputs: (n, C), or (n, t, C) with y (n, t)."""
        return F.cross_entropy(outputs.flatten(0, -2), y.flatten())

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
        return each if each.ndim == 1 else each.flatten(1).mean(1)

    def counts(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        truth = y.flatten()
        hit = outputs.flatten(0, -2).argmax(-1) == truth
        # A comparison rather than a bincount: the same counts, without waiting for the device.
        each = truth[:, None] == torch.arange(outputs.shape[-1], device=y.device)
        return torch.stack([(each & hit[:, None]).sum(0), each.sum(0)])

    def accuracy(self, counts: Any) -> float:
        total = int(counts[1].sum())
        return int(counts[0].sum()) / total if total else 0.0

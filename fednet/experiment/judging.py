"""What an evaluation asks of a client, and what it answers: integer counts, so that sums over
clients are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fednet.algorithms.base import Payload, Weights, kind
from fednet.errors import RemoteProtocolError
from fednet.training.evaluation import Counts

SPLIT = ("training", "evaluating", "encoding")  # what a reply's `split` tells the seconds of
JUDGED = ("global", "personal", "balanced", "finetuned", "finetuned_balanced")


class GlobalModel(Payload):
    """What comes down for an evaluation: the global model as it is judged."""

    x: Weights


class Judgement(Payload):
    """What an evaluation sends up: (5, 2, C) int64, correct and total by class, in the order of
    `JUDGED` (all zero where there is nothing to judge), and (5,) float64 sums of the loss.
    """

    counts: kind("accuracy")  # type: ignore[valid-type]
    losses: kind("accuracy")  # type: ignore[valid-type]

    def check(self, classes: int) -> None:
        """Raises RemoteProtocolError where these are no counts."""
        counts: Any = self.counts
        losses: Any = self.losses
        if (
            counts.dtype != torch.int64
            or losses.dtype != torch.float64
            or tuple(counts.shape) != (len(JUDGED), 2, classes)
            or tuple(losses.shape) != (len(JUDGED),)
            or bool((counts[:, 0] < 0).any())
            or bool((counts[:, 0] > counts[:, 1]).any())
        ):
            raise RemoteProtocolError(
                f"a judgement of shape {tuple(counts.shape)} in which more are correct than were "
                f"tested, or that is none at all"
            )


def judgements(payload: Judgement, classes: int) -> dict[str, Counts]:
    """What a judgement says, by name; what was not judged is left out."""
    found = {}
    for row, name in enumerate(JUDGED):
        table = payload.counts[row].numpy().astype(np.int64)  # type: ignore[attr-defined]
        n = int(table[1].sum())
        if n:
            found[name] = Counts(table[:, : max(1, classes)], float(payload.losses[row]), n)  # type: ignore[attr-defined]
    return found

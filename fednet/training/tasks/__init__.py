"""Tasks: the loss that is trained, and the exact counts of an evaluation.

Counts are int64, so that sums over clients, workers and any order of arrival are the same to the
bit.
"""

from __future__ import annotations

from typing import Protocol

import torch


def labels_of(task: LearningTask, y: torch.Tensor) -> torch.Tensor | None:
    """(n,) how many labels each sample has, by which its loss counts; None: all count alike."""
    count = getattr(task, "labels", None)
    return None if count is None else count(y)


class LearningTask(Protocol):
    """The interface of a task. outputs: of the model; y: the targets of n samples."""

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over the samples: a scalar with a graph."""
        ...

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(n,) loss of each sample."""
        ...

    def counts(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(2, C) int64: correct and total, by class where there are classes. Accuracy is their
        sums' quotient, everywhere. A server refuses a total beyond the number of labels or values
        in the client's test set.
        """
        ...

    # A task whose `has_accuracy` is False has no accuracy: its loss is shown instead.

    # A task whose samples have several labels may say in `labels(self, y)` how many each has, (n,)
    # int64. Means of `losses` are then weighted by it, as `loss` weighs; else all count alike.

    # For metrics (`evaluate.metrics`) a task may also have methods `count_NAME(self, outputs, y)`.
    # Each returns an int64 tensor of a fixed shape, of counts that add up over samples. No count
    # may be below 0, or above the number of labels or values in the client's test set; of
    # exact sums, `count_sum_NAME`, none above 2**32 times that, see `training.sums.exact_sum`.


def has_accuracy(task: LearningTask) -> bool:
    """Whether the task's counts are those of an accuracy; if not, its loss says how good a model
    is.
    """
    return bool(getattr(task, "has_accuracy", True))

"""Values."""

from __future__ import annotations

import torch

from fednet.errors import ConfigError
from fednet.registry import task
from fednet.training.sums import exact_sum


@task("regression")
class Regression:
    """Mean squared error. There is no accuracy, and a run shows its loss, unless a subclass has a
    `tolerance`: a value then counts as correct within it.

    outputs: (n, ...) of y's shape, or one dimension of size 1 more, as (n, 1) for y (n,); any other
    shape is a ConfigError. For a tolerance register a subclass:

        @fednet.task("degrees")
        class Degrees(Regression):
            tolerance = 0.1
    """

    tolerance: float | None = None

    @property
    def has_accuracy(self) -> bool:
        return self.tolerance is not None

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean squared error, a scalar with a graph."""
        return (self._like(outputs, y) - y).square().mean()

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(n,) squared error of each sample, the mean over its values."""
        each = (self._like(outputs, y) - y).square()
        return each if each.ndim == 1 else each.flatten(1).mean(1)

    def counts(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(2, 1) int64: values within tolerance, none without one; and all values."""
        within = -1.0 if self.tolerance is None else self.tolerance
        near = (self._like(outputs, y) - y).abs() <= within
        return torch.stack([near.sum(), near.new_tensor(near.numel(), dtype=torch.int64)]).view(
            2, 1
        )

    def count_sum_values(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """(5, k, 14) int64, for k values a sample: exact sums of the targets above 0, of those
        below, of their squares, and of the errors' sizes and squares; see `exact_sum`.
        """
        outputs = self._like(outputs, y).double().reshape(len(y), -1)
        y = y.double().reshape(len(y), -1)
        errors = outputs - y
        parts = y.clamp(min=0), -y.clamp(max=0), y.square(), errors.abs(), errors.square()
        return torch.stack([exact_sum(part) for part in parts])

    @staticmethod
    def _like(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if outputs.ndim == y.ndim + 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        # (n, 1) - (n, k) would broadcast to (n, k) without a word
        if outputs.shape != y.shape:
            raise ConfigError(
                f"task: regression compares outputs of shape {tuple(outputs.shape)} with targets "
                f"of shape {tuple(y.shape)}; the model must give {tuple(y.shape[1:])} a sample."
            )
        return outputs

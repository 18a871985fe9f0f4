"""Metrics of regression, as scikit-learn defines them: means over the columns of the targets."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fednet.training.metrics import metric
from fednet.training.sums import number


def _columns(sums: np.ndarray) -> list[list[Fraction]]:
    """By column: the sums of its targets above 0 and of those below, of their squares, and of the
    errors' sizes and squares.
    """
    return [[number(digits.tolist()) for digits in column] for column in sums.swapaxes(0, 1)]


@metric("r2")
def r2(sum_values: np.ndarray, n: int) -> float:
    """Share of the targets' variance that the predictions explain (R squared). Columns whose
    targets are all the same are left out.
    """
    found = []
    for above, below, squares, _, errors in _columns(sum_values):
        variance = squares - (above - below) ** 2 / Fraction(n)
        if variance > 0:
            found.append(float(1 - errors / variance))
    return sum(found) / len(found)


@metric("mae", lower_is_better=True)
def mae(sum_values: np.ndarray, n: int) -> float:
    """Mean absolute error."""
    found = [float(sizes / Fraction(n)) for _, _, _, sizes, _ in _columns(sum_values)]
    return sum(found) / len(found)


@metric("rmse", lower_is_better=True)
def rmse(sum_values: np.ndarray, n: int) -> float:
    """Root of the mean squared error."""
    found = [math.sqrt(errors / Fraction(n)) for *_, errors in _columns(sum_values)]
    return sum(found) / len(found)

"""Exact sums of floats, as integer counts: the same to the bit in any order and in batches of any
size.

A float64 is cut into digits of 32 bits, and the digits are summed one by one, as in a long addition
without carries.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import torch

EXPONENTS = tuple(range(224, -193, -32))  # a digit d at exponent e is d * 2**e
LARGEST = 2.0**255


def exact_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums values >= 0, (n, ...), over n. Returns the digits of the sums, (..., 14) int64, each at
    most n * 2**32. A value loses what is below 2**-192, about 1e-58; NaN and what is above 2**255
    count as 2**255.
    """
    rest = torch.nan_to_num(values.double(), nan=LARGEST, posinf=LARGEST).clamp(max=LARGEST)
    digits = []
    for exponent in EXPONENTS:
        digit = (rest * 2.0**-exponent).trunc()
        digits.append(digit.long().sum(0))
        rest = rest - digit * 2.0**exponent
    return torch.stack(digits, -1)


def number(digits: Iterable[float]) -> Fraction:
    """Returns the number that has these digits, without rounding."""
    return sum((Fraction(d) * Fraction(2) ** e for d, e in zip(digits, EXPONENTS)), Fraction(0))

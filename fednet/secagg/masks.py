"""Masks: streams of random residues that are added to a vector, and subtracted from a sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fednet.secagg import primitives
from fednet.secagg.terms import Terms

Residues = npt.NDArray[np.uint64]


def add_mask(terms: Terms, total: Residues, key: bytes, plus: bool) -> None:
    """Adds PRG(key) to total, or subtracts it. `reduce_sums` takes the sums modulo R."""
    mask = primitives.mask_stream(key, terms.length, terms.width)
    (np.add if plus else np.subtract)(total, mask, out=total)


def reduce_sums(terms: Terms, total: Residues) -> Residues:
    """Returns sums modulo R. They wrapped around at 2^64, which R divides."""
    return total if terms.width == 8 else total & np.uint64(terms.modulus - 1)

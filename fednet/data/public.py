"""What is taken out of the training pool before it is divided: the server's public samples, and a
validation set.

Neither ever comes from the test set, and no client holds any of either.
"""

from __future__ import annotations

import numpy as np

from fednet.errors import ConfigError
from fednet.plain import part_of


def balanced(y: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """`samples` indices into y, as many of each class (FedPDC); what does not divide goes to the
    first classes.

    Raises ConfigError where a class has too few.
    """
    classes = np.unique(y)
    chosen = []
    for k, c in enumerate(classes):
        wanted = samples // len(classes) + (k < samples % len(classes))
        of_class = np.flatnonzero(y == c)
        if wanted > len(of_class):
            raise ConfigError(
                f"data.public.samples: {samples} wants {wanted} of class {c}, which has "
                f"{len(of_class)}."
            )
        chosen.append(rng.permutation(of_class)[:wanted])
    return np.sort(np.concatenate(chosen))


def stratified(y: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """floor(fraction * n) indices into y in y's class proportions (FedRDS): largest remainders;
    ties: first class.
    """
    classes, counts = np.unique(y, return_counts=True)
    total = part_of(fraction, len(y))
    exact = counts * total
    sizes = exact // len(y)
    missing = total - int(sizes.sum())
    sizes[np.argsort(-(exact % len(y)), kind="stable")[:missing]] += 1
    chosen = [rng.permutation(np.flatnonzero(y == c))[:size] for c, size in zip(classes, sizes)]
    return np.sort(np.concatenate(chosen))

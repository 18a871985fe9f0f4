"""Each client's own test samples."""

from __future__ import annotations

import numpy as np


def like_train(train: np.ndarray, y_test: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """The test set cut in each class in proportion to what the clients hold of it; every test
    sample used once.

    train: (N, C) training samples by client and class. The cuts floor(cumsum(n_ic) * test_c / n_c)
    are taken in whole numbers, where a float's cumsum could end just under one and lose a sample. A
    class that no client trains on is cut by the clients' sizes.
    """
    parts: list[list[np.ndarray]] = [[] for _ in train]
    for c in range(train.shape[1]):
        of_class = rng.permutation(np.flatnonzero(y_test == c))
        share = train[:, c] if train[:, c].any() else train.sum(axis=1)
        cuts = np.cumsum(share) * len(of_class) // max(1, int(share.sum()))
        for part, piece in zip(parts, np.split(of_class, cuts[:-1])):
            part.append(piece)
    return [np.concatenate(pieces) for pieces in parts]


def cut(part: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) of one client under `merge_split`: 75 and 25 % of its share of train and test
    together.

    At least one sample stays for training.
    """
    shuffled = rng.permutation(part)
    kept = max(1, len(part) * 3 // 4)
    return shuffled[:kept], shuffled[kept:]

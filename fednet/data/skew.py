"""Skew that a division of the samples does not make, and measures of what it did make."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fednet.data.base import Data
from fednet.seeds import torch_rng
from fednet.tensors import Inputs


def noise(
    data: Data, sigma: float, seed: int, client: int, clients: int
) -> Callable[[Inputs, str], Inputs] | None:
    """Feature skew: what adds Gaussian noise of standard deviation sigma * client / (clients - 1)
    to a client's inputs, so that the first has none and the last sigma; None where there is none.

    The levels are those of the code of Li et al., ICDE 2022 (arXiv:2102.02079: `--noise`), whose
    section IV calls sigma i / N a variance. sigma: in units of 0..1 for uint8 images (before mean
    and std), else of the inputs themselves; whole numbers are left alone. Drawn once for each
    sample, before any augmentation: it is a property of the client's data, its own test split
    included. That code draws it anew each time that a sample is loaded, after the augmentation, and
    judges the global model on as many copies of the test set, with the noise of each client; here
    the server's test set has none.
    What is called takes (inputs, `train` or `test`).
    """
    level = sigma * client / max(1, clients - 1)
    if level == 0:
        return None

    def one(x: torch.Tensor, which: str, name: str = "") -> torch.Tensor:
        if not x.is_floating_point():
            return x
        draws = torch_rng(seed, f"feature_noise/{which}/{name}", client=client)
        added = torch.randn(x.shape, generator=draws).mul_(level)
        if data.std is not None and x.ndim > 1 and x.shape[1] == len(data.std):
            added.div_(torch.tensor(data.std).view(1, -1, *([1] * (x.ndim - 2))))
        return x + added.to(x.device)

    def changed(x: Inputs, which: str) -> Inputs:
        if isinstance(x, dict):
            return {name: one(part, which, name) for name, part in x.items()}
        return one(x, which)

    return changed


def measures(table: np.ndarray) -> dict[str, float]:
    """How skewed a division is. table: (N, C) samples by client and class, each client with some.

    emd: mean over the clients of sum_c |p_i(c) - p(c)|, between 0 and 2 (the earth mover's
    distance of Zhao et al. 2018, arXiv:1806.00582, between classes equally far apart). hellinger:
    mean distance of p_i and p, between 0 and 1. classes: mean of exp(entropy of p_i), a client's
    effective number of classes, between 1 and C. gini: of the clients' sizes, 0 where
    all hold the same, (N - 1) / N where one holds all.
    """
    held = table.sum(axis=1, keepdims=True)
    p_i, p = table / held, table.sum(axis=0) / table.sum()
    entropy = -np.sum(p_i * np.log(p_i, out=np.zeros_like(p_i), where=p_i > 0), axis=1)
    sizes = np.sort(held[:, 0])
    ranks = np.arange(1, len(sizes) + 1)
    return {
        "emd": float(np.abs(p_i - p).sum(axis=1).mean()),
        "hellinger": float(np.sqrt(((np.sqrt(p_i) - np.sqrt(p)) ** 2).sum(axis=1) / 2).mean()),
        "classes": float(np.exp(entropy).mean()),
        "gini": float((2 * ranks - len(sizes) - 1) @ sizes / (len(sizes) * sizes.sum())),
    }

"""How the data are divided: samples of each client by class, and measures of skew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rows(table: np.ndarray, names: Sequence[str] | None = None) -> list[list[str]]:
    """Returns a header and one row per client: client, samples of each class ("·" for none), their
    sum; then the sums of columns.

    table: (N, C) samples; names: of the classes, else their numbers.
    """

    def line(first: str, counts: np.ndarray) -> list[str]:
        return [first, *(f"{n}" if n else "·" for n in counts.tolist()), str(int(counts.sum()))]

    header = ["client", *(str(n) for n in (names or range(table.shape[1]))), "samples"]
    return [
        header,
        *(line(str(i), counts) for i, counts in enumerate(table)),
        line("all", table.sum(axis=0)),
    ]


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


def skew(table: np.ndarray) -> str:
    """Returns a line of the measures of skew. table: (N, C) samples."""
    found = measures(table)
    return (
        f"Label skew: mean distance of the clients' label distributions to the overall one: earth "
        f"mover's {found['emd']:.3f}, Hellinger {found['hellinger']:.3f}. On average a client has "
        f"{found['classes']:.2f} effective classes of {table.shape[1]}. Size inequality (Gini): "
        f"{found['gini']:.3f}."
    )

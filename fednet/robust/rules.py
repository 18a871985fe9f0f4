"""Aggregation rules, as functions of the replies' updates.

    rows   (m, P) float32 or float64, one update a reply, in ascending order of the clients
    f      malicious replies that a rule tolerates, 2 f < m

All replies count the same: a malicious client would lie about its number of samples. Each rule
names its source; the values were compared with those of ByzFL (El Mhamdi et al.).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from fednet.tensors import CHUNK, dot


def columns(rows: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Applies function((m, b) float64) -> (b,) to blocks of columns that fit into the cache."""
    into = torch.empty(rows.shape[1], dtype=torch.float64)
    width = max(1, CHUNK // len(rows))
    for start in range(0, rows.shape[1], width):
        into[start : start + width] = function(rows[:, start : start + width].double())
    return into


def weighted_sum(rows: torch.Tensor, weights: Sequence[float]) -> torch.Tensor:
    """Returns the (P,) float64 sum of the rows, added in their order."""
    total = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, weight in zip(rows, weights):
        total += row.double() * weight
    return total


def mean(rows: torch.Tensor, weights: Sequence[float] | None = None) -> torch.Tensor:
    """Returns the weighted mean of the rows. None: all count the same."""
    weights = [1.0] * len(rows) if weights is None else weights
    return weighted_sum(rows, weights) / (sum(weights) or 1.0)


def median(rows: torch.Tensor) -> torch.Tensor:
    """Returns the coordinate-wise median; of an even number the mean of the middle two. Yin et al.,
    ICML 2018 (arXiv:1803.01498), Definition 1.
    """
    m = len(rows)

    def middle(block: torch.Tensor) -> torch.Tensor:
        ordered = block.sort(dim=0).values
        return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2

    return columns(rows, middle)


def trimmed_mean(rows: torch.Tensor, f: int) -> torch.Tensor:
    """Returns the coordinate-wise mean without the f largest and the f smallest values. Yin et al.,
    ICML 2018, Definition 2.
    """
    m = len(rows)
    return columns(rows, lambda block: block.sort(dim=0).values[f : m - f].mean(dim=0))


def scores(rows: torch.Tensor, closest: int) -> list[float]:
    """Returns Krum's score of each reply: the sum of its squared distances to the `closest`
    others.
    """
    m = len(rows)
    distances = [[0.0] * m for _ in range(m)]
    for i in range(m):
        for j in range(i):
            gap = rows[i].double() - rows[j].double()
            distances[i][j] = distances[j][i] = dot(gap, gap)
    return [sum(sorted(row[:i] + row[i + 1 :])[:closest]) for i, row in enumerate(distances)]


def krum(rows: torch.Tensor, f: int, keep: int = 1) -> list[int]:
    """Returns the `keep` replies with the lowest scores, of equals the earlier. Krum keeps one,
    Multi-Krum the mean of several. Blanchard et al., NeurIPS 2017 (arXiv:1703.02757), section 4:
    the score sums over the m - f - 2 nearest. ByzFL takes one more.
    """
    return lowest(scores(rows, max(1, len(rows) - f - 2)), keep)


def lowest(found: Sequence[float], keep: int) -> list[int]:
    """Returns the numbers of the `keep` lowest scores, of equals the earlier."""
    return sorted(range(len(found)), key=lambda i: (found[i], i))[:keep]


def norm_bound(rows: torch.Tensor, bound: float | None) -> torch.Tensor:
    """Returns the mean of the updates, each scaled down to norm `bound` if it is longer; None: the
    median of their norms. Sun et al., 2019 (arXiv:1911.07963), section 4, without its noise.
    """
    lengths = [dot(row, row) ** 0.5 for row in rows]
    if bound is None:
        bound = statistics.median(lengths)
    scales = [bound / length if length > bound else 1.0 for length in lengths]
    return weighted_sum(rows, scales) / len(rows)


def geometric_median(rows: torch.Tensor, iterations: int, smoothing: float = 1e-6) -> torch.Tensor:
    """Takes smoothed Weiszfeld steps from zero towards the point with the least sum of distances.
    RFA: Pillutla et al., IEEE TSP 2022 (arXiv:1912.13445), Algorithm 2 with equal weights;
    smoothing: its nu.
    """
    z = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    for _ in range(iterations):
        total = torch.zeros_like(z)
        weights = 0.0
        for row in rows:
            gap = row.double() - z
            beta = 1.0 / len(rows) / max(smoothing, dot(gap, gap) ** 0.5)
            total += beta * row.double()
            weights += beta
        z = total / weights
    return z

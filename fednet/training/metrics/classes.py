"""Metrics of classes, as scikit-learn defines them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fednet.training.metrics import metric


def _by_class(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (hits, true samples, predicted samples), each (C,)."""
    return np.diagonal(confusion), confusion.sum(1), confusion.sum(0)


def _f1(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (F1, true samples), of the classes that are true or predicted for any sample."""
    hits, true, predicted = _by_class(confusion)
    here = true + predicted > 0
    return 2 * hits[here] / (true + predicted)[here], true[here]


@metric("f1_macro")
def f1_macro(confusion: np.ndarray) -> float:
    """Mean of the classes' F1."""
    return float(_f1(confusion)[0].mean())


@metric("f1_micro")
def f1_micro(confusion: np.ndarray) -> float:
    """F1 over all samples: with one class a sample it is the accuracy."""
    return float(np.trace(confusion) / confusion.sum())


@metric("f1_weighted")
def f1_weighted(confusion: np.ndarray) -> float:
    """Mean of the classes' F1, weighted by their samples."""
    f1, true = _f1(confusion)
    return float((f1 * true).sum() / true.sum())


@metric("balanced_accuracy")
def balanced_accuracy(confusion: np.ndarray) -> float:
    """Mean recall of the classes that have samples."""
    hits, true, _ = _by_class(confusion)
    return float((hits[true > 0] / true[true > 0]).mean())


@metric("miou")
def miou(confusion: np.ndarray) -> float:
    """Mean over the classes of intersection over union (Jaccard index)."""
    hits, true, predicted = _by_class(confusion)
    union = true + predicted - hits
    return float((hits[union > 0] / union[union > 0]).mean())


@metric("perplexity", lower_is_better=True)
def perplexity(loss: float, n: int) -> float:
    """exp of the mean loss."""
    return math.exp(loss / n)


def _of_classes(scores: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (negatives, positives) by bin, from the highest score down, of each class that has
    both. Of two classes only class 1, as in scikit-learn.
    """
    chosen = scores[:, 1:] if scores.shape[1] == 2 else scores
    for negatives, positives in zip(*chosen[:, :, ::-1]):
        if negatives.sum() and positives.sum():
            yield negatives, positives


def _mean(found: list[float]) -> float:
    return sum(found) / len(found)


def _auc_error(scores: np.ndarray) -> float:
    """Half of the share of (positive, negative) pairs in the same bin."""
    found = [0.0]
    for negatives, positives in _of_classes(scores):
        same = (positives * negatives).sum()
        found.append(float(same / (negatives.sum() * positives.sum())) / 2)
    return _mean(found[1:] or found)


def _precision_error(scores: np.ndarray) -> float:
    """Sum over the bins of a * b / c: a is the bin's share of all positives, b the number of
    samples in it less one, c of those in it and in higher ones.
    """
    found = [0.0]
    for negatives, positives in _of_classes(scores):
        several = negatives + positives
        above = np.maximum(np.cumsum(several), 1)
        found.append(float((positives * (several - 1) / above).sum() / positives.sum()))
    return _mean(found[1:] or found)


@metric("auc", error=_auc_error)
def auc(scores: np.ndarray) -> float:
    """Area under the ROC curve: mean over the classes, each against the rest."""
    found = []
    for negatives, positives in _of_classes(scores):
        below = negatives.sum() - np.cumsum(negatives)
        pairs = (positives * (below + negatives / 2)).sum()
        found.append(float(pairs / (negatives.sum() * positives.sum())))
    return _mean(found)


@metric("average_precision", error=_precision_error)
def average_precision(scores: np.ndarray) -> float:
    """Sum of precision times gain in recall: mean over the classes, each against the rest."""
    found = []
    for negatives, positives in _of_classes(scores):
        right = np.cumsum(positives)
        chosen = np.maximum(right + np.cumsum(negatives), 1)
        found.append(float((positives * right / chosen).sum() / positives.sum()))
    return _mean(found)

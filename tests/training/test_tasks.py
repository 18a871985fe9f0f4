from __future__ import annotations

import math

import pytest
import torch

from fednet.registry import task


def test_classification_counts_correct_and_total_by_true_class():
    counts = task.get("classification")().counts
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [5.0, 5.0, 0.0]])
    # Right, wrong, right, wrong (of equal logits the first is predicted).
    y = torch.tensor([0, 0, 1, 1])
    assert counts(logits, y).tolist() == [[1, 1, 0], [2, 2, 0]]
    assert counts(logits, y).dtype == torch.int64


def test_accuracy_is_correct_over_total_and_zero_of_nothing():
    c = task.get("classification")()
    assert c.accuracy(torch.tensor([[1, 1, 0], [2, 1, 1]])) == 0.5
    assert c.accuracy(torch.zeros((2, 3), dtype=torch.int64)) == 0.0


def test_cross_entropy_is_the_log_of_the_true_class():
    c = task.get("classification")()
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
    y = torch.tensor([0, 1])
    assert c.losses(logits, y).tolist() == pytest.approx([math.log(4), math.log(2)])
    assert float(c.loss(logits, y)) == pytest.approx(1.5 * math.log(2))


def test_a_sequence_is_judged_at_every_position():
    c = task.get("classification")()
    logits = torch.tensor([[[3.0, 0.0], [0.0, 3.0], [3.0, 0.0]]])  # (1, 3, 2): predicts 0 1 0
    y = torch.tensor([[0, 1, 1]])
    assert c.counts(logits, y).tolist() == [[1, 1], [1, 2]]
    assert c.losses(logits, y).shape == (1,)
    assert float(c.losses(logits, y)) == pytest.approx(float(c.loss(logits, y)))


def test_regression_counts_values_within_tolerance_and_means_squares():
    r = task.get("regression")()
    outputs, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([1.5, 2.0, 6.0])
    assert r.losses(outputs, y).tolist() == [0.25, 0.0, 4.0]
    assert float(r.loss(outputs, y)) == pytest.approx(4.25 / 3)
    assert r.counts(outputs, y).tolist() == [[2], [3]]
    assert r.accuracy(torch.tensor([[2], [3]])) == pytest.approx(2 / 3)

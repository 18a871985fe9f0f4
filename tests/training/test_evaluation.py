from __future__ import annotations

import pytest
import torch
from torch import nn

from fednet.training.evaluation import evaluate, logits
from fednet.training.tasks.classification import Classification

X = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 3.0, 0.0], [0.0, 1.0, 0.5]])
Y = torch.tensor([0, 1, 0, 1])  # right, right, wrong, right


@pytest.mark.parametrize("size", [1, 3, 100])
def test_counts_are_exact_however_the_set_is_cut(size):
    counts = evaluate(nn.Identity(), (X, Y), Classification(), size)
    assert counts.table.tolist() == [[1, 2, 0], [2, 2, 0]]
    assert counts.accuracy == 0.75
    assert counts.n == 4
    assert counts.mean_loss == pytest.approx(float(nn.functional.cross_entropy(X, Y)), rel=1e-6)


def test_no_samples_are_accuracy_zero_and_no_error():
    counts = evaluate(nn.Identity(), (X[:0], Y[:0]), Classification())
    assert (counts.accuracy, counts.mean_loss) == (0.0, 0.0)


def test_evaluation_is_in_eval_mode_and_changes_no_buffer():
    norm = nn.BatchNorm1d(3)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    evaluate(norm, (X, Y), Classification())
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_what_a_model_draws_in_eval_mode_is_the_same_wherever_it_is_judged():
    x, y = torch.zeros(64, 4), torch.arange(64) % 4
    found, scores = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(evaluate(Noisy(), (x, y), Classification()).loss)
        scores.append(logits(Noisy(), x, 16))
    assert len(set(found)) == 1
    assert torch.equal(*scores)

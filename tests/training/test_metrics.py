"""Counts of evaluations, and metrics of summed counts: worked by hand, and the values of
scikit-learn, where it is there.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from fednet import registry
from fednet.training import metrics
from fednet.training.evaluation import Counts, evaluate, logits
from fednet.training.sums import exact_sum, number
from fednet.training.tasks.classification import Classification, bins_of, log_odds

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
    x = torch.zeros(64, 4)
    y = torch.arange(64) % 4
    found = []
    scores = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(evaluate(Noisy(), (x, y), Classification()).loss)
        scores.append(logits(Noisy(), x, 16))
    assert len(set(found)) == 1
    assert torch.equal(*scores)


# Rows: the true class. Class 0: 3 right, 1 taken for 1; class 1: 2 right, 2 taken for 0; class 2:
# no sample, and predicted for none; class 3: 1 sample, taken for 1.
CONFUSION = np.array([[3, 1, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]])
HAND = {
    "f1_macro": (6 / 9 + 4 / 8 + 0) / 3,
    "f1_micro": 5 / 9,
    "f1_weighted": (4 * 6 / 9 + 4 * 4 / 8 + 1 * 0) / 9,
    "balanced_accuracy": (3 / 4 + 2 / 4 + 0) / 3,
    "miou": (3 / 6 + 2 / 6 + 0) / 3,
    "perplexity": math.exp(2.0),
}
# Two bins above and two below: class 1's positives are in the bins 999, 500 and 500, its negatives
# in 500 and 0. Of 6 pairs 4 are in order and 2 in the same bin.
SCORES = np.zeros((2, 2, 4096), dtype=np.int64)
SCORES[1, 1, 999] = 1
SCORES[1, 1, 500] = 2
SCORES[0, 1, 500] = 1
SCORES[0, 1, 0] = 1
OF_SCORES = {"auc": (4 + 2 / 2) / 6, "average_precision": 1 / 3 * 1 + 2 / 3 * 3 / 4}


def values(names, **more) -> dict[str, float]:
    return metrics.values(names, {"n": 9, "loss": 18.0, **more})


def test_the_built_in_metrics_are_those_worked_by_hand():
    found = values([*HAND, *OF_SCORES], confusion=CONFUSION, scores=SCORES)
    assert found == pytest.approx(HAND | OF_SCORES)
    assert {*found, *OF_VALUES} == {*registry.metric.names()}


OF_VALUES = {"r2": 1 - 5 / 6, "mae": 3 / 3, "rmse": math.sqrt(5 / 3)}


def of_values(outputs, y, size=2):
    task = registry.task.get("regression")()
    data = torch.tensor(outputs), torch.tensor(y)
    needed = metrics.counts_needed(OF_VALUES)
    return evaluate(nn.Identity(), data, task, size, needed)


def test_the_metrics_of_regression_are_those_worked_by_hand():
    # targets about their mean 0: 4 + 1 + 1; errors 1, 0 and 2
    one = of_values([[-1.0], [1.0], [3.0]], [-2.0, 1.0, 1.0])
    assert one.metrics(OF_VALUES) == pytest.approx(OF_VALUES)
    # the second column is constant, and all its errors are 2
    two = of_values([[-1.0, 5.0], [1.0, 5.0], [3.0, 5.0]], [[-2.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    expected = {"r2": 1 / 6, "mae": (1 + 2) / 2, "rmse": (math.sqrt(5 / 3) + 2) / 2}
    assert two.metrics(OF_VALUES) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
def test_the_sums_of_regression_are_exact_in_any_order_and_far_from_zero(scale):
    draw = torch.Generator().manual_seed(0)
    y = (1e6 + torch.randn(300, generator=draw)) * scale
    outputs = y + torch.randn(300, generator=draw) * scale / 2
    whole = of_values(outputs[:, None].tolist(), y.tolist(), 7)
    turned = of_values(outputs.flip(0)[:, None].tolist(), y.flip(0).tolist(), 64)
    assert np.array_equal(whole.more()["sum_values"], turned.more()["sum_values"])
    wide = y.double() / scale - 1e6
    far = (outputs.double() - y.double()) / scale
    r2 = 1 - far.square().sum() / (wide - wide.mean()).square().sum()
    found = whole.metrics(OF_VALUES)
    assert found["r2"] == pytest.approx(float(r2), rel=1e-9)
    assert found["rmse"] == pytest.approx(float(far.square().mean().sqrt()) * scale, rel=1e-12)


def test_a_model_that_diverged_has_sums_that_are_counts():
    found = exact_sum(torch.tensor([[math.nan], [math.inf], [1e300], [0.5]]).double())
    assert bool((found >= 0).all())
    assert number(found[0].tolist()) == 3 * 2**255 + Fraction(1, 2)


def test_what_is_not_defined_is_left_out():
    only_positive = SCORES * np.array([0, 1])[:, None, None]
    assert values(["auc", "perplexity"], scores=only_positive) == {"perplexity": math.exp(2.0)}
    assert Counts(np.zeros((2, 3))).metrics(["perplexity"]) == {}


def test_a_metric_that_changes_its_argument_leaves_the_others_theirs(monkeypatch):
    monkeypatch.setattr(registry.metric, "_parts", dict(registry.metric._parts))

    @metrics.metric("wipes")
    def wipes(confusion):
        confusion[:] = 0
        return 0.0

    found = values(["wipes", "miou"], confusion=CONFUSION.copy())
    assert found == {"wipes": 0.0, "miou": pytest.approx(HAND["miou"])}


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("void", [0, 2])
def test_the_loss_of_sequences_is_the_mean_over_all_labels(size, void):
    outputs = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 4, (6, 5), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([1, 5, 2, 1, 3, 4])
    lengths[:void] = 0
    y[torch.arange(5) >= lengths[:, None]] = -100
    counts = evaluate(nn.Identity(), (outputs, y), Classification(), size, ("n",))
    loss = float(nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten()))
    assert counts.n == counts.more()["n"] == int(lengths.sum())
    assert counts.mean_loss == pytest.approx(loss, rel=1e-6)
    assert counts.metrics(["perplexity"])["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)


def exact(outputs: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """AUC and average precision of class 1 of two, from all pairs of different scores."""
    score = (outputs[:, 1].double() - outputs[:, 0].double()).numpy()
    positive = score[y.numpy() == 1]
    negative = score[y.numpy() == 0]
    area = (positive[:, None] > negative).mean()
    precision = [(positive >= s).sum() / (score >= s).sum() for s in positive]
    return float(area), float(np.mean(precision))


@pytest.mark.parametrize(
    ("shift", "scale", "off"),
    # At log-odds of -40 a bin is 0.16 wide, a third of the scores' deviation.
    [(0, 1, 0.01), (-12, 1, 0.01), (0, 12, 0.01), (-40, 0.5, 0.03), (300, 50, 0.01)],
)
def test_a_rare_class_and_a_sure_model_have_the_area_of_their_order(shift, scale, off):
    draw = torch.Generator().manual_seed(0)
    y = (torch.arange(2000) % 50 == 0).long()
    x = torch.randn(2000, generator=draw) + 1.5 * y
    outputs = torch.stack([torch.zeros(2000), shift + scale * x], 1)
    counts = counted(outputs, y)
    found = counts.metrics(["auc", "average_precision"])
    area, precision = exact(outputs, y)
    errors = metrics.errors(["auc", "average_precision", "miou"], counts.more())
    assert abs(found["auc"] - area) <= errors["auc"] <= 0.05
    assert abs(found["average_precision"] - precision) <= errors["average_precision"] + 1e-12
    assert found["auc"] == pytest.approx(area, abs=5e-3)
    assert found["average_precision"] == pytest.approx(precision, abs=off)
    assert {*errors} == {"auc", "average_precision"}


def test_scores_that_are_all_in_one_bin_are_said_to_be_doubtful():
    one = np.zeros((2, 2, 4096), dtype=np.int64)
    one[:, 1, 7] = 3, 2
    assert metrics.errors(["auc", "average_precision"], {"scores": one}) == {
        "auc": 0.5,
        "average_precision": 0.8,
    }
    assert metrics.errors(["auc"], {"scores": 0 * one}) == {"auc": 0.0}


@pytest.mark.parametrize("classes", [2, 5])
def test_log_odds_are_those_of_the_probability_without_its_rounding(classes):
    outputs, _ = drawn(50, classes)
    p = outputs.double().softmax(1)
    assert torch.allclose(log_odds(outputs), (p / (1 - p)).log())
    sure = torch.zeros(1, classes).index_fill(1, torch.tensor([0]), 90.0)
    found = log_odds(sure)[0]
    assert found[0] == pytest.approx(90 - math.log(classes - 1))
    assert found[1] == pytest.approx(-90)
    assert bins_of(torch.tensor([-math.inf, math.nan, math.inf])).tolist() == [0, 2048, 4095]


def drawn(n: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=draw)
    outputs = torch.randn(n, classes, generator=draw)
    return outputs + 1.5 * torch.nn.functional.one_hot(y, classes), y


def counted(outputs: torch.Tensor, y: torch.Tensor, size: int = 64) -> Counts:
    task = registry.task.get("classification")()
    return evaluate(torch.nn.Identity(), (outputs, y), task, size, ("confusion", "n", "scores"))


def test_counts_add_up_over_batches_and_leave_out_positions_without_a_label():
    outputs, y = drawn(200, 3)
    whole = counted(outputs, y).more()
    several = counted(outputs, y, 7).more()
    assert all(np.array_equal(whole[name], several[name]) for name in whole)
    hidden = torch.where(torch.arange(200) < 50, -100, y)
    rest = counted(outputs[50:], y[50:]).more()
    task = registry.task.get("classification")()
    for name in ("confusion", "scores"):
        assert np.array_equal(getattr(task, f"count_{name}")(outputs, hidden), rest[name])


@pytest.mark.parametrize("classes", [2, 5])
def test_the_values_are_those_of_scikit_learn(classes):
    learn = pytest.importorskip("sklearn.metrics")
    outputs, y = drawn(3000, classes)
    found = counted(outputs, y).metrics([*HAND, *OF_SCORES])
    p = outputs.softmax(1).numpy()
    predicted = outputs.argmax(1).numpy()
    true = y.numpy()
    for name in ("macro", "micro", "weighted"):
        assert found[f"f1_{name}"] == pytest.approx(
            learn.f1_score(true, predicted, average=name), rel=1e-12
        )
    assert found["balanced_accuracy"] == pytest.approx(
        learn.balanced_accuracy_score(true, predicted), rel=1e-12
    )
    assert found["miou"] == pytest.approx(
        learn.jaccard_score(true, predicted, average="macro"), rel=1e-12
    )
    assert found["perplexity"] == pytest.approx(math.exp(learn.log_loss(true, p)), rel=1e-5)
    binary = classes == 2
    area = learn.roc_auc_score(true, p[:, 1] if binary else p, multi_class="ovr")
    one_hot = true if binary else np.eye(classes)[true]
    precision = learn.average_precision_score(one_hot, p[:, 1] if binary else p)
    assert found["auc"] == pytest.approx(area, abs=1e-4)
    assert found["average_precision"] == pytest.approx(precision, abs=1e-3)
    # The bounds of docs/runs.md.
    auc_bound, precision_bound = bounds(counted(outputs, y).more()["scores"])
    assert 0 < abs(found["auc"] - area) <= auc_bound
    assert 0 < abs(found["average_precision"] - precision) <= precision_bound


def bounds(scores: np.ndarray) -> tuple[float, float]:
    """Half of the pairs within a bin; the share of the positives in a bin times the share that the
    bin has of all samples in it and above.
    """
    found = []
    chosen = scores[:, 1:] if scores.shape[1] == 2 else scores
    for negatives, positives in zip(*chosen[:, :, ::-1]):
        pairs = (negatives * positives).sum() / (negatives.sum() * positives.sum())
        both = negatives + positives
        share = both / np.maximum(np.cumsum(both), 1)
        found.append((pairs / 2, (positives * share).sum() / positives.sum()))
    return tuple(np.mean(found, axis=0))

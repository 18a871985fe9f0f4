"""`evaluate.metrics` and `stop.patience` in whole runs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fednet
from fednet import registry
from fednet.config import from_mapping
from fednet.errors import ConfigError, RemoteProtocolError
from fednet.experiment.build import build
from fednet.experiment.evaluations import DetailedEvaluationReply
from fednet.records import Round
from fednet.records.manifest import RunProgress
from fednet.report import figures
from fednet.server.evaluation import Evaluator, pool_by_model
from fednet.server.rounds import stop_reason
from fednet.tools import check
from fednet.training.evaluation import Counts
from fednet.training.tasks.classification import Classification
from tests.rooms import SMALL, hashes, lines, merged, processes, run, small, summary

NAMES = ["f1_macro", "miou", "perplexity", "auc"]
WITH = {"evaluate": {"metrics": NAMES, "clients": "auto"}}
FIELDS = ("metrics", "client_metrics", "model_sha256")


def test_the_metrics_are_in_every_record_and_change_no_bit(tmp_path):
    plain = run(tmp_path / "a", evaluate={"clients": "auto"})
    directory = run(tmp_path / "b", **WITH)
    assert hashes(directory) == hashes(plain)
    assert "metrics" not in lines(plain / "rounds.jsonl")[-1]
    last = lines(directory / "rounds.jsonl")[-1]
    model = fednet.open_run(directory).model().eval()
    data = build(from_mapping(WHOLE)).data
    with torch.no_grad():
        outputs = model(data.inputs(data.test[0]))
    y = data.test[1]
    table = np.zeros((3, 3))
    np.add.at(table, (y.numpy(), outputs.argmax(1).numpy()), 1)
    f1 = 2 * table.diagonal() / (table.sum(0) + table.sum(1))
    assert last["metrics"]["f1_macro"] == pytest.approx(f1.mean(), rel=1e-12)
    loss = torch.nn.functional.cross_entropy(outputs, y)
    assert last["metrics"]["perplexity"] == pytest.approx(float(loss.exp()), rel=1e-6)
    assert {*last["client_metrics"]} == {"received", "personal"}
    assert {*last["client_metrics"]["personal"]} == {*NAMES}
    clients = [row for row in lines(directory / "clients.jsonl") if row["round"] == 2]
    assert all({*row["metrics"]["personal"]} == {*NAMES} for row in clients)
    whole = summary(directory)
    assert whole["metrics"] == last["metrics"]
    assert {*whole["client_metrics"]} >= {"global", "personal"}
    kinds = [row["kinds"] for row in lines(directory / "wire.jsonl") if "accuracy" in row["kinds"]]
    before = [row["kinds"] for row in lines(plain / "wire.jsonl") if "accuracy" in row["kinds"]]
    assert min(k["accuracy"] for k in kinds) > max(k["accuracy"] for k in before)


WHOLE = merged(SMALL, WITH)


def test_a_resume_without_metrics_does_not_keep_those_of_the_model_before(tmp_path):
    directory = run(tmp_path, **WITH)
    assert summary(directory)["confusion"]
    assert summary(directory)["client_metrics"]
    run(tmp_path, resume=True, rounds=3, evaluate={"metrics": [], "clients": "auto"})
    assert not summary(directory).get("confusion")
    assert not summary(directory).get("client_metrics")


@pytest.mark.long
def test_processes_and_a_resumed_run_have_the_same_metrics(tmp_path):
    one = run(tmp_path / "a", **WITH)
    several = processes(tmp_path / "b", **WITH)
    rows = [[[r.get(k) for k in FIELDS] for r in lines(d / "rounds.jsonl")] for d in (one, several)]
    assert rows[0] == rows[1]
    for name in ("client_metrics", "confusion"):
        assert summary(one)[name] == summary(several)[name]
    # Patience ends this run after its resume.
    changes = {**WITH, "rounds": 40, "stop": {"patience": 2, "metric": "perplexity"}}
    changes["train"] = {"lr": 0.5, "batch_size": 16}
    whole = check.run_small_federation(changes)
    resumed = check.run_killed_and_resumed(changes, [])
    assert check.KILLED < len(whole) < 40
    assert [[r.get(k) for k in FIELDS] for r in whole] == [
        [r.get(k) for k in FIELDS] for r in resumed
    ]


@pytest.mark.parametrize("metric", ["test_loss", "f1_macro"])
def test_a_run_ends_once_its_metric_is_no_better_for_so_many_rounds(tmp_path, metric):
    directory = run(
        tmp_path,
        rounds=60,
        train={"lr": 0.8},
        stop={"patience": 3, "metric": metric},
        checkpoint={"best": True},
        **WITH,
    )
    rows = lines(directory / "rounds.jsonl")
    curve = [r["metrics"].get(metric, r.get(metric)) for r in rows]
    best = min(curve) if metric == "test_loss" else max(curve)
    at = curve.index(best) + 1
    assert len(rows) == at + 3 < 60
    done = summary(directory)
    assert done["stopped"] == f"no better {metric} than in round {at}"
    assert done["rounds"] == len(rows)
    again = run(tmp_path / "again", rounds=at, train={"lr": 0.8}, **WITH)
    expected = fednet.open_run(again).model().state_dict()
    kept = load_file(directory / "best.safetensors")
    assert all(torch.equal(v, expected[k]) for k, v in kept.items())


def noted(losses: list[float], patience: int) -> tuple[RunProgress, list[str | None]]:
    """The progress after rounds with these test losses, and after each why the run need not go
    on.
    """
    config = small(rounds=9, stop={"metric": "test_loss", "patience": patience})
    evaluator = SimpleNamespace(config=config, own_model="")
    progress = RunProgress(run="r")
    why = []
    for number, loss in enumerate(losses, 1):
        progress.round = number
        Evaluator.note_best(evaluator, progress, Round(round=number, test_loss=loss), None)
        why.append(stop_reason(config, progress))
    return progress, why


def test_a_loss_that_is_no_number_is_never_the_best():
    progress, why = noted([math.nan, 2.0, math.inf, 1.0, 1.5], 2)
    assert (progress.best, progress.best_round) == (1.0, 4)
    assert why == [None] * 5
    progress, why = noted([math.nan] * 3, 3)
    assert progress.best is None
    assert why == [None, None, "no finite test_loss in 3 rounds"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate": {"metrics": ["f1_marco"]}}, "Did you mean 'f1_macro'"),
        ({"stop": {"metric": "f1_macro"}}, "unknown metric 'f1_macro'"),
        ({"stop": {"metric": "test_loss", "accuracy": 0.5}}, "needs stop.metric: accuracy"),
        ({"stop": {"metric": "validation_accuracy"}}, "needs data.validation"),
        ({"stop": {"patience": 3}, "evaluate": {"every": 4}}, "less than the 4 between two"),
        ({"stop": {"patience": 3}, "evaluate": {"every": 0}}, "needs evaluate.every"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_run(changes, said):
    with pytest.raises(ConfigError, match=said):
        from_mapping(merged(SMALL, changes))


@pytest.fixture
def own(monkeypatch):
    """Registers a task and a metric, for one test."""
    registry.task.index()
    registry.metric.index()
    for kind in (registry.task, registry.metric):
        monkeypatch.setattr(kind, "_parts", dict(kind._parts))

    def add(count, metric):
        task = type("Own", (Classification,), {"count_second": count})
        registry.task("own")(task)
        fednet.metric("top2")(metric)
        return merged(SMALL, {"task": "own", "evaluate": {"metrics": ["top2"], "clients": "auto"}})

    return add


def second(self, outputs, y):
    """Samples whose class has one of the two highest scores."""
    return (outputs.topk(2).indices == y[:, None]).any(1).sum()[None]


def top2(second, n):
    return second[0] / n


def test_a_metric_of_ones_own_asks_for_counts_of_ones_own(own, tmp_path):
    found = fednet.run(own(second, top2), out=tmp_path, in_process=True)
    assert all(r.test_accuracy <= r.metrics["top2"] <= 1 for r in found.rounds)
    assert found.rounds[-1].dropped == {}


@pytest.mark.parametrize(
    ("count", "metric", "said"),
    [
        (lambda self, outputs, y: outputs.sum()[None], top2, "expected int64"),
        (lambda self, outputs, y: torch.ones(1).long(), top2, "not the sum of those of each"),
        (lambda self, outputs, y: y, top2, "the same shape for any samples|not the sum"),
        (second, lambda second: second[7], "metric top2 .* fails: IndexError"),
        (second, lambda secnd: 0, "Did you mean 'second'"),
    ],
)
def test_wrong_counts_and_metrics_are_refused_before_the_run(own, count, metric, said):
    with pytest.raises(ConfigError, match=said):
        build(from_mapping(own(count, metric)))


SHAPES = {"confusion": (3, 3), "n": ()}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ([[0, 4], [2, -1]], "below 1"),
        ([[4, 4], [1, 1]], "have no place"),
        ([[50], [1]], "have no place"),
        ([[-1], [1]], "have no place"),
        ([[0], [11]], "more than the 10"),
        ([[0, 4], [6, 5]], "more than the 10"),
        ([[9], [11]], "more than the 10"),
        ([[0, 4], [1 << 62, 1 << 62]], "more than the 10"),
    ],
)
def test_counts_that_a_client_cannot_have_are_refused(more, why):
    def evaluation_reply(more):
        counts = torch.zeros(5, 2, 3, dtype=torch.int64)
        losses = torch.zeros(5).double()
        return DetailedEvaluationReply(counts=counts, losses=losses, more=torch.tensor(more))

    evaluation_reply([[0, 4, 9], [6, 4, 10]]).check(3, 10, 10, SHAPES)
    with pytest.raises(RemoteProtocolError, match=why):
        evaluation_reply(more).check(3, 10, 10, SHAPES)


def test_a_client_with_a_lower_weight_counts_for_fewer_samples():
    def counts(right, n):
        more = {"n": n, "c": np.array([right])}
        return {"own": Counts(np.array([[right], [n]]), 2.0 * n, n, lambda: more)}

    clients = {0: counts(3, 4), 1: counts(50, 100)}
    accuracy, whole = pool_by_model(clients, None)["own"]
    assert (accuracy, whole.more()) == (53 / 104, {"n": 104, "c": np.array([53])})
    accuracy, lower = pool_by_model(clients, 0.5)["own"]
    assert (accuracy, lower.more(), lower.loss) == (5 / 8, {"n": 8, "c": np.array([5])}, 16.0)


def accuracy_and_f1(counts):
    """Worked out from a confusion matrix by hand."""
    table = np.array(counts)
    f1 = 2 * table.diagonal() / (table.sum(0) + table.sum(1))
    return table.trace() / table.sum(), f1.mean()


@pytest.mark.parametrize(
    ("changes", "model", "tested_on"),
    [
        ({}, "global", "server"),
        ({"evaluate": {"clients": "none"}}, "global", "server"),
        ({"evaluate": {"global": False}}, "global", "clients"),
        ({"algorithm": {"name": "fedper"}}, "personal", "clients"),
        ({"algorithm": {"name": "local"}}, "personal", "clients"),
    ],
)
def test_the_summary_has_the_confusion_matrix_of_the_last_model(
    tmp_path, changes, model, tested_on
):
    directory = run(tmp_path, **merged(WITH, changes))
    whole = summary(directory)
    found = whole["confusion"]
    assert (found["model"], found["tested_on"]) == (model, tested_on)
    if tested_on == "server":
        accuracy = whole["accuracy"]["final"]
        f1 = whole["metrics"]["f1_macro"]
    else:
        kind = "global" if model == "global" else "personal"
        accuracy = whole["personal"][kind]
        f1 = whole["client_metrics"][kind]["f1_macro"]
    assert accuracy_and_f1(found["counts"]) == pytest.approx((accuracy, f1), rel=1e-12)
    (figure,) = figures.confusion(fednet.open_run(directory))
    assert figure.hover["v"] == found["counts"]

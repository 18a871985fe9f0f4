from __future__ import annotations

import json

import numpy as np
import pytest

import fednet
from fednet.cli import display
from fednet.files import read_lines
from fednet.report import costs, metrics, page, tables
from fednet.report.read import open_run
from tests.report.fake_run import ENVELOPE, jsonl, opened, write
from tests.rooms import SMALL

CURVE = [(1, 0.2), (2, 0.5), (3, 0.4), (4, 0.4), (5, 0.6)]


def test_the_last_are_ten_rounds_at_most_and_of_no_rounds_there_is_no_accuracy():
    assert metrics.last([*CURVE, *((t, 0.6) for t in range(6, 12))]) == (pytest.approx(0.55), 10)
    assert metrics.final([]) is metrics.best([]) is None
    assert metrics.last([]) == (None, 0)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (CURVE, (-0.1, -0.1, 0.25)),  # +0.3 -0.1 0 +0.2
        (CURVE[:2], (0.3, None, 0.3)),  # it never drops
        (CURVE[:1], (None, None, None)),
    ],
)
def test_drops_and_increases_leave_zeros_out(curve, expected):
    found = metrics.differences(curve)
    names = ("max_drop", "avg_drop", "avg_increase")
    assert tuple(found[name] for name in names) == pytest.approx(expected)


def test_class_spread_is_the_population_deviation_over_classes(tmp_path):
    run = opened(tmp_path / "a", rounds=2)
    run.rounds[0].set(correct_by_class=[1, 3, 0], total_by_class=[4, 4, 0])
    run.rounds[1].set(correct_by_class=[2, 2, 0], total_by_class=[4, 4, 0])
    a = metrics.class_accuracy(run.rounds[0])
    assert a is not None
    assert np.isnan(a[2])
    # 0.25 and 0.75 about 0.5, then 0; the class without samples does not count
    assert metrics.class_spread(run) == pytest.approx(0.125)


def test_megabytes_count_both_directions_joins_framing_and_lost_work(tmp_path):
    run = opened(
        tmp_path / "a",
        rounds=2,
        clients=4,
        accuracy=[0.1, 0.6],
        drop={1: {0: "lost", 1: "lost", 2: "lost", 3: "lost"}},
    )
    # joins 4 x 64; round 1: two tasks, no reply; round 2: two tasks, two replies; a heartbeat a
    # round
    task = 1000 + ENVELOPE
    reply = 1024 + ENVELOPE
    assert metrics.to_target(run, 0.6, "mb") == pytest.approx(
        (4 * 64 + 2 * task + 20 + 2 * task + 2 * reply + 20) / 1e6
    )
    assert metrics.to_target(run, 0.6, "mb", "down") == pytest.approx(4 * task / 1e6)
    assert metrics.to_target(run, 0.6, "seconds") == 4.0
    assert metrics.to_target(run, 0.7, "mb") is None


def test_what_judging_all_clients_at_the_end_took_is_no_cost_of_the_last_round(tmp_path):
    path = write(tmp_path / "a", rounds=2, clients=4, accuracy=[0.1, 0.6])
    before = {b: costs.cost(open_run(path), "mb", b) for b in costs.BYTES}
    rows = list(read_lines(path / "wire.jsonl"))
    asked = {"round": 2, "client": 0, "direction": "down", "type": "evaluate", "phase": 1}
    asked |= {"kinds": {"state": 4000}, "envelope": 100, "bytes": 4100, "raw_bytes": 4000}
    asked |= {"useful": True, "purpose": "evaluate", "final": True}
    answer = asked | {"direction": "up", "bytes": 60, "envelope": 20, "kinds": {"accuracy": 40}}
    jsonl(path / "wire.jsonl", [*rows, asked, answer])
    run = open_run(path)
    for way in costs.BYTES:
        assert costs.cost(run, "mb", way) == pytest.approx(before[way])
    assert metrics.summarise(run)["bytes"]["after"] == {
        "up": 60 + 4 * 64,
        "down": 4100,
    }  # and joins
    assert metrics.summarise(run)["bytes"]["mb"] == pytest.approx(before["total"][2] + 4160e-6)
    # Its MB as a whole have them, as the summary's have.
    assert f"{before['total'][2] + 4160e-6:.2f}" in tables.as_text(tables.table([run]))


def test_bytes_by_kind_add_up_to_the_total(tmp_path):
    run = opened(tmp_path / "a")
    s = metrics.summarise(run)["bytes"]
    assert (
        sum(n for way in s["kinds"].values() for n in way.values())
        == s["total"]
        == sum(w.bytes for w in run.wire)
    )
    assert sum(s["useful"].values()) == sum(w.bytes for w in run.wire if w.useful)


@pytest.mark.parametrize(
    ("degrees", "t"),  # of printed tables
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (30, 2.0423), (120, 1.9799)],
)
def test_the_quantiles_of_students_distribution_are_the_printed_ones(degrees, t):
    assert metrics.t_quantile(degrees) == pytest.approx(t, abs=5e-5)
    assert metrics.interval([1.0]) == (1.0, None)


def test_personal_metrics_take_each_clients_last_evaluation(tmp_path):
    run = opened(tmp_path / "a", personalised=True)
    own = metrics.personal_spread(run)
    found = metrics.accuracies(run)
    assert own is not None
    last = {r.client: r for r in run.clients}
    assert own["clients"] == len(last)
    for name in ("personal", "balanced"):
        correct, tested = (
            sum(r[f"{what}_{name}"] for r in last.values()) for what in ("correct", "tested")
        )
        assert found[name] == correct / tested
    assert metrics.summarise(run)["personal"] == found
    assert own["worst_tenth"] == own["min"] == min(r.accuracy_personal for r in last.values())
    assert set(metrics.summarise(opened(tmp_path / "b"))["personal"]) == {"global"}


def test_rounds_without_evaluation_are_no_points(tmp_path):
    run = opened(tmp_path / "a", rounds=4, accuracy=[0.9, None, 0.2, None])
    s = metrics.summarise(run)
    assert s["accuracy"] == {
        "final": 0.2,
        "best": 0.9,
        "best_round": 1,
        "last10": pytest.approx(0.55),
        "last10_of": 2,
    }
    assert s["rounds"] == 4


def test_predicted_bytes_stand_beside_the_useful_ones(tmp_path):
    path = write(tmp_path / "a", rounds=1, clients=4, accuracy=[0.5])
    summary = json.loads((path / "summary.json").read_text()) | {
        "predicted": {"up": {"state": 2000, "statistics": 40}, "down": {"state": 2000}}
    }
    (path / "summary.json").write_text(json.dumps(summary))
    said = metrics.summary(open_run(path))["bytes"]["predicted"]
    assert said["down"]["state"] == {"predicted": 2000, "measured": 2000, "difference": 0}
    assert said["up"]["statistics"]["difference"] == 8


def test_where_there_is_no_accuracy_the_loss_is_the_headline_everywhere(tmp_path):
    x = np.linspace(0, 1, 24, dtype=np.float32)[:, None]

    @fednet.dataset("values")
    def values():
        return fednet.Data(train=(x, 3 * x[:, 0]), test=(x[:9], 3 * x[:9, 0]))

    data = {"dataset": "values", "partition": {"scheme": "iid"}}
    config = {
        **{key: SMALL[key] for key in ("name", "clients", "participation", "model", "train")},
        "rounds": 3,
        "data": data,
        "task": "regression",
        "evaluate": {"clients": "all"},
        "report": False,
    }
    made = fednet.run(config, in_process=True, out=tmp_path)
    losses = [r.test_loss for r in made.rounds]
    assert all(r.test_accuracy is None for r in made.rounds)
    assert all(r.client_accuracy is None for r in made.rounds)
    on_clients = made.rounds[-1].client_metrics.values()
    assert on_clients
    assert all(found["loss"] > 0 for found in on_clients)
    assert made.summary.loss["final"] == losses[-1]
    assert made.summary.loss["best"] == min(losses)
    assert (made.dir / "best.safetensors").exists()
    line = display.round_line(made.rounds[-1])
    assert f"test loss {losses[-1]:.4f}" in line
    assert "accuracy" not in line
    rows = dict(display.summary_rows(made.summary))
    assert rows["final test loss"] == f"{losses[-1]:.4f}"
    assert not any("accuracy" in name for name in rows)
    shown = page.render([made])
    assert "final test loss" in shown
    assert "final global accuracy" not in shown

"""The pictures of the papers' tables."""

from __future__ import annotations

import numpy as np
import pictures
import pytest

from fednet import papers
from fednet.papers import results
from fednet.report import open_run
from tests import rooms


def test_accuracy_by_class_is_that_of_each_clients_last_local_model(tmp_path):
    changes = {
        "algorithm": "fedabc",
        "clients": 4,
        "model": {"name": "mlp", "hidden": [16]},
        "data": {
            "samples": 200,
            "shape": [1, 8, 8],
            "classes": 4,
            "partition": {"scheme": "shards", "per_client": 1},
        },
        "train": {"lr": 0.1, "epochs": 3, "batch_size": 16},
        "evaluate": {"clients": "auto"},
    }
    run = open_run(rooms.run(tmp_path, **changes))
    clients, rates = pictures.local_accuracy(run)
    assert clients == [0, 1, 2, 3]
    assert rates.shape == (4, 4)
    held = run.counts
    # each client holds one class, and is best at it
    assert all(held[k].argmax() == rates[k].argmax() for k in clients)
    assert bool(np.isfinite(rates).all())
    path = pictures.local_models(run, tmp_path / "local.png", "a title")
    assert path.stat().st_size > 1000


# -- sweeps ----------------------------------------------------------------------------------------
def rows(table):
    """Every cell of a table as done."""
    blank = dict.fromkeys(results.FIXED) | {"status": "done", "ours": 1.0}
    return [blank | results.key_of(cell, 0) for cell in papers.cells(table)]


@pytest.mark.parametrize("table", pictures.SWEPT)
def test_every_cell_of_a_sweep_is_a_point_of_a_line(table):
    for number in pictures.SWEPT[table]:
        lines = pictures.points(rows(table), table, number)
        assert lines
        assert all(len(line) > 1 and line == sorted(line) for line in lines.values())


def test_what_was_not_run_is_no_point_and_a_line_needs_two(tmp_path):
    made = rows("fedrds/figure7")
    for r in made[1:]:
        r["status"] = "not run"
        r["ours"] = None
    assert pictures.sweep(made, "fedrds/figure7", tmp_path / "s.svg") is None
    made = rows("fedrds/figure7")
    assert pictures.sweep(made, "fedrds/figure7", tmp_path / "s.svg", "mini scale: no test")
    assert "mini scale: no test" in (tmp_path / "s.svg").read_text()
    assert pictures.sweep(made, "fedrds/table3", tmp_path / "t.svg") is None


# -- curves ----------------------------------------------------------------------------------------
def test_curves_are_drawn_from_their_csv_and_a_mean_needs_every_seed(tmp_path):
    base = {"method": "A", "dataset": "D", "heterogeneity": "h", "variant": None}
    points = [
        {**base, "seed": s, "round": t, "mb": 10.0 * t, "accuracy": 20 * t + 2 * s}
        for s, t in ((0, 1), (0, 2), (1, 1))
    ]
    assert pictures.means(points, "mb", "accuracy") == [(10.0, 21.0)]
    path = pictures.curves(points, tmp_path / "f.svg", "no test of the paper")
    assert path is not None
    assert "no test of the paper" in path.read_text()
    nothing = [{**base, "seed": 0, "round": 1, "mb": 1.0, "accuracy": None}]
    assert pictures.curves(nothing, tmp_path / "g.svg") is None


def test_curves_are_of_the_accuracy_that_all_methods_have():
    def row(method, accuracy, personal):
        return {"method": method, "accuracy": accuracy, "personal_accuracy": personal}

    alone = row("SOLO", None, 84.0)  # trains without the others: it has no global model
    assert pictures.measure([alone, row("FedAvg", 44.8, None)]) == "accuracy"
    rounds = [row("FedRep", None, 60.0), row("FedAvg", 44.8, None), row("FedAvg", 45.0, 61.0)]
    assert pictures.measure([alone, *rounds]) == "personal_accuracy"

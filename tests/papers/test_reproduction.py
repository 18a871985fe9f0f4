from __future__ import annotations

import json

import pytest

from fednet import papers
from fednet.cli import reproduce
from fednet.cli.common import Parser
from fednet.files import line
from fednet.papers import job as jobs
from fednet.papers.results import (
    measures,
    publish,
    ranking,
    rendering,
    reproduction,
)
from fednet.report.read import open_run
from fednet.sweep import marks
from tests.report import fake_run


def run(path, name, *accuracy, **more):
    return open_run(
        fake_run.write(path / name, rounds=len(accuracy), accuracy=list(accuracy), **more)
    )


CURVE = (0.1, 0.4, 0.3, 0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_accuracy", 50),
        ("best_accuracy", 50),
        ("best_round", 4),  # the first of the best
        ("accuracy_at_3", 40),
        ("accuracy_in_3", 30),
        ("accuracy_at_500", 50),
        ("accuracy_in_500", None),
        ("max_drop", -10),
        ("avg_drop", -10),
        ("avg_increase", 25),  # of 30 and 20; the zero is in neither
        ("flat_after_round", 4),
        ("mean_accuracy", 36),
        ("seconds_per_round", 2),
        ("pfl_accuracy", None),
        ("speedup", None),
        ("rounds_to_40", 2),
        ("rounds_to_60", None),  # never
        ("mb_to_60", None),
        ("client_accuracy", 48),  # 36 of 75, each client as it was judged last
    ],
)
def test_a_measure_is_what_the_paper_prints_it_as(tmp_path, name, value):
    made = run(tmp_path, "a", *CURVE)
    found = measures.measured(name, open_run(made.dir))
    assert found == (None if value is None else pytest.approx(value))


def test_rounds_to_a_target_are_counted_against_the_other_method_up_to_the_papers_round(tmp_path):
    other, mine = run(tmp_path, "a", 0.1, 0.2, 0.3, 0.4), run(tmp_path, "b", 0.2, 0.3, 0.3, 0.2)
    # 0.3, which the other has in round 3
    assert measures.measured("rounds_to_target", mine, other, 3) == 2
    assert measures.measured("speedup", mine, other, 3) == 1.5
    assert measures.measured("rounds_to_target", mine, other, 4) is None  # never
    assert measures.measured("points_gained", mine, other) == pytest.approx(-10)


@pytest.mark.parametrize(
    ("name", "losses", "value"),
    [
        ("final_train_loss", (2.0, 1.0, 0.5), 0.5),
        ("steady_after_round", (2.0, 1.0, 1.2, 1.15, 1.24), 3),  # 0.1 is 5 % of the first
        ("steady_after_round", (2.0, 1.9, 1.8), 1),
        ("steady_after_round", (), None),
    ],
)
def test_measures_of_the_loss_are_of_the_training_loss(name, losses, value):
    assert measures.of_loss(name, list(enumerate(losses, 1))) == value


def test_emd_is_the_distance_of_class_shares_with_what_is_shared():
    from types import SimpleNamespace

    def made(public, alpha):
        held = {"samples_by_class": [[40, 0], [0, 40]], "public": public}
        return SimpleNamespace(partition=held, config={"algorithm": {"alpha": alpha}})

    assert measures.emd(made(0, 0.5)) == 1.0
    assert measures.emd(made(80, 0.5)) == 0.5  # 40 of its own, 20 and 20 shared
    assert measures.emd(made(80, 0.0)) == 1.0
    assert measures.emd(SimpleNamespace(partition={}, config={"algorithm": {}})) is None


def rows(**ours):
    """A table's rows from (paper, ours over seeds) by method."""
    blank = dict.fromkeys(reproduction.FIXED) | {
        "scale": "full",
        "in_paper": "yes",
        "dataset": "D",
        "heterogeneity": "alpha=1",
        "status": "done",
        "measure": "best_accuracy",
    }
    return [
        {**blank, "method": m, "paper": p, "ours": v, "seed": s}
        for m, (p, values) in ours.items()
        for s, v in enumerate(values)
    ]


def test_ours_is_the_mean_with_its_deviation_over_seeds_beside_the_papers_figure():
    head, (line,) = rendering.table(rows(A=(50.0, [50.0, 54.0])))
    assert dict(zip(head, line)) == {
        "dataset": "D",
        "setting": "alpha=1",
        "method": "A",
        "paper": "50.00",
        "ours": "52.00 ± 2.83",
        "difference": "+2.00",
        "seeds": "0,1",
    }


def test_the_own_methods_lead_is_taken_seed_by_seed():
    """Two seeds that differ by 20 points, and a lead of 2 and 4 in both: 3 on average, with a
    deviation of 1.41.
    """
    made = [
        {**r, "table": "feddc/table1"}
        for r in rows(FedDC=(50.0, [52.0, 34.0]), FedAvg=(49.0, [50.0, 30.0]), Late=(48.0, [10.0]))
    ]
    (methods,) = ranking.grouped(made).values()
    assert (
        ranking.paired(methods)
        == "FedDC's lead seed by seed (mean ± standard deviation, seeds): less FedAvg +3.00 ± "
        "1.41 (2)"
    )
    assert "D alpha=1: FedDC's lead" in "\n".join(rendering.notes(made))
    assert not ranking.paired(
        {
            "FedDC": [{**r, "measure": "rounds_to_target"} for r in methods["FedDC"]],
            "FedAvg": methods["FedAvg"],
        }
    )


def test_what_was_run_at_a_changed_setting_has_no_difference_from_the_paper():
    head, _ = rendering.table([{**r, "changed": "rounds=1"} for r in rows(A=(50.0, [5.0]))])
    assert "difference" not in head


def test_a_method_has_one_place_in_the_order_at_the_tables_own_values_if_it_was_run_at_these():
    """B at 40 is behind A; as its search chose, at 60, it would be before it, and would count
    twice.
    """
    (both,) = ranking.grouped(
        rows(A=(50.0, [50.0]), B=(45.0, [40.0]))
        + [{**r, "method": "B [lr 1]"} for r in rows(B=(45.0, [60.0]))]
    ).values()
    assert ranking.order(both) == (1, 1, True)
    del both["B"]
    assert ranking.order(both) == (0, 1, False)


def test_the_order_of_methods_is_compared_pair_by_pair():
    (methods,) = ranking.grouped(
        rows(A=(60.0, [50.0]), B=(55.0, [52.0]), C=(50.0, [40.0]), D=(50.0, [45.0]))
    ).values()
    # A > C, A > D, B > C, B > D as printed, A > B not; C and D are printed as equal.
    assert ranking.order(methods) == (4, 5, False)


def test_whether_the_papers_best_is_ours_is_left_open_where_it_was_not_run():
    made = [
        {**r, "status": "not run", "ours": None} if r["method"] == "A" else r
        for r in rows(A=(60.0, [1.0]), B=(55.0, [52.0]), C=(50.0, [40.0]))
    ]
    (methods,) = ranking.grouped(made).values()
    assert ranking.order(methods) == (1, 1, None)


def test_less_is_better_for_rounds_to_a_target():
    made = [{**r, "measure": "rounds_to_target"} for r in rows(A=(100.0, [90.0]), B=(25.0, [30.0]))]
    (methods,) = ranking.grouped(made).values()
    assert ranking.order(methods) == (1, 1, True)


def test_who_never_gets_to_the_target_stands_behind_all_who_do():
    made = [
        {**r, "measure": "rounds_to_target"}
        for r in rows(A=(40.0, [30.0, None]), B=(60.0, [None, None]), C=(80.0, [90.0]))
    ]
    (methods,) = ranking.grouped(made).values()
    # A and B are before C in the paper; half of A's seeds never got there, as B's
    assert ranking.order(methods) == (0, 2, False)
    (most,) = ranking.grouped([*made, {**made[0], "seed": 2}]).values()
    assert ranking.order(most) == (2, 3, True)  # two of A's three did
    head, lines = rendering.table(made)
    assert [dict(zip(head, line))["ours"] for line in lines] == [
        "30.00 (1 of 2 never)",
        "never",
        "90",
    ]
    assert [dict(zip(head, line))["difference"] for line in lines] == ["", "", "+10.00"]


def test_without_the_run_that_sets_the_target_nobody_is_said_to_have_never_got_there(
    tmp_path, monkeypatch
):
    words = ("--only", "FedAvg,FedPDC", "--seeds", "0,1", "--dataset", "CIFAR-10")
    job = jobs.plan(reproduce.request(_parsed("fedpdc/table5", *words, "--setting", "CNN")))
    for cell, seed, task in job.runs(tmp_path):
        if (cell.method, seed) != ("FedAvg", 1):
            fake_run.write(task.run, rounds=4, accuracy=[0.1, 0.4, 0.3, 0.5], seed=seed)
    monkeypatch.setattr(marks, "state_now", lambda t: "done" if t.run.exists() else "failed")
    monkeypatch.setattr(marks, "why", lambda t: "nan")
    made, *_ = publish.rows(job, tmp_path)
    assert [(r["method"], r["seed"], r["status"], r["ours"]) for r in made] == [
        ("FedAvg", 0, "done", 4),
        ("FedPDC", 0, "done", 4),
        ("FedAvg", 1, "failed: nan", None),
        ("FedPDC", 1, "not compared: FedAvg of this seed is not done", None),
    ]
    head, lines = rendering.table(made)
    assert [dict(zip(head, line))["ours"] for line in lines] == ["4", "4"]
    assert dict(zip(head, lines[1]))["seeds"] == "0 (1 not compared)"
    # What was compared while that run was there stands.
    table = tmp_path / "table.csv"
    reproduction.merge(table, [{**made[3], "status": "done", "ours": 3}], reproduction.FIXED)
    reproduction.merge(table, made, reproduction.FIXED)
    assert [r["ours"] for r in reproduction.read_csv(table) if r["seed"] == 1] == [3, None]


def _parsed(*words):
    parser = Parser()
    reproduce.add(parser)
    return parser.parse_args(list(words))


def test_a_setting_of_which_nothing_was_begun_is_a_line_below_the_table():
    done = rows(A=(60.0, [50.0]), B=(55.0, [None]))
    done[1]["status"] = "not run"
    gone = [
        {**r, "heterogeneity": h, "status": "not run", "ours": None}
        for h in ("alpha=2", "alpha=3")
        for r in done
    ]
    _, lines = rendering.table([*done, *gone])
    assert [line[1:4] for line in lines] == [["alpha=1", "A", "60.00"], ["alpha=1", "B", "55.00"]]
    said = rendering.notes([*done, *gone])
    assert said[0] == "Not run here: D alpha=2, D alpha=3: A, B."
    assert not any("Not run here" in line for line in rendering.notes(done))
    gone[0]["status"] = "not run: 2 of 60 rounds so far"
    assert len(rendering.table([*done, *gone])[1]) == 4
    assert len(rendering.table(gone[2:])[1]) == 2  # nothing else to show


def test_the_notes_name_another_measure_what_was_searched_and_how_many_methods_the_order_has():
    made = rows(A=(60.0, [50.0]), B=(55.0, [50.5]), C=(70.0, [None]), own=(None, [9.0]))
    made[0]["hyperparameters"] = '{"train.lr": 0.1}'
    made[2]["status"] = "not run"
    made[3]["measure"] = "pfl_accuracy"
    said = "\n".join(rendering.notes(made))
    assert "best_accuracy (pfl_accuracy of own)" in said
    assert "D alpha=1 A: train.lr 0.1" in said
    assert "0 of 1 pairs of methods stand in the paper's order (1 pair within 1 point here)" in said
    assert "best in the paper: C; best here: B, of the 2 methods run of 3." in said
    assert "B (not all over the same seeds)" in "\n".join(
        rendering.notes(rows(A=(60.0, [50.0]), B=(55.0, [50.0, 51.0])))
    )


def test_the_notes_tell_seeds_of_other_hyper_parameters_apart_and_what_the_spread_is():
    made = rows(A=(60.0, [50.0, 51.0, 52.0]), B=(55.0, [50.5, 50.0, 50.0]))
    for r, point in zip(made[:3], ('{"train.lr": 0.1}', '{"train.lr": 1}', "{}")):
        r["hyperparameters"] = point
    made[3]["hyperparameters"] = made[4]["hyperparameters"] = made[5]["hyperparameters"] = (
        '{"train.lr": 0.1}'
    )
    said = "\n".join(rendering.notes(made))
    assert (
        "D alpha=1 A: train.lr 0.1 (seed 0); train.lr 1 (seed 1); not searched (seed 2); D "
        "alpha=1 B: train.lr 0.1." in said
    )
    assert "sample standard deviation" in said
    assert "standard deviation" not in "\n".join(rendering.notes(rows(A=(60.0, [50.0]))))


def test_a_failed_run_stands_in_the_table_with_its_reason_and_in_no_mean():
    made = rows(A=(50.0, [None]))
    made[0]["status"] = "failed: loss is not finite"
    head, (line,) = rendering.table(made)
    assert dict(zip(head, line))["ours"] == "failed"
    assert line[-1] == "loss is not finite"
    assert ranking.order(next(iter(ranking.grouped(made).values()))) is None


def test_a_method_that_is_not_in_the_paper_is_marked_and_has_no_figure():
    made = [{**r, "in_paper": "no", "paper": None} for r in rows(mine=(None, [61.0]))]
    assert "mine (not in the paper)" in rendering.as_md(made)


def test_rows_come_back_from_csv_as_they_were(tmp_path):
    made = rows(A=(50.0, [52.5, 54.25]))
    (tmp_path / "t.csv").write_text(reproduction.as_csv(made))
    assert reproduction.read_csv(tmp_path / "t.csv") == made


def test_a_row_has_the_papers_figures_beside_ours(tmp_path):
    (cell,) = [
        c
        for c in papers.cells("feddpc/table2")
        if c.method == "FedDPC" and c.dataset == "CIFAR-10" and c.heterogeneity == "alpha=0.2"
    ]
    made = run(tmp_path, "a", *CURVE)
    row = reproduction.row(cell, 0, "full", open_run(made.dir))
    assert (row["paper"], row["ours"], row["last10"]) == (55.44, 50, pytest.approx(36))
    assert (
        row["paper:best_round"],
        row["ours:best_round"],
        row["paper:seconds_per_round"],
        row["ours:seconds_per_round"],
    ) == (372, 4, 0.51, 2)


def test_mini_rows_are_compared_with_nothing_and_say_what_they_are():
    made = [{**r, "scale": "mini"} for r in rows(A=(50.0, [20.0]), B=(40.0, [30.0]))]
    said = rendering.as_md(made)
    assert "This is not the paper's setting" in said
    assert "difference" not in said
    assert "order" not in said


def test_a_rows_device_is_where_its_clients_trained_not_where_the_run_was_ended(tmp_path):
    made = run(tmp_path, "a", *CURVE)
    summary = json.loads((made.dir / "summary.json").read_text()) if made.summary else {}
    ended = {**summary, "provenance": {"device": "cpu"}}
    (made.dir / "summary.json").write_text(json.dumps(ended))
    assert reproduction.device(open_run(made.dir)) == "cpu"
    joined = {"round": 0, "client": -1, "type": "joined", "bytes": 0, "elapsed": 0.1}
    devices = ("cuda:1", "cuda:0", "cuda:0")
    with (made.dir / "events.jsonl").open("ab") as file:
        file.writelines(line({**joined, "device": name}) for name in devices)
    assert reproduction.device(open_run(made.dir)) == "cuda:0, cuda:1"

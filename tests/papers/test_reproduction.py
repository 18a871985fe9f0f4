"""The measures of a table's cells, its rows, and how they are printed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fednet import papers
from fednet.cli import reproduce
from fednet.cli.common import Parser
from fednet.papers import job as jobs
from fednet.papers import rendering, results
from fednet.papers import reproduce as running
from tests.papers.rows import rows
from tests.report import fake_run


def run(path, name, *accuracy, **more):
    return fake_run.opened(path / name, rounds=len(accuracy), accuracy=list(accuracy), **more)


CURVE = (0.1, 0.4, 0.3, 0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("final_accuracy", 50),
        ("best_accuracy", 50),
        ("best_round", 4),  # the first of the best
        ("accuracy_at_3", 40),
        ("accuracy_in_3", 30),
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
        ("client_accuracy", 48),  # 36 of 75, each client as it was judged last
    ],
)
def test_a_measure_is_what_the_paper_prints_it_as(tmp_path, name, value):
    found = results.measure(name, run(tmp_path, "a", *CURVE))
    assert found == (None if value is None else pytest.approx(value))


def test_rounds_to_a_target_are_counted_against_the_other_method_up_to_the_papers_round(tmp_path):
    other = run(tmp_path, "a", 0.1, 0.2, 0.3, 0.4)
    mine = run(tmp_path, "b", 0.2, 0.3, 0.3, 0.2)
    # 0.3, which the other has in round 3
    assert results.measure("rounds_to_target", mine, other, 3) == 2
    assert results.measure("speedup", mine, other, 3) == 1.5
    assert results.measure("rounds_to_target", mine, other, 4) is None  # never
    assert results.measure("points_gained", mine, other) == pytest.approx(-10)


@pytest.mark.parametrize(
    ("name", "losses", "value"),
    [
        ("final_train_loss", (2.0, 1.0, 0.5), 0.5),
        ("steady_after_round", (2.0, 1.0, 1.2, 1.15, 1.24), 3),  # 0.1 is 5 % of the first
        ("steady_after_round", (2.0, 1.9, 1.8), 1),
        ("steady_after_round", (), None),
    ],
)
def test_measures_of_the_loss_are_of_the_training_loss(tmp_path, name, losses, value):
    made = run(tmp_path, "a", *[0.5 for _ in losses])
    for record, loss in zip(made.rounds, losses):
        record.train_loss = loss
    assert results.measure(name, made) == value


def test_emd_is_the_distance_of_class_shares_with_what_is_shared():
    def made(public, alpha):
        held = {"samples_by_class": [[40, 0], [0, 40]], "public": public}
        return SimpleNamespace(partition=held, config={"algorithm": {"alpha": alpha}})

    assert results.emd(made(0, 0.5)) == 1.0
    assert results.emd(made(80, 0.5)) == 0.5  # 40 of its own, 20 and 20 shared
    assert results.emd(SimpleNamespace(partition={}, config={"algorithm": {}})) is None


def lines(made):
    """The printed table as mappings."""
    head, found = rendering.table(made)
    return [dict(zip(head, line)) for line in found]


def test_ours_is_the_mean_with_its_deviation_over_seeds_beside_the_papers_figure():
    assert lines(rows(A=(50.0, [50.0, 54.0]))) == [
        {
            "dataset": "D",
            "setting": "alpha=1",
            "method": "A",
            "paper": "50.00",
            "ours": "52.00 ± 2.83",
            "difference": "+2.00",
            "seeds": "0,1",
        }
    ]


@pytest.mark.parametrize("other", [{"changed": "rounds=1"}, {"scale": "mini"}])
def test_what_was_run_at_another_setting_has_no_difference_from_the_paper(other):
    made = [{**r, **other} for r in rows(A=(50.0, [5.0]))]
    assert "difference" not in lines(made)[0]
    said = rendering.as_text(made)
    assert ("This is not the paper's setting" in said) == (other == {"scale": "mini"})


def test_who_never_gets_to_the_target_is_said_and_is_in_no_mean():
    never = {"A": (40.0, [30.0, None]), "B": (60.0, [None, None]), "C": (80.0, [90.0])}
    made = rows("rounds_to_target", **never)
    found = [(line["ours"], line["difference"]) for line in lines(made)]
    assert found == [("30.00 (1 of 2 never)", ""), ("never", ""), ("90", "+10.00")]


def test_without_the_run_that_sets_the_target_nobody_is_said_to_have_never_got_there(
    tmp_path,
):
    parser = Parser()
    reproduce.add(parser)
    words = "fedpdc/table5 --only FedAvg,FedPDC --seeds 0,1 --dataset CIFAR-10 --setting CNN"
    job = jobs.choose(parser.parse_args(words.split()))
    for cell, seed, task in job.runs(tmp_path):
        if (cell.method, seed) != ("FedAvg", 1):
            fake_run.write(task.run, rounds=4, accuracy=[0.1, 0.4, 0.3, 0.5], seed=seed)
        else:
            task.books.mkdir(parents=True)
            (task.books / "failed").touch()
            task.log.write_text("nan\n")
    made, _ = running.rows(job, tmp_path)
    assert [(r["method"], r["seed"], r["status"], r["ours"]) for r in made] == [
        ("FedAvg", 0, "done", 4),
        ("FedPDC", 0, "done", 4),
        ("FedAvg", 1, "failed: nan", None),
        ("FedPDC", 1, "not compared: FedAvg of this seed is not done", None),
    ]
    assert [line["ours"] for line in lines(made)] == ["4", "4"]
    assert lines(made)[1]["seeds"] == "0 (1 not compared)"
    # What was compared while that run was there stays.
    table = tmp_path / "table.csv"
    results.merge(table, [{**made[3], "status": "done", "ours": 3}], results.FIXED)
    results.merge(table, made, results.FIXED)
    assert [r["ours"] for r in results.read_csv(table) if r["seed"] == 1] == [3, None]


def test_a_failed_run_stands_in_the_table_with_its_reason_and_in_no_mean():
    made = rows(A=(50.0, [None]))
    made[0]["status"] = "failed: loss is not finite"
    (line,) = lines(made)
    assert (line["ours"], line["seeds"]) == ("failed", "loss is not finite")


def test_new_rows_replace_those_of_the_same_run_in_their_place_but_not_by_one_that_was_not_run(
    tmp_path,
):
    one, two = rows(A=(50.0, [52.5, 54.25]))
    path = tmp_path / "t.csv"
    results.merge(path, [one, two], results.FIXED)
    assert results.read_csv(path) == [one, two]
    gone = {**two, "status": "not run", "ours": None}
    results.merge(path, [{**one, "ours": 2}, gone], results.FIXED)
    assert [(r["seed"], r["ours"]) for r in results.read_csv(path)] == [(0, 2), (1, 54.25)]


def test_a_row_has_the_papers_figures_beside_ours(tmp_path):
    (cell,) = [
        c
        for c in papers.cells("feddpc/table2")
        if (c.method, c.dataset, c.heterogeneity) == ("FedDPC", "CIFAR-10", "alpha=0.2")
    ]
    row = results.row(cell, 0, "full", run(tmp_path, "a", *CURVE))
    assert (row["paper"], row["ours"], row["last10"]) == (55.44, 50, pytest.approx(36))
    assert (row["paper:best_round"], row["ours:best_round"]) == (372, 4)
    assert (row["paper:seconds_per_round"], row["ours:seconds_per_round"]) == (0.51, 2)
    assert row["device"] == "cpu"  # of the clients


def test_a_row_names_the_devices_of_a_run_whose_clients_report_nothing(tmp_path):
    silent = run(tmp_path, "a", *CURVE)
    started = [
        {"type": "started", "versions": {"device": device}} for device in ("cuda:0", "cpu", "cpu")
    ]
    (silent.dir / "clients.jsonl").write_text("")
    fake_run.jsonl(silent.dir / "events.jsonl", started)
    assert results.device(silent) == "cpu, cuda:0"  # it was resumed elsewhere

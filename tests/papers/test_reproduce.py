from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fednet import papers
from fednet.cli import reproduce as verb
from fednet.cli.common import Parser
from fednet.cli.main import main
from fednet.papers import job as jobs
from fednet.papers import plan as planning
from fednet.papers import results
from fednet.sweep import cells

pytestmark = pytest.mark.long

DIGITS = "--set data.dataset=digits --set rounds=2 --device cpu"


def asked(words, *more):
    """What `fednet reproduce` makes of a command line."""
    parser = Parser()
    verb.add(parser)
    return parser.parse_args([*words.split(), *map(str, more)])


def job(words, *more):
    return jobs.choose(asked(words, *more))


def reproduce(words, *more):
    """The exit status of the command."""
    return main(["reproduce", *words.split(), *map(str, more)])


# -- what is to be run -----------------------------------------------------------------------------
def test_the_list_has_every_table_of_every_paper(capsys):
    assert reproduce("--list") == 0
    said = capsys.readouterr().out
    assert all(name in said for name in [*papers.with_results(), *papers.no_runs()])


def test_cells_are_chosen_by_dataset_setting_and_method():
    chosen = job("feddpc/table2 --dataset cifar10 --setting alpha=0.2 --only feddpc,FedCM").cells
    assert [(c.dataset, c.heterogeneity, c.method) for c in chosen] == [
        ("CIFAR-10", "alpha=0.2", "FedCM"),
        ("CIFAR-10", "alpha=0.2", "FedDPC"),
    ]
    by_either_name = [job(f"feddpc/table2 --dataset {d}").cells for d in ("CIFAR-10", "cifar10")]
    assert by_either_name[0] == by_either_name[1]


@pytest.mark.parametrize(
    ("table", "words", "found"),
    [
        # E1 is a beginning of E10, which is ten times the work.
        ("feddc/table1", "E1", {("E1", f"alpha={a}") for a in (0.05, 0.1, 1)}),
        ("feddc/table1", "Alpha=1", {("E1", "alpha=1"), ("E10", "alpha=1")}),
        ("feddc/table1", "E10 alpha=0.1", {("E10", "alpha=0.1")}),
        ("niidbench/cifar10", "#C=2 10 parties", {("10 parties", "#C=2")}),  # in any order
    ],
)
def test_a_setting_is_met_by_whole_words(table, words, found):
    cells = job(table, "--setting", words).cells
    assert {(c.variant, c.heterogeneity) for c in cells} == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["feddpc/table9"], "feddpc/table2"),
        (["feddpc/table2", "--dataset", "mnist"], "CIFAR-10"),
        ([], "PAPER/TABLE"),
        (["feddpc/table2", "--only", "FedDPT"], "Did you mean 'FedDPC'"),
        (["feddpc/table2", "--only", ","], "expected names separated by commas"),
        (["feddpc/figure7", "--only", "FedDPC lambda 01"], "unknown method"),
        (["feddpc/table2", "--setting", "alpha=7"], "alpha=0.2, alpha=0.6"),
        (["fedrds/figureA1_text", "--setting", "best beta"], "they are beta=0.1 2 shards."),
        (["feddpc/table2", "--seeds", "0,1", "--set", "seed=5"], "--seeds"),
        (["feddpc/table2", "--set", "name=mine"], "which cell it is"),
        (["feddpc/table2", "--set", "algorithm={name: fedavg}"], "its own method"),
        (["feddpc/table2", "--set", "algorithm.name=fedavg"], "--only names one of them"),
        (["feddpc/table2", "--plan", "--set", "train.momentun=0"], "Did you mean train.momentum"),
        (["feddpc/table2", "--gather", "--set", "train.lr=high"], "expected a float > 0"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(words, said, capsys, tmp_path):
    assert reproduce("", *words, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_two_columns_come_to_at_mini_scale_is_done_once():
    """There the CNN replaces ResNet50."""
    assert {c.variant for c in job("fedpdc/table2").cells} == {"CNN", "ResNet50"}
    assert {c.variant for c in job("fedpdc/table2 --scale mini").cells} == {"CNN"}
    alone = job("fedpdc/table2 --scale mini --setting ResNet50").cells
    assert {c.variant for c in alone} == {"ResNet50"}


def test_the_method_that_a_cell_is_measured_against_runs_too():
    found = job("fedabc/figure5_text --only FedABC").cells
    assert {c.method for c in found} == {"FedABC", "FedABC_wi"}


def test_a_figure_of_unnamed_settings_has_no_run():
    assert [c.variant for c in job("fedrds/figureA1_text").cells] == ["beta=0.1"]


def test_runs_of_a_seed_are_paired_and_come_before_those_of_the_next():
    runs = job("feddpc/table2 --dataset cifar10 --seeds 3,4").runs(Path("out"))
    assert [s for _, s, _ in runs] == [3] * 12 + [4] * 12
    assert all(t.config["seed"] == s and t.name.endswith(f"seed{s}") for _, s, t in runs)


def test_tables_that_stand_on_the_same_runs_share_them(tmp_path):
    one, two = (job(f"fedabc/{t} --dataset mnist").runs(tmp_path) for t in ("table1", "table2"))
    assert [t for _, _, t in one] == [t for _, _, t in two]


def test_clients_are_judged_only_where_the_table_is_about_them():
    assert job("feddpc/table2").cells[0].config["evaluate"] == {"every": 1, "clients": "none"}
    personal = job("fedabc/table1 --dataset mnist").cells[0].config["evaluate"]
    assert personal == {"finetune": False, "every": 5, "clients": "auto"}


# -- the plan --------------------------------------------------------------------------------------
def test_a_plan_is_steps_times_one_measured_step(tmp_path, monkeypatch, capsys):
    pace = planning.Pace(0.1, (500, 200))  # batches of 256: 2 and 1 steps, at one epoch
    monkeypatch.setattr(planning, "measure_pace", lambda cell, device: pace)
    words = "feddpc/table2 --dataset cifar10 --only FedDPC --seeds 0,1 --plan --jobs 2"
    assert reproduce(words, "--out", tmp_path / "out") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(f"4 runs in {tmp_path / 'out' / 'feddpc'}")
    # 400 rounds x 10 clients x 1.5 steps x 0.1 s
    todo = ["to", "do", "400", "rounds", "0.17", "h"]
    assert [line.split()[1:] for line in lines[:4]] == [todo] * 4
    assert lines[4].startswith("left: 0.67 hours of one process, 0.33 hours with --jobs 2")
    assert lines[5:] == ["  lenet5, cifar10: 100.0 ms for one step"]
    assert not (tmp_path / "out").exists()


def test_a_plan_of_what_cannot_be_measured_has_no_hours(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        planning, "measure_pace", lambda cell, device: "could not be measured: no data"
    )
    words = "feddpc/table2 --dataset cifar10 --only FedDPC --seeds 0 --plan"
    assert reproduce(words, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "left: unknown, because no step could be measured:" in said
    assert "lenet5, cifar10: could not be measured: no data" in said
    assert "hours" not in said


def test_a_step_is_measured_in_this_process(monkeypatch):
    cell = job("fedabc/table1 --dataset mnist --setting alpha=1.0 --only FedAvg").cells[0]
    monkeypatch.setattr(cells, "work", lambda *_, **__: pytest.fail("a run was begun"))
    digits = replace(cell, config=papers.lay(cell.config, {"data": {"dataset": "digits"}}))
    pace = planning.measure_pace(digits, "cpu")
    assert len(pace.samples) == 20
    assert pace.step > 0
    absent = replace(cell, config=papers.lay(cell.config, {"data": {"dataset": "cifar11"}}))
    assert planning.measure_pace(absent, "cpu").startswith("could not be measured: ")


# -- running it ------------------------------------------------------------------------------------
MINE = f"fedabc/table1 --dataset mnist --setting alpha=1.0 --scale mini {DIGITS}"
ONE = f"{MINE} --only FedAvg"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended")
    assert reproduce(ONE, "--out", out) == 0
    return out


@pytest.fixture
def done(ended, tmp_path):
    """A copy of what `fednet reproduce` leaves of MINE's FedAvg; its only run."""
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    ((_, _, task),) = job(ONE).runs(tmp_path)
    return task


def rows(out):
    return results.read_csv(out / "fedabc-table1-mini.csv")


def test_mini_runs_are_paired_resumable_and_say_that_they_are_mini(tmp_path, capsys):
    words = f"{MINE} --only FedAvg,FedPer --jobs 2 --out {tmp_path}"
    assert reproduce(words) == 0
    first, second = sorted((tmp_path / "fedabc-mini").glob("fedabc-*"))
    assert (first / "partition.json").read_bytes() == (second / "partition.json").read_bytes()
    chosen = [
        [json.loads(line)["selected"] for line in (d / "rounds.jsonl").open()]
        for d in (first, second)
    ]
    assert chosen[0] == chosen[1]
    assert "not the paper" in capsys.readouterr().out
    found = rows(tmp_path)
    assert [(r["method"], r["paper"], r["seed"], r["rounds"]) for r in found] == [
        ("FedAvg", 98.0, 0, 2),
        ("FedPer", 98.1, 0, 2),
    ]
    assert {r["changed"] for r in found} == {"data.dataset=digits, rounds=2"}
    assert all(r["ours"] == r["pfl"] and 0 < r["pfl"] <= 100 and r["mb"] > 0 for r in found)
    before = (first / "rounds.jsonl").stat().st_mtime_ns
    # Nothing is run again, wherever the data come from.
    assert reproduce(f"{words} --set data.root={tmp_path}") == 0
    assert (first / "rounds.jsonl").stat().st_mtime_ns == before
    assert {r["changed"] for r in rows(tmp_path)} == {"data.dataset=digits, rounds=2"}


def test_where_none_is_done_there_is_nothing_to_gather(tmp_path, capsys):
    assert reproduce(f"{MINE} --only FedAvg,FedPer --gather", "--out", tmp_path) == 2
    assert "none of the 2 runs" in capsys.readouterr().err


def test_what_is_done_is_gathered_without_starting_the_rest_which_stands_there_as_not_run(
    done, tmp_path, monkeypatch, capsys
):
    begun = next(t for c, _, t in job(MINE).runs(tmp_path) if c.method == "FedPer")
    begun.run.mkdir()
    monkeypatch.setattr(cells, "work", None)
    assert reproduce(f"{MINE} --gather --seeds 0,1", "--out", tmp_path) == 0
    found = {(r["method"], r["seed"]): r["status"] for r in rows(tmp_path)}
    assert len(found) == 18
    assert {k for k, status in found.items() if status == "done"} == {("FedAvg", 0)}
    assert found["FedRod", 1] == "not run"
    assert found["FedPer", 0] == "not run"
    assert "0 (1 not run)" in capsys.readouterr().out


def test_a_run_that_was_refused_for_want_of_its_data_is_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNET_DATA", str(tmp_path / "nothing"))
    words = "fedrds/table3 --dataset svhn --only FedAvg --device cpu"
    out = tmp_path / "out"
    assert reproduce(f"{words} --scale mini", "--out", out) == 2
    said = capsys.readouterr().out
    assert "refused" in said
    assert "SVHN could not be read" in said
    assert reproduce(f"{words} --scale mini --quiet", "--out", out) == 2
    assert "SVHN could not be read" in capsys.readouterr().err

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fednet import papers
from fednet.cli.main import main
from fednet.errors import CannotGoOn, ConfigError
from fednet.experiment import build as experiment
from fednet.papers import job as jobs
from fednet.papers import plan as planning
from fednet.papers import search
from fednet.papers.results import reproduction
from fednet.sweep import claims, marks, pool
from tests.processes import Rig

pytestmark = pytest.mark.long

DIGITS = ["--set", "data.dataset=digits", "--set", "rounds=2", "--device", "cpu"]


def asked(*words):
    """What `fednet reproduce` makes of a command line."""
    from fednet.cli import reproduce as verb
    from fednet.cli.common import Parser

    parser = Parser()
    verb.add(parser)
    return verb.request(parser.parse_args([str(w) for w in words]))


def job(*words):
    return jobs.plan(asked(*words))


# -- what is to be run -----------------------------------------------------------------------------
def test_the_list_has_every_table_of_every_paper(capsys):
    assert main(["reproduce", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in [*papers.with_results(), *papers.no_runs()])


def test_cells_are_chosen_by_dataset_setting_and_method():
    found = job(
        "feddpc/table2", "--dataset", "cifar10", "--setting", "alpha=0.2", "--only", "feddpc,FedCM"
    )
    assert [(c.dataset, c.heterogeneity, c.method) for c in found.cells] == [
        ("CIFAR-10", "alpha=0.2", "FedCM"),
        ("CIFAR-10", "alpha=0.2", "FedDPC"),
    ]
    assert (
        job("feddpc/table2", "--dataset", "CIFAR-10").cells
        == job("feddpc/table2", "--dataset", "cifar10").cells
    )


def test_a_setting_is_met_by_whole_words():
    """E1 is a beginning of E10, which is ten times the work."""
    assert {(c.variant, c.heterogeneity) for c in job("feddc/table1", "--setting", "E1").cells} == {
        ("E1", f"alpha={a}") for a in (0.05, 0.1, 1)
    }
    assert {c.variant for c in job("feddc/table1", "--setting", "Alpha=1").cells} == {"E1", "E10"}
    assert {
        (c.variant, c.heterogeneity)
        for c in job("feddc/table1", "--setting", "E10 alpha=0.1").cells
    } == {("E10", "alpha=0.1")}


@pytest.mark.parametrize("words", ["10 parties #C=2", "#c=2 10 parties", "10 parties c=2.0"])
def test_a_setting_is_met_in_any_order_and_without_what_a_shell_takes_away(words):
    found = job("niidbench/cifar10", "--setting", words).cells
    assert {(c.variant, c.heterogeneity) for c in found} == {("10 parties", "#C=2")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["feddpc/table9"], "feddpc/table2"),
        (["feddpc/table2", "--dataset", "mnist"], "CIFAR-10"),
        ([], "PAPER/TABLE"),
        (["feddpc/table2", "--only", "FedDPT"], "Did you mean 'FedDPC'"),
        (["feddpc/table2", "--only", ","], "FedAvg,FedProx"),
        (["niidbench/cifar10", "--only", "SCAFFOLD as published"], "is run with --open"),
        (
            ["niidbench/cifar10", "--open", "--only", "SCAFFOLD as printed"],
            "'SCAFFOLD as published'",
        ),
        (["feddpc/table2", "--open", "--only", "FedDPC lambda 01"], "unknown method"),
        (["feddpc/table2", "--setting", "alpha=7"], "alpha=0.2, alpha=0.6"),
        (["feddpc/table2", "--add", "fedavgg"], "fedavg"),
        (["fedrds/figureA1_text", "--setting", "best beta"], "best beta 2 shards (with --search)"),
        (["feddpc/table2", "--seeds", "0,1", "--set", "seed=5"], "--seeds"),
        (["feddpc/table2", "--set", "name=mine"], "which cell it is"),
        (["feddpc/table2", "--set", "algorithm={name: fedavg}"], "--add"),
        (["feddpc/table2", "--set", "algorithm.name=fedavg"], "--add"),
        (["feddpc/table2", "--plan", "--set", "train.momentun=0"], "Did you mean train.momentum"),
        (["feddpc/table2", "--gather", "--set", "train.lr=high"], "expected a float > 0"),
        (["feddpc/table2", "--plan", "--add", "{name: fedvarp, mu: 1}"], "unknown key algorithm"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(words, said, capsys, tmp_path):
    assert main(["reproduce", *words, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_method_that_a_cell_is_measured_against_runs_too():
    assert {c.method for c in job("fedabc/figure5_text", "--only", "FedABC").cells} == {
        "FedABC",
        "FedABC_wi",
    }


def test_an_added_method_stands_in_every_column_and_differs_in_the_method_alone():
    found = job(
        "feddpc/table2",
        "--dataset",
        "cifar10",
        "--only",
        "FedDPC",
        "--add",
        "{name: fedavg, weighting: uniform}",
    )
    mine = [c for c in found.cells if c.method == "fedavg-weightinguniform"]
    assert {c.heterogeneity for c in mine} == {"alpha=0.2", "alpha=0.6"}
    for c in mine:
        (theirs,) = [
            o for o in found.cells if o.method == "FedDPC" and o.heterogeneity == c.heterogeneity
        ]
        assert {k for k in c.config if c.config[k] != theirs.config[k]} == {"algorithm", "name"}
        assert c.figure is None
        assert set(c.grids) == {"train.lr"}


@pytest.mark.parametrize("table", papers.with_results())
def test_an_added_method_trains_as_the_paper_s_own_does(table):
    """Not as a SOLO of 300 epochs without federation, nor as an ablation that shares nothing."""
    own = {}
    for c in papers.cells(table):
        own.setdefault((c.dataset, c.variant, c.heterogeneity), c)
    for c in (c for c in job(table, "--add", "fedsam", "--search").cells if c.method == "fedsam"):
        theirs = own[c.dataset, c.variant, c.heterogeneity]
        mine = jobs._evaluated(replace(c, config={**theirs.config, "algorithm": {}}), "full")
        assert {k: v for k, v in c.config.items() if k not in ("algorithm", "name")} == {
            k: v for k, v in mine.items() if k not in ("algorithm", "name")
        }
        assert c.measure == theirs.measure


def test_an_added_method_takes_no_name_of_the_table_s_own_and_one_given_twice_runs_once():
    for words in (["--add", "fedprox"], ["--only", "FedDPC", "--add", "fedprox"]):
        with pytest.raises(ConfigError, match="FedProx of feddpc/table2 has runs of that name"):
            job("feddpc/table2", "--dataset", "cifar10", *words)
    found = job(
        "feddpc/table2",
        "--dataset",
        "cifar10",
        "--only",
        "FedDPC",
        "--add",
        "{name: fedprox, mu: 1}",
        "--add",
        "{name: fedprox, mu: 1}",
    )
    assert sorted(c.method for c in found.cells) == [
        "FedDPC",
        "FedDPC",
        "fedprox-mu1",
        "fedprox-mu1",
    ]


def test_what_is_open_runs_once_where_the_table_has_it_itself_and_is_the_table_s():
    found = job("feddpc/figure6", "--open")
    assert len({c.name for c in found.cells}) == len(found.cells) == 20
    assert not {"FedDPC no projection", "FedDPC no scaling"} & found.added
    assert "FedDPC lambda=2" in found.added
    assert "FedDPC no projection" not in job("feddpc/figure6", "--only", "FedDPC", "--open").added


@pytest.mark.parametrize(
    "table", ["feddpc/table2", "feddpc/figure6", "niidbench/cifar10", "fedabc/table1"]
)
def test_each_name_that_the_table_prints_can_be_asked_for(table):
    added = ["--add", "{name: fedsam, rho: 0.1}"]
    for method in {c.method for c in job(table, "--open", *added).cells}:
        found = job(table, "--open", *added, "--only", method).cells
        named = {c.method for c in found} - {"fedsam-rho0.1"}
        assert method in {*named, "fedsam-rho0.1"}
        # the paper's own stands for its variants too
        assert len(named) <= 1 or all(m.startswith(method) for m in named)
    both = job("feddpc/table2", "--open", "--only", "feddpc lambda=0.1,FedDPC lambda=-0.1").cells
    assert {c.method for c in both} == {"FedDPC lambda=0.1", "FedDPC lambda=-0.1"}


def test_runs_of_a_seed_are_paired_and_come_before_those_of_the_next():
    found = job("feddpc/table2", "--dataset", "cifar10", "--seeds", "3,4")
    runs = found.runs(Path("out"))
    assert [s for _, s, _ in runs] == [3] * 12 + [4] * 12
    assert all(t.config["seed"] == s and t.name.endswith(f"seed{s}") for _, s, t in runs)


def test_tables_that_stand_on_the_same_runs_share_them(tmp_path):
    one, two = (
        job(f"fedabc/{t}", "--dataset", "mnist").runs(tmp_path) for t in ("table1", "table2")
    )
    assert [t for _, _, t in one] == [t for _, _, t in two]


def test_clients_are_judged_only_where_the_table_is_about_them():
    assert job("feddpc/table2").cells[0].config["evaluate"] == {"every": 1, "clients": "none"}
    assert job("fedabc/table1", "--dataset", "mnist").cells[0].config["evaluate"] == {
        "finetune": False,
        "every": 5,
        "clients": "auto",
    }


# -- searching -------------------------------------------------------------------------------------
def test_a_search_run_is_a_quarter_of_the_rounds_on_a_validation_split(tmp_path):
    found = job(
        "feddpc/table2", "--dataset", "cifar10", "--setting", "alpha=0.2", "--only", "FedCM"
    )
    (cell,) = found.cells
    points = search.points(cell, {"train.lr": [0.5]})
    assert points == [{"train.lr": 0.5, "algorithm.alpha": a} for a in (1, 0.1, 0.01, 0.001)]
    made = search.task(cell, points[1], found, tmp_path).config
    assert (
        made["rounds"],
        made["data"]["validation"],
        made["train"]["lr"],
        made["algorithm"]["alpha"],
    ) == (100, 0.1, 0.5, 0.1)
    assert cell.config["data"].get("validation") is None  # the winner has the whole pool


def test_the_winner_is_the_best_on_the_validation_split_and_what_failed_is_out(
    tmp_path, monkeypatch
):
    args = asked(
        "feddpc/table2",
        "--dataset",
        "cifar10",
        "--setting",
        "alpha=0.2",
        "--only",
        "FedVARP",
        "--out",
        tmp_path,
        "--search",
        "--grid",
        "train.lr=1,0.3,0.2",
    )
    monkeypatch.setattr(pool, "work", lambda *a, **k: {})
    monkeypatch.setattr(
        search, "score", lambda t: {1: None, 0.3: 0.4, 0.2: 0.6}[t.config["train"]["lr"]]
    )
    found = search.searched(jobs.plan(args), args, lambda text: None)
    assert found.cells[0].config["train"]["lr"] == 0.2
    assert found.chosen == {found.cells[0].name: {"train.lr": 0.2}}
    (books,) = json.loads((tmp_path / "feddpc-table2-chosen.json").read_text()).values()
    assert [s["validation_accuracy"] for s in books["scores"]] == [None, 0.4, 0.6]


VARP = [
    "feddpc/table2",
    "--dataset",
    "cifar10",
    "--setting",
    "alpha=0.2",
    "--only",
    "FedVARP",
    "--search",
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "FedVARP", "--grid", "train.lr=1,2"], "give both"),
        ([*VARP, "--grid", "train.rl=1,2"], "Did you mean 'train.lr'"),
        ([*VARP, "--grid", "train.lr="], "expected KEY=A,B"),
        ([*VARP, "--grid", "train.lr"], "expected KEY=A,B"),
        ([*VARP, "--set", "train.lr=0.5"], "train.lr is searched"),
        ([*VARP, "--set", "train={lr: 0.5}"], "train.lr is searched"),
        (
            ["fedabc/table1", "--search", "--grid", "train.lr=1,2"],
            "none of these cells of fedabc/table1 has a grid",
        ),
    ],
)
def test_a_grid_that_would_be_of_no_effect_is_refused_before_anything_runs(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pool, "work", None)
    table = [] if words[0].startswith("fed") else ["feddpc/table2"]
    assert main(["reproduce", *table, *words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def searched(tmp_path, monkeypatch, score, *words):
    args = asked(*VARP, "--out", tmp_path, *words)
    monkeypatch.setattr(pool, "work", lambda *a, **k: {})
    monkeypatch.setattr(search, "score", score)
    said = []
    return search.searched(jobs.plan(args), args, said.append), said


def test_a_grid_of_one_value_is_that_value(tmp_path, monkeypatch):
    found, _ = searched(tmp_path, monkeypatch, None, "--grid", "train.lr=0.5")
    assert found.cells[0].config["train"]["lr"] == 0.5
    assert found.chosen == {found.cells[0].name: {"train.lr": 0.5}}


def test_a_winner_has_a_run_beside_the_table_s_own_and_shares_it_where_it_is_the_same(
    tmp_path, monkeypatch
):
    (own,) = job(*VARP[:-1]).cells
    other, _ = searched(tmp_path, monkeypatch, lambda t: t.config["train"]["lr"])  # 1 is best
    same, _ = searched(tmp_path, monkeypatch, lambda t: -abs(t.config["train"]["lr"] - 0.1))
    assert (other.cells[0].config["name"], other.cells[0].method) == (
        own.config["name"] + "_lr1",
        "FedVARP [lr 1]",
    )
    assert other.chosen == {other.cells[0].name: {"train.lr": 1}}
    assert same.chosen == {own.name: {"train.lr": 0.1}}
    assert same.cells[0].config == own.config


def test_a_search_in_which_nothing_ended_says_so(tmp_path, monkeypatch):
    found, said = searched(tmp_path, monkeypatch, lambda t: None)
    assert not found.chosen
    assert "none of its 5 points" in said[-1]


# -- the plan --------------------------------------------------------------------------------------
def test_a_plan_is_steps_times_one_step_and_counts_runs_hours_and_megabytes(tmp_path, monkeypatch):
    pace = planning.Pace(0.1, (500, 200), 0)  # batches of 256: 2 and 1 steps, at one epoch
    monkeypatch.setattr(
        planning, "measured", lambda job, *_: dict.fromkeys(map(planning.kind, job.cells), pace)
    )
    found = job("feddpc/table2", "--dataset", "cifar10", "--only", "FedDPC", "--seeds", "0,1")
    said = planning.plan(found, tmp_path, "cpu", 2)
    assert "4 runs" in said
    assert "4 left" in said
    # 4 runs x 400 rounds x 10 clients x 1.5 steps x 0.1 s
    assert "0.67 hours of one process, 0.33 hours with --jobs 2" in said
    # 4 x 400 rounds x 10 clients x (down + up) of LeNet5's 62,006 parameters in 4 bytes
    assert "7937 MB" in said
    assert "10 points" in said  # 5 learning rates, 2 settings
    grids = {"train.lr": [0.1, 0.3]}
    assert "4 points" in planning.plan(found, tmp_path, "cpu", 2, grids=grids)
    alone = planning.plan(found, tmp_path, "cpu", 2, grids={"train.lr": [0.1]})
    assert "points" not in alone  # taken without a run


def test_cells_that_differ_in_method_and_local_epochs_alone_are_measured_once():
    for words in (
        ["feddpc/table2", "--dataset", "cifar10"],
        ["feddc/table1"],
        ["fedpdc/table2", "--setting", "CNN"],
    ):
        assert len({planning.kind(c) for c in job(*words).cells}) == 1


def test_the_steps_of_fedrds_are_also_those_on_its_shared_samples_and_a_mini_has_its_own():
    average, own = (
        next(c for c in papers.cells("fedrds/table3") if (c.method, c.dataset) == (m, "MNIST"))
        for m in ("FedAvg", "FedRDS")
    )
    assert planning.steps(average, (540, 540), 6000) == 10 * 68
    assert planning.steps(own, (540, 540), 6000) == 10 * 443  # 540 + 3000 samples in batches of 8
    small = job("fedrds/table3", "--only", "FedAvg", "--scale", "mini").cells[0]
    assert planning.steps(small, (540,), 6000) == 20


def test_what_is_shared_once_is_in_the_plan_s_megabytes():
    """As a run of this cell counted them: 74.5 MB of models, and 2,500 samples of 3,080 bytes to
    each of 20 clients.
    """
    average, own = (
        next(
            c
            for c in job("fedrds/table3", "--dataset", "cifar10", "--scale", "mini").cells
            if c.method == m
        )
        for m in ("FedAvg", "FedRDS")
    )
    assert planning.traffic(average, 5000) == (pytest.approx(74.4, abs=0.1), False)
    assert planning.traffic(own, 5000) == (pytest.approx(228.4, abs=0.2), False)


def test_a_step_is_measured_in_this_process(monkeypatch):
    found = job("fedabc/table1", "--dataset", "mnist", "--setting", "alpha=1.0", "--only", "FedAvg")
    cell = found.cells[0]
    monkeypatch.setattr(pool, "work", lambda *_, **__: pytest.fail("a run was begun"))
    digits = replace(cell, config=papers.lay(cell.config, {"data": {"dataset": "digits"}}))
    pace = planning.paced(digits, "cpu")
    assert len(pace.samples) == 20
    assert pace.step > 0


def test_a_plan_can_be_stopped_while_it_measures(monkeypatch, tmp_path, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "build", stopped)
    words = ["--dataset", "mnist", "--setting", "alpha=1.0", "--only", "FedAvg", "--device", "cpu"]
    words += ["--out", str(tmp_path), "--plan"]
    assert main(["reproduce", "fedabc/table1", *words]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# -- running it ------------------------------------------------------------------------------------
def test_mini_runs_are_paired_resumable_and_say_in_every_artefact_that_they_are_mini(
    tmp_path, capsys
):
    out = tmp_path / "out"
    words = [
        "reproduce",
        "fedabc/table1",
        "--dataset",
        "mnist",
        "--setting",
        "alpha=1.0",
        "--only",
        "FedAvg,FedPer",
        "--scale",
        "mini",
        "--jobs",
        "2",
        "--out",
        str(out),
        *DIGITS,
    ]
    assert main(words) == 0
    first, second = sorted((out / "fedabc-mini").glob("fedabc-*"))
    assert (first / "partition.json").read_bytes() == (second / "partition.json").read_bytes()
    chosen = [
        [json.loads(line)["selected"] for line in (d / "rounds.jsonl").open()]
        for d in (first, second)
    ]
    assert chosen[0] == chosen[1]
    texts = [*out.glob("fedabc-table1-mini.*")]
    assert len(texts) == 3
    for path in texts:
        assert (
            "not the paper" in path.read_text().replace("&#39;", "'")
            or ",mini," in path.read_text()
        ), path
    rows = reproduction.read_csv(out / "fedabc-table1-mini.csv")
    assert [(r["method"], r["paper"], r["seed"], r["rounds"], r["changed"]) for r in rows] == [
        ("FedAvg", 98.0, 0, 2, "data.dataset=digits, rounds=2"),
        ("FedPer", 98.1, 0, 2, "data.dataset=digits, rounds=2"),
    ]
    assert all(r["ours"] == r["pfl"] and 0 < r["pfl"] <= 100 and r["mb"] > 0 for r in rows)
    before = (first / "rounds.jsonl").stat().st_mtime_ns
    capsys.readouterr()
    assert main(words) == 0  # nothing is run again
    assert (first / "rounds.jsonl").stat().st_mtime_ns == before


MINE = ["fedabc/table1", "--dataset", "mnist", "--setting", "alpha=1.0", "--scale", "mini", *DIGITS]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out = tmp_path_factory.mktemp("ended")
    assert main(["reproduce", *MINE, "--only", "FedAvg", "--out", str(out)]) == 0
    return out


@pytest.fixture
def done(ended, tmp_path):
    """A copy of what `fednet reproduce` leaves of MINE's FedAvg."""
    return shutil.copytree(ended, tmp_path, dirs_exist_ok=True)


def test_where_none_is_done_there_is_nothing_to_gather(tmp_path, capsys):
    words = [*MINE, "--only", "FedAvg,FedPer", "--gather", "--out", str(tmp_path)]
    assert main(["reproduce", *words]) == 2
    assert "none of the 2 runs" in capsys.readouterr().err


def test_what_is_done_is_gathered_without_starting_the_rest_which_stands_there_as_not_run(
    done, tmp_path, monkeypatch
):
    out = ["--out", str(tmp_path)]
    begun = next(t for c, _, t in job(*MINE).runs(tmp_path) if c.method == "FedPer")
    begun.run.mkdir()
    (begun.run / "rounds.jsonl").write_text("{}\n{}\n")
    monkeypatch.setattr(pool, "work", None)
    assert main(["reproduce", *MINE, "--gather", "--seeds", "0,1", *out]) == 0
    rows = {
        (r["method"], r["seed"]): r
        for r in reproduction.read_csv(tmp_path / "fedabc-table1-mini.csv")
    }
    assert len(rows) == 18
    assert {k for k, r in rows.items() if r["status"] == "done"} == {("FedAvg", 0)}
    assert rows["FedRod", 1]["status"] == "not run"
    assert rows["FedPer", 0]["status"] == "not run: 2 of 60 rounds so far"
    said = (tmp_path / "fedabc-table1-mini.txt").read_text()
    assert "0 (1 not run)" in said
    assert said.count("not run") == 9


def test_a_row_that_was_not_run_takes_no_place_of_one_that_was(tmp_path):
    row = dict.fromkeys(reproduction.FIXED) | {
        "method": "A",
        "dataset": "D",
        "heterogeneity": "h",
        "seed": 0,
        "status": "done",
        "ours": 1,
    }
    gone = {**row, "status": "not run", "ours": None}
    path = tmp_path / "t.csv"
    for new, left in ((gone, "not run"), (row, "done"), (gone, "done")):
        reproduction.merge(path, [new], reproduction.FIXED)
        assert [r["status"] for r in reproduction.read_csv(path)] == [left]


def test_a_run_whose_records_were_changed_is_done_again_and_kept_aside(done, tmp_path, capsys):
    words = ["reproduce", *MINE, "--only", "FedAvg", "--out", str(tmp_path)]
    ((_, _, task),) = job(*MINE, "--only", "FedAvg").runs(tmp_path)
    records = task.run / "rounds.jsonl"
    true = [json.loads(line).get("test_accuracy") for line in records.open()]
    records.write_text(records.read_text().replace('"test_accuracy":0.', '"test_accuracy":0.9'))
    assert main([*words, "--gather"]) == 2
    capsys.readouterr()
    assert main(words) == 0
    assert "changed after it ended" in capsys.readouterr().out
    assert [json.loads(line).get("test_accuracy") for line in records.open()] == true
    assert [p.name for p in task.books.glob("*.changed*")] == [f"{task.name}.changed1"]


def test_a_half_written_run_that_cannot_be_resumed_is_done_again(done, tmp_path, capsys):
    words = ["reproduce", *MINE, "--only", "FedAvg", "--out", str(tmp_path)]
    ((_, _, task),) = job(*MINE, "--only", "FedAvg").runs(tmp_path)
    before = reproduction.read_csv(tmp_path / "fedabc-table1-mini.csv")[0]
    (task.books / f"{task.name}.done").unlink()
    (task.run / "summary.json").unlink()
    records = task.run / "rounds.jsonl"
    records.write_bytes(records.read_bytes()[:-100])
    capsys.readouterr()
    assert main(words) == 0
    assert "cannot be resumed, it is done again" in capsys.readouterr().out
    after = reproduction.read_csv(tmp_path / "fedabc-table1-mini.csv")[0]
    assert (after["ours"], after["mb"]) == (before["ours"], before["mb"])


def test_a_run_whose_checkpoint_was_deleted_is_done_again_and_has_no_round_twice(
    done, tmp_path, capsys
):
    words = ["reproduce", *MINE, "--only", "FedAvg", "--out", str(tmp_path)]
    ((_, _, task),) = job(*MINE, "--only", "FedAvg").runs(tmp_path)
    (task.books / f"{task.name}.done").unlink()
    (task.run / "summary.json").unlink()
    shutil.rmtree(task.run / "checkpoint")
    capsys.readouterr()
    assert main(words) == 0
    assert "cannot be resumed, it is done again" in (said := capsys.readouterr().out)
    assert "no checkpoint to go on from" in said
    assert [json.loads(line)["round"] for line in (task.run / "rounds.jsonl").open()] == [1, 2]


def test_a_run_that_was_refused_for_want_of_its_data_is_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNET_DATA", str(tmp_path / "nothing"))
    words = [
        "reproduce",
        "fedrds/table3",
        "--dataset",
        "svhn",
        "--only",
        "FedAvg",
        "--scale",
        "mini",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 2
    assert "refused" in (said := capsys.readouterr().out)
    assert "SVHN could not be read" in said
    assert main([*words, "--quiet"]) == 2
    assert "SVHN could not be read" in capsys.readouterr().err


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, capsys):
    words = ["reproduce", *MINE, "--only", "FedAvg", "--out", str(tmp_path)]
    ((_, _, task),) = job(*MINE, "--only", "FedAvg").runs(tmp_path)
    held = claims.claim(task.books, task.name)
    assert main(words) == 0
    assert "another process is at it" in capsys.readouterr().out
    assert not task.run.exists()
    held.release()
    assert main(words) == 0
    assert task.run.exists()


def test_where_the_data_come_from_makes_no_other_run(tmp_path, capsys):
    words = ["reproduce", *MINE, "--only", "FedAvg", "--out", str(tmp_path / "out")]
    assert main([*words, "--set", f"data.root={tmp_path}"]) == 0
    assert (
        reproduction.read_csv(tmp_path / "out" / "fedabc-table1-mini.csv")[0]["changed"]
        == "data.dataset=digits, rounds=2"
    )
    capsys.readouterr()
    assert main(words) == 0  # what is done stays done
    assert "/1]" not in capsys.readouterr().out


OWN_FILE = """
from fednet import algorithm
from fednet.algorithms.fedavg import FedAvg


@algorithm("{name}")
class Mine(FedAvg):
    def client_update(self, phase, client, down, host):
        {body}
        return super().client_update(phase, client, down, host)
"""


def test_the_papers_runs_stay_what_they_are_beside_a_users_method_that_is_worked_on(done, tmp_path):
    """In processes of their own, as a file is loaded once in each."""
    file, out = tmp_path / "mine.py", tmp_path

    def said(body, *words):
        file.write_text(OWN_FILE.format(name="mine_ours", body=body))
        with Rig(tmp_path) as rig:
            command = ["reproduce", *MINE, "--only", "FedAvg", "--out", out, *words]
            return rig.run("main", *command)[1]

    mine = ["--load", str(file), "--add", "mine_ours"]
    first = said("raise ValueError('not yet')", *mine)
    assert "[1/2] fedabc-mnist-alpha=1.0-mine_ours-mini-seed0: failed" in first, first
    assert "to have one tried again" in first
    assert "fedavg-mini-seed0:" not in first
    again = said("raise ValueError('not yet')", *mine)
    assert "/2]" not in again, again  # what failed as it stands fails again
    mended = said("pass", *mine)
    assert "it is done again" in mended, mended
    assert "[2/2] fedabc-mnist-alpha=1.0-mine_ours-mini-seed0: pfl_accuracy" in mended
    edited = said("host.report(x=1.0)", *mine)
    assert "it is done again" in edited, edited
    assert "fedavg-mini-seed0:" not in mended + edited
    assert len([*(out / "fedabc-mini" / ".cells").glob("*mine*.changed*")]) == 2
    assert {
        r["method"]
        for r in reproduction.read_csv(out / "fedabc-table1-mini.csv")
        if r["status"] == "done"
    } == {"FedAvg", "mine_ours"}


def test_what_failed_under_another_configuration_is_tried_again_under_this_one(tmp_path):
    task = marks.RunSpec({"name": "a", "rounds": 1}, tmp_path)
    task.books.mkdir(parents=True)
    task.run.mkdir()
    marks.write(task, "failed", ("0123", "-"), 1)
    assert marks.state(task, marks.digest(task)) == "edited"
    assert marks.set_aside(task).exists()
    assert marks.state(task, marks.digest(task)) == "to do"
    marks.write(task, "failed", marks.digest(task), 1)
    assert marks.state(task, marks.digest(task)) == "failed"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    assert main(["reproduce", "feddpc/table2", "--out", str(below)]) == 2
    assert f"--out {below}: nothing can be written there" in capsys.readouterr().err


def test_the_table_that_is_measured_without_runs_is_printed(monkeypatch, capsys):
    from fednet.papers import servercost

    monkeypatch.setattr(servercost, "report", lambda: "method  paper")
    for words in (["--gather"], ["--only", "FedDPC"], ["--seeds", "0,1"]):
        assert main(["reproduce", "feddpc/table1", *words]) == 2
        assert f"{words[0]}: feddpc/table1 has no runs behind it" in capsys.readouterr().err
    assert main(["reproduce", "feddpc/table1", "--plan"]) == 0
    assert "no runs" in (said := capsys.readouterr().out)
    assert "method  paper" not in said
    assert main(["reproduce", "feddpc/table1"]) == 0
    assert "method  paper" in capsys.readouterr().out


def test_a_plan_says_why_a_model_could_not_be_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNET_DATA", str(tmp_path / "nothing"))
    assert (
        main(
            [
                "reproduce",
                "fedrds/table3",
                "--dataset",
                "svhn",
                "--only",
                "FedAvg",
                "--plan",
                "--device",
                "cpu",
                "--out",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    assert (
        "could not be measured: fednet reproduce: data.dataset: SVHN could not be read"
        in capsys.readouterr().out
    )
    assert not (tmp_path / "out").exists()


def test_a_run_of_another_configuration_is_not_taken_for_this_one(tmp_path):
    found = job("feddpc/table2", "--dataset", "cifar10", "--only", "FedDPC")
    tasks = [t for _, _, t in found.runs(tmp_path)][:1]
    tasks[0].books.mkdir(parents=True)
    marks.write(tasks[0], "done", ("0123", "-"), 0)
    with pytest.raises(ConfigError, match="another configuration"):
        pool.work(tasks, 1, "cpu")


def test_runs_whose_folder_is_deleted_while_they_go_on_are_not_noted_in_a_new_one(
    tmp_path, monkeypatch
):
    found = job("feddpc/table2", "--dataset", "cifar10", "--only", "FedDPC")
    tasks = [t for _, _, t in found.runs(tmp_path / "out")][:1]

    def deletes(held, words, log, **_):
        return subprocess.Popen(["rm", "-r", str(tmp_path / "out")])

    monkeypatch.setattr(claims.Claim, "start", deletes)
    with pytest.raises(CannotGoOn, match="was deleted or moved while work went on there"):
        pool.work(tasks, 1, "cpu")
    assert not (tmp_path / "out").exists()


# -- the compact results ---------------------------------------------------------------------------
def test_new_rows_replace_those_of_the_same_run_and_leave_the_others(tmp_path):
    row = dict.fromkeys(reproduction.FIXED) | {
        "method": "A",
        "dataset": "D",
        "heterogeneity": "h",
        "seed": 0,
        "ours": 1,
    }
    path = tmp_path / "t.csv"
    reproduction.merge(path, [row, {**row, "seed": 1}], reproduction.FIXED)
    reproduction.merge(path, [{**row, "ours": 2}], reproduction.FIXED)
    # In their places.
    assert [(r["seed"], r["ours"]) for r in reproduction.read_csv(path)] == [(0, 2), (1, 1)]


def test_what_only_a_search_can_find_is_run_with_a_search_alone():
    assert [c.variant for c in job("fedrds/figureA1_text").cells] == ["beta=0.1"]
    assert [c.variant for c in job("fedrds/figureA1_text", "--search").cells] == [
        "beta=0.1",
        "best beta",
    ]

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
from fednet.errors import ConfigError
from fednet.experiment import build as experiment
from fednet.papers import job as jobs
from fednet.papers import plan as planning
from fednet.papers import results, search
from fednet.sweep import claims, marks, pool
from tests.processes import Rig

pytestmark = pytest.mark.long

DIGITS = "--set data.dataset=digits --set rounds=2 --device cpu"


def asked(words, *more):
    """What `fednet reproduce` makes of a command line."""
    parser = Parser()
    verb.add(parser)
    return verb.request(parser.parse_args([*words.split(), *map(str, more)]))


def job(words, *more):
    return jobs.plan(asked(words, *more))


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
        # In any order, and without what a shell takes away.
        ("niidbench/cifar10", "10 parties #C=2", {("10 parties", "#C=2")}),
        ("niidbench/cifar10", "c=2.0 10 parties", {("10 parties", "#C=2")}),
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
    assert reproduce("", *words, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_method_that_a_cell_is_measured_against_runs_too():
    found = job("fedabc/figure5_text --only FedABC").cells
    assert {c.method for c in found} == {"FedABC", "FedABC_wi"}


@pytest.mark.parametrize("table", papers.with_results())
def test_an_added_method_trains_in_every_column_as_the_paper_s_own_does(table):
    """Not as a SOLO of 300 epochs without federation, nor as an ablation that shares nothing."""
    own = {}
    for c in papers.cells(table):
        own.setdefault((c.dataset, c.variant, c.heterogeneity), c)
    added = [c for c in job(f"{table} --add fedsam --search").cells if c.method == "fedsam"]
    assert {(c.dataset, c.variant, c.heterogeneity) for c in added} == {*own}
    for c in added:
        theirs = own[c.dataset, c.variant, c.heterogeneity]
        like = jobs._evaluated(replace(c, config={**theirs.config, "algorithm": {}}), "full")
        assert {k for k in like if c.config[k] != like[k]} <= {"algorithm", "name"}
        assert (c.measure, c.figure) == (theirs.measure, None)
        assert not any(key.startswith("algorithm.") for key in c.grids)


def test_an_added_method_takes_no_name_of_the_table_s_own_and_one_given_twice_runs_once():
    for words in ("--add fedprox", "--only FedDPC --add fedprox"):
        with pytest.raises(ConfigError, match="FedProx of feddpc/table2 has runs of that name"):
            job(f"feddpc/table2 --dataset cifar10 {words}")
    twice = ["--add", "{name: fedprox, mu: 1}"] * 2
    found = job("feddpc/table2 --dataset cifar10 --only FedDPC", *twice)
    assert sorted(c.method for c in found.cells) == ["FedDPC"] * 2 + ["fedprox-mu1"] * 2


def test_what_is_open_runs_once_where_the_table_has_it_itself_and_is_the_table_s():
    found = job("feddpc/figure6 --open")
    assert len({c.name for c in found.cells}) == len(found.cells) == 20
    assert not {"FedDPC no projection", "FedDPC no scaling"} & found.added
    assert "FedDPC lambda=2" in found.added


@pytest.mark.parametrize(
    "table", ["feddpc/table2", "feddpc/figure6", "niidbench/cifar10", "fedabc/table1"]
)
def test_each_name_that_the_table_prints_can_be_asked_for(table):
    added = ["--open", "--add", "{name: fedsam, rho: 0.1}"]
    for method in {c.method for c in job(table, *added).cells}:
        found = {c.method for c in job(table, *added, "--only", method).cells}
        named = found - {"fedsam-rho0.1"}
        assert method in found
        # the paper's own stands for its variants too
        assert len(named) <= 1 or all(m.startswith(method) for m in named)
    both = job("feddpc/table2 --open --only", "feddpc lambda=0.1,FedDPC lambda=-0.1").cells
    assert {c.method for c in both} == {"FedDPC lambda=0.1", "FedDPC lambda=-0.1"}


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


# -- searching -------------------------------------------------------------------------------------
VARP = "feddpc/table2 --dataset cifar10 --setting alpha=0.2 --only FedVARP --search"


def searched(tmp_path, monkeypatch, score, *words):
    """(the job with its winners, what was said), where `score` is the accuracy of a run."""
    args = asked(VARP, "--out", tmp_path, *words)
    monkeypatch.setattr(pool, "work", lambda *a, **k: {})
    monkeypatch.setattr(search, "score", score)
    said = []
    return search.searched(jobs.plan(args), args, said.append), said


def test_a_search_run_is_a_quarter_of_the_rounds_on_a_validation_split(tmp_path):
    found = job("feddpc/table2 --dataset cifar10 --setting alpha=0.2 --only FedCM")
    (cell,) = found.cells
    points = search.points(cell, {"train.lr": [0.5]})
    assert points == [{"train.lr": 0.5, "algorithm.alpha": a} for a in (1, 0.1, 0.01, 0.001)]
    made = search.task(cell, points[1], found, tmp_path).config
    assert (made["rounds"], made["data"]["validation"]) == (100, 0.1)
    assert (made["train"]["lr"], made["algorithm"]["alpha"]) == (0.5, 0.1)
    assert cell.config["data"].get("validation") is None  # the winner has the whole pool


def test_the_winner_is_the_best_on_the_validation_split_and_what_failed_is_out(
    tmp_path, monkeypatch
):
    scores = {1: None, 0.3: 0.4, 0.2: 0.6}
    by_rate = lambda t: scores[t.config["train"]["lr"]]  # noqa: E731
    found, _ = searched(tmp_path, monkeypatch, by_rate, "--grid", "train.lr=1,0.3,0.2")
    assert found.cells[0].config["train"]["lr"] == 0.2
    assert found.chosen == {found.cells[0].name: {"train.lr": 0.2}}
    (books,) = json.loads((tmp_path / "feddpc-table2-chosen.json").read_text()).values()
    assert [s["validation_accuracy"] for s in books["scores"]] == [None, 0.4, 0.6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("feddpc/table2 --only FedVARP --grid train.lr=1,2", "give both"),
        (f"{VARP} --grid train.rl=1,2", "Did you mean 'train.lr'"),
        (f"{VARP} --grid train.lr=", "expected KEY=A,B"),
        (f"{VARP} --grid train.lr", "expected KEY=A,B"),
        (f"{VARP} --set train.lr=0.5", "train.lr is searched"),
        (f'{VARP} --set train={{"lr":0.5}}', "train.lr is searched"),
        (
            "fedabc/table1 --search --grid train.lr=1,2",
            "none of these cells of fedabc/table1 has a grid",
        ),
    ],
)
def test_a_grid_that_would_be_of_no_effect_is_refused_before_anything_runs(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(pool, "work", None)
    assert reproduce(words, "--out", tmp_path) == 2
    assert said in capsys.readouterr().err


def test_a_grid_of_one_value_is_that_value(tmp_path, monkeypatch):
    found, _ = searched(tmp_path, monkeypatch, None, "--grid", "train.lr=0.5")
    assert found.chosen == {found.cells[0].name: {"train.lr": 0.5}}


def test_a_winner_has_a_run_beside_the_table_s_own_and_shares_it_where_it_is_the_same(
    tmp_path, monkeypatch
):
    (own,) = job(VARP.removesuffix(" --search")).cells
    other, _ = searched(tmp_path, monkeypatch, lambda t: t.config["train"]["lr"])  # 1 is best
    same, _ = searched(tmp_path, monkeypatch, lambda t: -abs(t.config["train"]["lr"] - 0.1))
    (winner,) = other.cells
    assert (winner.config["name"], winner.method) == (f"{own.name}_lr1", "FedVARP [lr 1]")
    assert same.chosen == {own.name: {"train.lr": 0.1}}
    assert same.cells[0].config == own.config


def test_a_search_in_which_nothing_ended_says_so(tmp_path, monkeypatch):
    found, said = searched(tmp_path, monkeypatch, lambda t: None)
    assert not found.chosen
    assert "none of its 5 points" in said[-1]


def test_what_only_a_search_can_find_is_run_with_a_search_alone():
    for words, variants in (("", ["beta=0.1"]), ("--search", ["beta=0.1", "best beta"])):
        assert [c.variant for c in job(f"fedrds/figureA1_text {words}").cells] == variants


# -- the plan --------------------------------------------------------------------------------------
def test_a_plan_is_steps_times_one_step_and_counts_runs_hours_and_megabytes(tmp_path, monkeypatch):
    pace = planning.Pace(0.1, (500, 200), 0)  # batches of 256: 2 and 1 steps, at one epoch
    monkeypatch.setattr(
        planning, "measured", lambda job, *_: dict.fromkeys(map(planning.kind, job.cells), pace)
    )
    found = job("feddpc/table2 --dataset cifar10 --only FedDPC --seeds 0,1")
    said = planning.plan(found, tmp_path, "cpu", 2)
    assert "4 runs" in said
    assert "4 left" in said
    # 4 runs x 400 rounds x 10 clients x 1.5 steps x 0.1 s
    assert "0.67 hours of one process, 0.33 hours with --jobs 2" in said
    # 4 x 400 rounds x 10 clients x (down + up) of LeNet5's 62,006 parameters in 4 bytes
    assert "7937 MB" in said
    assert "10 points" in said  # 5 learning rates, 2 settings
    for values, points in (([0.1, 0.3], "4 points"), ([0.1], "")):  # one is taken without a run
        said = planning.plan(found, tmp_path, "cpu", 2, grids={"train.lr": values})
        assert points in said
        assert ("points" in said) == bool(points)


@pytest.mark.parametrize(
    "words",
    ["feddpc/table2 --dataset cifar10", "feddc/table1", "fedpdc/table2 --setting CNN"],
)
def test_cells_that_differ_in_method_and_local_epochs_alone_are_measured_once(words):
    assert len({planning.kind(c) for c in job(words).cells}) == 1


def test_the_steps_of_fedrds_are_also_those_on_its_shared_samples_and_a_mini_has_its_own():
    average, own = (
        next(c for c in papers.cells("fedrds/table3") if (c.method, c.dataset) == (m, "MNIST"))
        for m in ("FedAvg", "FedRDS")
    )
    assert planning.steps(average, (540, 540), 6000) == 10 * 68
    assert planning.steps(own, (540, 540), 6000) == 10 * 443  # 540 + 3000 samples in batches of 8
    small = job("fedrds/table3 --only FedAvg --scale mini").cells[0]
    assert planning.steps(small, (540,), 6000) == 20


def test_what_is_shared_once_is_in_the_plan_s_megabytes():
    """As a run of this cell counted them: 74.5 MB of models, and 2,500 samples of 3,080 bytes to
    each of 20 clients.
    """
    cells = {c.method: c for c in job("fedrds/table3 --dataset cifar10 --scale mini").cells}
    assert planning.traffic(cells["FedAvg"], 5000) == (pytest.approx(74.4, abs=0.1), False)
    assert planning.traffic(cells["FedRDS"], 5000) == (pytest.approx(228.4, abs=0.2), False)


def test_a_step_is_measured_in_this_process(monkeypatch):
    cell = job("fedabc/table1 --dataset mnist --setting alpha=1.0 --only FedAvg").cells[0]
    monkeypatch.setattr(pool, "work", lambda *_, **__: pytest.fail("a run was begun"))
    digits = replace(cell, config=papers.lay(cell.config, {"data": {"dataset": "digits"}}))
    pace = planning.paced(digits, "cpu")
    assert len(pace.samples) == 20
    assert pace.step > 0


def test_a_plan_can_be_stopped_while_it_measures(monkeypatch, tmp_path, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "build", stopped)
    words = "fedabc/table1 --dataset mnist --setting alpha=1.0 --only FedAvg --device cpu --plan"
    assert reproduce(words, "--out", tmp_path) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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


def test_mini_runs_are_paired_resumable_and_say_in_every_artefact_that_they_are_mini(tmp_path):
    words = f"{MINE} --only FedAvg,FedPer --jobs 2 --out {tmp_path}"
    assert reproduce(words) == 0
    first, second = sorted((tmp_path / "fedabc-mini").glob("fedabc-*"))
    assert (first / "partition.json").read_bytes() == (second / "partition.json").read_bytes()
    chosen = [
        [json.loads(line)["selected"] for line in (d / "rounds.jsonl").open()]
        for d in (first, second)
    ]
    assert chosen[0] == chosen[1]
    texts = [path.read_text() for path in tmp_path.glob("fedabc-table1-mini.*")]
    assert len(texts) == 3
    assert all("not the paper" in text or ",mini," in text for text in texts)
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
    done, tmp_path, monkeypatch
):
    begun = next(t for c, _, t in job(MINE).runs(tmp_path) if c.method == "FedPer")
    begun.run.mkdir()
    (begun.run / "rounds.jsonl").write_text("{}\n{}\n")
    monkeypatch.setattr(pool, "work", None)
    assert reproduce(f"{MINE} --gather --seeds 0,1", "--out", tmp_path) == 0
    found = {(r["method"], r["seed"]): r["status"] for r in rows(tmp_path)}
    assert len(found) == 18
    assert {k for k, status in found.items() if status == "done"} == {("FedAvg", 0)}
    assert found["FedRod", 1] == "not run"
    assert found["FedPer", 0] == "not run: 2 of 60 rounds so far"
    said = (tmp_path / "fedabc-table1-mini.txt").read_text()
    assert "0 (1 not run)" in said
    assert said.count("not run") == 9


def test_a_run_whose_records_were_changed_is_done_again_and_kept_aside(done, tmp_path, capsys):
    records = done.run / "rounds.jsonl"
    true = [json.loads(line).get("test_accuracy") for line in records.open()]
    records.write_text(records.read_text().replace('"test_accuracy":0.', '"test_accuracy":0.9'))
    assert reproduce(f"{ONE} --gather", "--out", tmp_path) == 2
    capsys.readouterr()
    assert reproduce(ONE, "--out", tmp_path) == 0
    assert "changed after it ended" in capsys.readouterr().out
    assert [json.loads(line).get("test_accuracy") for line in records.open()] == true
    assert [p.name for p in done.books.glob("*.changed*")] == [f"{done.name}.changed1"]


@pytest.mark.parametrize("lost", ["a part of its rounds", "its checkpoint"])
def test_a_run_that_cannot_be_resumed_is_done_again_and_has_no_round_twice(
    done, tmp_path, capsys, lost
):
    (before,) = rows(tmp_path)
    (done.books / f"{done.name}.done").unlink()
    (done.run / "summary.json").unlink()
    records = done.run / "rounds.jsonl"
    if lost == "its checkpoint":
        shutil.rmtree(done.run / "checkpoint")
    else:
        records.write_bytes(records.read_bytes()[:-100])
    capsys.readouterr()
    assert reproduce(ONE, "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert "cannot be resumed, it is done again" in said
    assert ("no checkpoint to go on from" in said) == (lost == "its checkpoint")
    (after,) = rows(tmp_path)
    assert (after["ours"], after["mb"]) == (before["ours"], before["mb"])
    assert [json.loads(line)["round"] for line in records.open()] == [1, 2]


def test_a_run_that_was_refused_for_want_of_its_data_is_tried_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDNET_DATA", str(tmp_path / "nothing"))
    words = "fedrds/table3 --dataset svhn --only FedAvg --device cpu"
    out = tmp_path / "out"
    assert reproduce(f"{words} --plan", "--out", out) == 0
    said = capsys.readouterr().out
    assert "could not be measured: fednet reproduce: data.dataset: SVHN could not be read" in said
    assert not out.exists()
    assert reproduce(f"{words} --scale mini", "--out", out) == 2
    said = capsys.readouterr().out
    assert "refused" in said
    assert "SVHN could not be read" in said
    assert reproduce(f"{words} --scale mini --quiet", "--out", out) == 2
    assert "SVHN could not be read" in capsys.readouterr().err


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path, capsys):
    ((_, _, task),) = job(ONE).runs(tmp_path)
    held = claims.claim(task.books, task.name)
    assert reproduce(ONE, "--out", tmp_path) == 0
    assert "another process is at it" in capsys.readouterr().out
    assert not task.run.exists()
    held.release()
    assert reproduce(ONE, "--out", tmp_path) == 0
    assert task.run.exists()


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

    def said(body):
        file.write_text(OWN_FILE.format(name="mine_ours", body=body))
        mine = ["--out", out, "--load", file, "--add", "mine_ours"]
        with Rig(tmp_path) as rig:
            return rig.run("main", "reproduce", *ONE.split(), *map(str, mine))[1]

    first = said("raise ValueError('not yet')")
    assert "[1/2] fedabc-mnist-alpha=1.0-mine_ours-mini-seed0: failed" in first, first
    assert "to have one tried again" in first
    assert "fedavg-mini-seed0:" not in first
    again = said("raise ValueError('not yet')")
    assert "/2]" not in again, again  # what failed as it stands fails again
    mended = said("pass")
    assert "it is done again" in mended, mended
    assert "[2/2] fedabc-mnist-alpha=1.0-mine_ours-mini-seed0: pfl_accuracy" in mended
    edited = said("host.report(x=1.0)")
    assert "it is done again" in edited, edited
    assert "fedavg-mini-seed0:" not in mended + edited
    assert len([*(out / "fedabc-mini" / ".cells").glob("*mine*.changed*")]) == 2
    finished = {r["method"] for r in rows(out) if r["status"] == "done"}
    assert finished == {"FedAvg", "mine_ours"}


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
    assert reproduce("feddpc/table2", "--out", below) == 2
    assert f"--out {below}: nothing can be written there" in capsys.readouterr().err


def test_the_table_that_is_measured_without_runs_is_printed(monkeypatch, capsys):
    from fednet.papers import servercost

    monkeypatch.setattr(servercost, "report", lambda: "method  paper")
    for words in ("--gather", "--only FedDPC", "--seeds 0,1"):
        assert reproduce(f"feddpc/table1 {words}") == 2
        refused = f"{words.split()[0]}: feddpc/table1 has no runs behind it"
        assert refused in capsys.readouterr().err
    assert reproduce("feddpc/table1 --plan") == 0
    said = capsys.readouterr().out
    assert "no runs" in said
    assert "method  paper" not in said
    assert reproduce("feddpc/table1") == 0
    assert "method  paper" in capsys.readouterr().out

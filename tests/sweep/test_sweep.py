from __future__ import annotations

import json
import re
import shutil
import signal
import sys

import pytest

from fednet import config
from fednet.cli.main import main
from fednet.cli.report import opened
from fednet.errors import CannotGoOn, ConfigError, StateError, Stopped
from fednet.files import line
from fednet.sweep import claims, pool, running
from fednet.sweep import grid as sweep
from fednet.sweep.marks import ended
from tests.report.fake_run import write

FILE = """
base: base.yaml
vary:
  algorithm: [fedavg, {name: fedprox, mu: 1e-2}]
  data.partition.alpha: [0.1, 1.0]
seeds: [0, 1]
"""


@pytest.fixture
def path(tmp_path):
    """A sweep file."""
    (tmp_path / "base.yaml").write_text("rounds: 2\ndata: {validation: 0.1}\n")
    (tmp_path / "s.yaml").write_text(FILE)
    return tmp_path / "s.yaml"


def ran(s, out, code="", **given):
    """Runs the sweep with `code` instead of fednet, which has the cell's run directory as `run`."""

    def line(task, options):
        head = f"import pathlib, sys; cell = {task.name!r}; seed = {task.config['seed']}\n"
        head += f"run = pathlib.Path({str(task.run)!r}); run.mkdir(exist_ok=True)\n"
        head += "(run / 'summary.json').write_text('{}')\n"
        return [sys.executable, "-S", "-c", head + code]  # of the standard library alone

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "command", line)
        return running.run(s, out, **given)


def test_a_sweep_whose_folder_is_deleted_ends_and_does_not_make_it_again(path, tmp_path):
    s = sweep.load(path)
    with pytest.raises(CannotGoOn, match="was deleted or moved during the sweep"):
        ran(s, tmp_path, "import shutil; shutil.rmtree(run.parent)")
    assert not running.home(s, tmp_path).exists()


def test_every_combination_is_a_cell_seed_by_seed(path):
    names = [c.name for c in sweep.cells(sweep.load(path))]
    assert names[:4] == [
        "fedavg_alpha0.1_seed0",
        "fedavg_alpha1_seed0",
        "fedprox-mu0.01_alpha0.1_seed0",
        "fedprox-mu0.01_alpha1_seed0",
    ]
    assert len(names) == len(set(names)) == 8


def test_the_methods_of_a_sweep_are_compared_in_its_order(path, tmp_path):
    first = path.parent / "base.yaml"
    turned = sweep.from_grid(first, ["algorithm=scaffold,fedavg"], [0, 1])
    made = ran(turned, tmp_path)
    home = running.home(turned, tmp_path)
    by_method = ["scaffold_seed0", "scaffold_seed1", "fedavg_seed0", "fedavg_seed1"]
    assert sorted(made.done) == sorted(ended(home))
    assert [run.name for run in ended(home)] == by_method
    (home / ".cells" / "scaffold_seed0.done").unlink()  # what is left of it stands where it stood
    (home / ".cells" / "another_seed0.done").touch()
    assert [run.name for run in ended(home)] == [*by_method[1:], "another_seed0"]
    (home / ".cells" / "order").unlink()  # a sweep of before it was written
    assert [run.name for run in ended(home)] == sorted([*by_method[1:], "another_seed0"])


def test_a_cells_settings_are_those_of_the_command_line(path):
    cell = sweep.cells(sweep.load(path))[2]
    assert cell.sets == [
        'name="fedprox-mu0.01_alpha0.1_seed0"',
        "seed=0",
        'algorithm={"name": "fedprox", "mu": 0.01}',
        "data.partition.alpha=0.1",
    ]


def test_flags_make_the_same_sweep_as_a_file(path):
    flags = sweep.from_grid(
        path.parent / "base.yaml",
        ["algorithm=fedavg,{name: fedprox, mu: 0.01}", "data.partition.alpha=0.1,1.0"],
        [0, 1],
    )
    assert [c.settings for c in sweep.cells(flags)] == [
        c.settings for c in sweep.cells(sweep.load(path))
    ]


def test_values_that_read_the_same_get_names_that_differ(path):
    names = [
        c.name
        for c in sweep.cells(sweep.from_grid(path.parent / "base.yaml", ["data.dataset=a b,a-b"]))
    ]
    assert len(set(names)) == 2


def test_shares_are_disjoint_and_make_the_whole(path):
    every = sweep.cells(sweep.load(path))
    parts = [sweep.share(every, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(c.name for p in parts for c in p) == sorted(c.name for c in every)
    with pytest.raises(ConfigError, match="1 <= I <= N"):
        sweep.share(every, "0/3")


def test_cells_run_once_and_a_second_call_runs_none(path, tmp_path):
    code = "(run / 'times').open('a').write('x')"
    s = sweep.load(path)
    outcome = ran(s, tmp_path, code)
    assert len(outcome.done) == len(outcome.chosen) == 8
    assert ran(s, tmp_path, code).done == outcome.done
    assert {(d / "times").read_text() for d in outcome.done} == {"x"}


def test_a_cell_that_another_process_is_at_is_left_to_it(path, tmp_path):
    s = sweep.load(path)
    first = sweep.cells(s)[0].name
    held = claims.claim(running.home(s, tmp_path) / ".cells", first)
    assert held is not None
    outcome = ran(s, tmp_path)
    assert outcome.elsewhere == (first,)
    assert len(outcome.done) == 7
    assert outcome.chosen == ()
    assert "running" in running.plan(s, tmp_path)


def test_a_failed_cell_does_not_keep_the_others_and_is_tried_again(path, tmp_path):
    s = sweep.load(path)
    with pytest.raises(CannotGoOn, match=r"1 of 8 cells failed: fedavg_alpha0\.1_seed1"):
        ran(s, tmp_path, "sys.exit(3 if cell == 'fedavg_alpha0.1_seed1' else 0)")
    assert running.plan(s, tmp_path).count("done") == 7
    assert "failed" in running.plan(s, tmp_path)
    assert len(ran(s, tmp_path).done) == 8


def test_a_failed_cell_does_not_stop_those_beside_it_and_each_is_named_once(path, tmp_path):
    said = []
    code = "sys.exit(3 if seed == 0 and 'prox' in cell else 0)"
    with pytest.raises(CannotGoOn, match="2 of 8 cells failed"):
        ran(sweep.load(path), tmp_path, code, jobs=3, say=said.append)
    begun = [text.split("] ")[1].partition(";")[0] for text in said if text.startswith("[")]
    assert begun == [c.name for c in sweep.cells(sweep.load(path))]
    assert sum("failed, see" in text for text in said) == 2


@pytest.mark.parametrize("text", ["name=mine", "seed=3", "algorithm=moon"])
def test_a_setting_that_the_sweep_gives_itself_is_refused(tmp_path, text):
    (tmp_path / "base.yaml").write_text("rounds: 2\n")
    (tmp_path / "s.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match=f"--set {text}: (a|the) sweep"):
        sweep.configurations(sweep.load(tmp_path / "s.yaml"), sets=[text])


def test_a_stopped_cell_stops_the_sweep_and_the_same_command_goes_on(path, tmp_path):
    s = sweep.load(path)
    with pytest.raises(Stopped) as caught:
        ran(s, tmp_path, "sys.exit(4)")
    assert caught.value.exit_status == 4
    assert "begun" in running.plan(s, tmp_path).splitlines()[1]
    assert len(ran(s, tmp_path).done) == 8


def test_a_signal_reaches_the_run_and_leaves_no_process(path, tmp_path):
    code = f"""
import os, signal
def end(*_): (run / 'told').touch(); sys.exit(4)
signal.signal(signal.SIGTERM, end)
os.kill(os.getppid(), {int(signal.SIGTERM)})
signal.pause()
"""
    with pytest.raises(Stopped):
        ran(sweep.load(path), tmp_path, code)
    first = tmp_path / "s" / "fedavg_alpha0.1_seed0"
    assert (first / "told").exists()
    assert claims.holder(tmp_path / "s" / ".cells", first.name) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_cell_that_is_stopped_before_it_knows_how_to_stop_has_not_failed(path, tmp_path, number):
    """As in its first moment, while Python imports."""
    code = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_DFL)
os.kill(os.getppid(), {int(number)})
signal.pause()
"""
    s, said = sweep.load(path), []
    with pytest.raises(Stopped) as caught:
        ran(s, tmp_path, code, say=said.append)
    assert caught.value.exit_status == (130 if number == signal.SIGINT else 4)
    plan = running.plan(s, tmp_path)
    assert "failed" not in plan + "".join(said)
    assert "begun" in plan.splitlines()[1]
    assert len(ran(s, tmp_path).done) == 8


def test_a_cell_that_a_signal_stops_from_outside_stops_the_sweep(path, tmp_path):
    code = "import os, signal; signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 15)"
    with pytest.raises(Stopped):
        ran(sweep.load(path), tmp_path, code)
    assert "failed" not in running.plan(sweep.load(path), tmp_path)


def test_a_done_cell_under_another_configuration_is_an_error(path, tmp_path):
    s = sweep.load(path)
    first = ran(s, tmp_path)
    assert ran(s, tmp_path, sets=["data.root=elsewhere"]).done == first.done  # no result changes
    with pytest.raises(ConfigError, match="another configuration"):
        ran(s, tmp_path, sets=["train.lr=0.5"])


def test_cells_are_done_again_once_a_file_that_they_use_is_edited(path, tmp_path):
    s, file = sweep.load(path), tmp_path / "mine.py"
    file.write_text("import fednet\n")
    times = "(run.parent / 'times').open('a').write('x')"
    for text, count in (("import fednet\n", 8), ("import fednet\n", 8), ("import fednet #\n", 16)):
        file.write_text(text)
        ran(s, tmp_path, times, load=[str(file)])
        assert (running.home(s, tmp_path) / "times").read_text() == count * "x"


def test_select_takes_the_point_with_the_best_mean_over_seeds(path, tmp_path):
    path.write_text(
        "base: base.yaml\nvary: {algorithm: [fedavg]}\nseeds: [0, 1]\nselect: {grid: {train.lr: "
        "[0.1, 0.01]}}\n"
    )
    found = {("0.1", 0): 0.9, ("0.1", 1): 0.1, ("0.01", 0): 0.6, ("0.01", 1): 0.6}
    rounds = {
        cell: line({"round": 1, "validation_accuracy": accuracy}) + line({"round": 2})
        for cell, accuracy in found.items()
    }
    code = "point = cell.split('_lr')[1].split('_')[0]\n"
    code += f"(run / 'rounds.jsonl').write_bytes({rounds!r}[point, seed])"
    outcome = ran(sweep.load(path), tmp_path, code)
    assert [p.name for p in outcome.chosen] == ["fedavg_lr0.01_seed0", "fedavg_lr0.01_seed1"]
    said = json.loads((tmp_path / "s" / "selection.json").read_text())
    assert said["means"]["fedavg"] == {"lr0.1": 0.5, "lr0.01": 0.6}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("base: base.yaml\nvari: {}\n", "vary"),
        ("base: none.yaml\n", "there is no file"),
        ("base: base.yaml\nvary: {train.lr: []}\n", "at least one value"),
        ("base: base.yaml\nvary: {seed: [1]}\n", "give seeds by `seeds:`"),
        ("base: base.yaml\nseeds: [1, 1]\n", "different whole numbers"),
        (
            "base: base.yaml\nselect: {by: validation_loss, grid: {train.lr: [1]}}\n",
            "validation_accuracy",
        ),
        (
            "base: base.yaml\nselect: {by: test_accuracy, grid: {train.lr: [1]}}\n",
            "would spoil it as a test",
        ),
    ],
)
def test_a_wrong_sweep_file_is_refused(path, text, error):
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        sweep.load(path)


def test_a_sweep_draws_one_page_over_its_cells_and_none_of_them_its_own(tmp_path, monkeypatch):
    runs = [write(tmp_path / "base-sweep" / f"cell{s}", seed=s) for s in (0, 1)]
    monkeypatch.setattr(
        running, "run", lambda *_, **__: running.Outcome(tuple(runs), tuple(runs), ())
    )
    base, drawn = tmp_path / "base.yaml", tmp_path / "base-sweep" / "report.html"
    base.write_text("rounds: 2\n")
    words = ["sweep", str(base), "--seeds", "0,1", "--out", str(tmp_path), "--quiet"]
    assert main([*words, "--set", "report=false"]) == 0
    assert not drawn.exists()
    assert main(words) == 0
    assert "fedavg (n=2)" in drawn.read_text()


def test_the_process_of_a_cell_reads_its_configuration_and_draws_no_page(path, tmp_path):
    ran(sweep.load(path), tmp_path)
    task = running.runs(sweep.load(path), tmp_path)[2]
    name = "fedprox-mu0.01_alpha0.1_seed0"
    line = pool.command(task, ["--in-process"])
    book = task.folder / ".cells" / f"{name}.yaml"
    assert line[1:] == [
        *("-m", "fednet.cli.main", "run", str(book)),
        *("--out", str(tmp_path / "s"), "--in-process"),
    ]
    (task.run / "config.yaml").write_text("")  # the run was begun
    assert "--resume" in pool.command(task, [])
    found = config.load(book)
    assert (found.name, found.algorithm.options["mu"], found.report) == (name, 0.01, False)


def test_a_device_that_no_run_can_have_is_refused_before_any_begins():
    with pytest.raises(ConfigError, match="--device 'gpu': expected auto, cpu"):
        pool.work([], 1, "gpu")


def test_a_done_cell_whose_run_is_gone_or_changed_is_done_again(path, tmp_path):
    s = sweep.load(path)
    home, times = running.home(s, tmp_path), tmp_path / "times"
    note = f"open({str(times)!r}, 'a').write(cell + ' ')"
    cells = [c.name for c in sweep.cells(s)]
    ran(s, tmp_path, note)
    shutil.rmtree(home / cells[0])
    (home / cells[1] / "summary.json").write_text('{"rounds": 3}')
    (home / cells[2] / "rounds.jsonl").write_text("")
    seal = {"records": {"rounds.jsonl": {"bytes": 10, "xxh3": "0"}}}
    (home / cells[2] / "summary.json").write_text(json.dumps(seal))
    plan = running.plan(s, tmp_path)
    assert plan.count("to be done again") == 3
    assert "summary.json is missing" in plan
    said: list[str] = []
    times.unlink()
    ran(s, tmp_path, note, say=said.append)
    assert times.read_text().split() == cells[:3]
    assert len([text for text in said if "what there was of it is in" in text]) == 3
    kept = home / ".cells" / f"{cells[1]}.changed1" / "summary.json"
    assert kept.read_text() == '{"rounds": 3}'


def test_a_damaged_mark_or_claim_is_an_error_that_names_it(path, tmp_path):
    s = sweep.load(path)
    ran(s, tmp_path)
    cell = running.home(s, tmp_path) / ".cells" / sweep.cells(s)[0].name
    done, claim = cell.with_name(f"{cell.name}.done"), cell.with_name(f"{cell.name}.claim.0")
    for file in (done, claim):
        whole = file.read_bytes()
        for damage in (b"", b"\xff\xfe", whole[: len(whole) // 2]):
            file.write_bytes(damage)
            for again in (ran, running.plan):
                with pytest.raises(StateError, match=f"^{re.escape(str(file))}: .*delete it"):
                    again(s, tmp_path)
        file.write_bytes(whole)
        done.unlink(missing_ok=True)  # without it the claim is looked at


def test_a_cell_says_how_long_the_rest_takes_and_how_the_last_one_ended(tmp_path):
    now = iter([0.0, 30.0, 60.0])
    progress = running.SweepProgress(10, tmp_path, lambda: next(now))
    assert progress.begins(1, "a") == "[1/10] a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"accuracy": {"final": 0.9312}}))
    progress.ended("a")
    assert (
        progress.begins(2, "b")
        == "[2/10] b; about 4 min left; a ended with global accuracy 93.12 %"
    )
    progress.ended("b")
    assert progress.begins(3, "c") == "[3/10] c; about 4 min left"  # b left no summary


def test_a_sweeps_folder_stands_for_the_cells_that_are_done(tmp_path):
    for name in ("a", "b", "c"):
        write(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / ".cells").mkdir()
    for mark in ("a.done", "c.done", "b.failed"):
        (tmp_path / "sweep" / ".cells" / mark).touch()
    write(tmp_path / "alone")
    found = opened([tmp_path / "sweep", tmp_path / "alone"])
    assert [run.dir.name for run in found] == ["a", "c", "alone"]


@pytest.mark.long
def test_several_cells_run_at_a_time(tmp_path, capsys):
    base = tmp_path / "base.yaml"
    base.write_text(
        "rounds: 1\nclients: 2\nreport: false\nmodel: {name: mlp, hidden: [4]}\n"
        "data: {dataset: synthetic, samples: 40, shape: [4], classes: 2}\n"
    )
    words = [
        "--grid",
        "train.lr=0.1,0.2,0.3",
        "--jobs",
        "2",
        "--in-process",
        "--out",
        str(tmp_path),
    ]
    assert main(["sweep", str(base), *words]) == 0
    marks = sorted(p.name for p in (tmp_path / "base-sweep" / ".cells").glob("*.done"))
    assert len(marks) == 3
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines[:3]] == ["[1/3]", "[2/3]", "[3/3]"]

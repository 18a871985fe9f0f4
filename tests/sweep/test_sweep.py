"""What a sweep runs, and how its cells begin, end, fail, stop and go on."""

from __future__ import annotations

import sys

import pytest

from fednet import config, proc
from fednet.cli.main import main
from fednet.cli.report import open_runs
from fednet.errors import CannotGoOn, ConfigError, Stopped
from fednet.experiment import lock
from fednet.sweep import cells
from fednet.sweep import grid as sweep
from tests.processes import Rig, until
from tests.rooms import small

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
    (tmp_path / "base.yaml").write_text("rounds: 2\n")
    (tmp_path / "s.yaml").write_text(FILE)
    return tmp_path / "s.yaml"


@pytest.fixture
def three(path):
    """A sweep file of three cells."""
    file = path.with_name("three.yaml")
    file.write_text("base: base.yaml\nvary: {train.lr: [0.1, 0.2, 0.3]}\n")
    return file


def ran(path, code="", jobs=1, say=lambda text: None, sets=()):
    """Runs the sweep with `code` instead of fednet, which has the cell's run directory as `run`.
    Returns the states of the cells, and the names of those that other processes are at.
    """

    def line(task, options):
        head = f"import pathlib, shutil, sys; cell = {task.name!r}\n"
        head += f"run = pathlib.Path({str(task.run)!r}); run.mkdir(exist_ok=True)\n"
        head += f"shutil.copy({str(task.books / 'config.yaml')!r}, run)\n"
        tail = "(run / 'summary.json').write_text('{}')\n"
        return [sys.executable, "-S", "-c", head + code + "\n" + tail]  # quick to start

    tasks = sweep.runs(sweep.load(path), path.parent, sets=sets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "command", line)
        elsewhere = sweep.run(tasks, jobs, "cpu", [], say)
    return [task.state for task in tasks], elsewhere


def states(path):
    return [task.state for task in sweep.runs(sweep.load(path), path.parent)]


# -- what there is to run --------------------------------------------------------------------------
def test_every_combination_is_a_cell_seed_by_seed(path):
    names = list(sweep.combinations(sweep.load(path)))
    assert names[:4] == [
        "fedavg_alpha0.1_seed0",
        "fedavg_alpha1_seed0",
        "fedprox-mu0.01_alpha0.1_seed0",
        "fedprox-mu0.01_alpha1_seed0",
    ]
    assert len(names) == len(set(names)) == 8


def test_a_cells_settings_are_those_of_the_command_line(path):
    cell = sweep.runs(sweep.load(path), path.parent)[2]
    line = [
        "name=fedprox-mu0.01_alpha0.1_seed0",
        "algorithm={name: fedprox, mu: 0.01}",
        "data.partition.alpha=0.1",
    ]
    assert cell.config == config.to_mapping(config.load(path.parent / "base.yaml", line))


def test_flags_make_the_same_sweep_as_a_file(path):
    flags = sweep.from_grid(
        path.parent / "base.yaml",
        ["algorithm=fedavg,{name: fedprox, mu: 0.01}", "data.partition.alpha=0.1,1.0"],
        [0, 1],
    )
    assert sweep.combinations(flags) == sweep.combinations(sweep.load(path))


def test_values_that_read_the_same_get_names_that_differ(path):
    made = sweep.from_grid(path.parent / "base.yaml", ["data.dataset=a b,a-b"])
    assert len(sweep.combinations(made)) == 2


def test_a_setting_may_have_any_characters(path):
    made = sweep.from_grid(path.parent / "base.yaml", ["data.root=/a/\N{GRINNING FACE}"])
    assert sweep.runs(made, "runs")[0].config["data"]["root"] == "/a/\N{GRINNING FACE}"


@pytest.mark.parametrize("text", ["name=mine", "seed=3", "algorithm=moon"])
def test_a_setting_that_the_sweep_gives_itself_is_refused(path, text):
    with pytest.raises(ConfigError, match=f"--set {text}: (a|the) sweep"):
        sweep.runs(sweep.load(path), path.parent, sets=[text])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("base: base.yaml\nvari: {}\n", "vary"),
        ("base: none.yaml\n", "there is no file"),
        ("base: base.yaml\nvary: {train.lr: []}\n", "at least one value"),
        ("base: base.yaml\nvary: {seed: [1]}\n", "give seeds by `seeds:`"),
        ("base: base.yaml\nseeds: [1, 1]\n", "different whole numbers"),
    ],
)
def test_a_wrong_sweep_file_is_refused(path, text, error):
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        sweep.load(path)


# -- doing it --------------------------------------------------------------------------------------
def test_cells_run_once_and_a_sweeps_folder_stands_for_those_that_are_done(three, tmp_path):
    times = tmp_path / "times"
    code = f"open({str(times)!r}, 'a').write(cell + ' ')"
    names = list(sweep.combinations(sweep.load(three)))
    for _ in range(2):
        assert ran(three, code) == (["done"] * 3, [])
    assert times.read_text().split() == names
    (tmp_path / "three" / names[1] / "summary.json").unlink()
    found = open_runs([tmp_path / "three"])
    assert [run.name for run in found] == [names[0], *names[2:]]
    assert not found[0].config["report"]  # one page is drawn over all


def test_finished_cells_are_compared_in_the_order_of_the_sweep_and_others_come_last(three):
    """Names alone would put a chain of compressors, `state-topk`, before none, `state_seed0`."""
    three.write_text("base: base.yaml\nvary: {train.lr: [0.2, 0.1]}\n")
    ran(three)
    folder = three.parent / "three"
    assert [run.name for run in open_runs([folder])] == ["lr0.2_seed0", "lr0.1_seed0"]
    three.write_text("base: base.yaml\nvary: {train.lr: [0.05]}\n")
    ran(three)
    assert [run.name for run in open_runs([folder])][2:] == ["lr0.05_seed0"]
    (folder / ".cells" / "order").write_bytes(b"lr0.2_seed0\n\xff\n")
    found = [run.name for run in open_runs([folder])]
    assert found == ["lr0.2_seed0", "lr0.05_seed0", "lr0.1_seed0"]


def test_a_done_cell_under_another_configuration_is_an_error(three):
    ran(three)
    assert ran(three, sets=["data.root=elsewhere"])[0] == ["done"] * 3  # no result changes
    with pytest.raises(ConfigError, match=r"another configuration \(rounds\)"):
        ran(three, sets=["rounds=3"])
    (three.parent / "three" / "lr0.1_seed0" / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config.yaml is missing; put it back"):
        ran(three)


def test_a_cell_that_another_process_is_at_is_left_to_it(three, tmp_path):
    first = sweep.runs(sweep.load(three), tmp_path)[0]
    held = lock.take(first.books / "lock")
    assert ran(three) == (["to do", *["done"] * 2], [first.name])
    held.release()
    assert ran(three) == (["done"] * 3, [])


def test_a_failed_cell_does_not_stop_the_others_and_is_tried_again(three):
    said = []
    with pytest.raises(CannotGoOn, match=r"1 of 3 cells failed: lr0\.2_seed0"):
        ran(three, "if cell == 'lr0.2_seed0': sys.exit(3)", jobs=3, say=said.append)
    assert [text for text in said if text.startswith("[")] == [
        f"[{n}/3] {name}" for n, name in enumerate(sweep.combinations(sweep.load(three)), 1)
    ]
    assert states(three) == ["done", "failed", "done"]
    assert ran(three)[0] == ["done"] * 3


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(4)", 4),  # it was asked to stop
        ("import os; os.kill(os.getpid(), 15)", 4),  # killed before it could know how to stop
        ("import os, signal; os.kill(os.getppid(), 15); signal.pause()", 4),
        ("import os, signal; os.kill(os.getppid(), 2); signal.pause()", 130),  # Ctrl-C
    ],
)
def test_a_stopped_cell_stops_the_sweep_and_the_same_command_goes_on(three, code, status):
    with pytest.raises(Stopped) as caught:
        ran(three, code)
    assert caught.value.exit_status == status
    assert states(three) == ["begun", *["to do"] * 2]
    assert ran(three)[0] == ["done"] * 3


def drives(three):
    ran(three, "import os; print(os.getpid(), flush=True); import signal; signal.pause()")


def test_a_sweep_that_is_killed_takes_its_run_along_and_leaves_the_cell_free(three, tmp_path):
    first = sweep.runs(sweep.load(three), tmp_path)[0]
    with Rig(tmp_path) as rig:
        driver = rig.fork(drives, three)
        until(lambda: first.why, "its run was started", driver)
        run = int(first.why)
        rig.lose(driver)
        until(lambda: not proc.running(run), "its run has ended")
    assert ran(three) == (["done"] * 3, [])


@pytest.mark.long
def test_the_command_runs_several_cells_at_a_time_and_draws_one_page(tmp_path, capsys):
    base = tmp_path / "base.yaml"
    base.write_text(config.to_yaml(small(rounds=1, clients=2)))
    words = ["sweep", str(base), "--grid", "train.lr=0.1,0.2,0.3", "--jobs", "2", "--in-process"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    home = tmp_path / "base-sweep"
    assert len(open_runs([home])) == 3
    assert "lr=0.3" in (home / "report.html").read_text()
    assert not list(home.glob("*/report.html"))
    assert "[3/3] lr0.3_seed0" in capsys.readouterr().out
    file = home / "lr0.1_seed0" / "checkpoint" / "manifest.json"
    rounds = (home / "lr0.1_seed0" / "rounds.jsonl").read_bytes()
    assert file.exists()
    (home / "lr0.1_seed0" / "summary.json").unlink()  # as if it had been killed at its end
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert (home / "lr0.1_seed0" / "rounds.jsonl").read_bytes() == rounds

from __future__ import annotations

import json

import pytest

from fednet.cli.report import opened
from fednet.sweep.progress import SweepProgress
from tests.report.fake_run import write


def test_a_cell_says_how_long_the_rest_takes_and_how_the_last_one_ended(tmp_path):
    now = iter([0.0, 30.0, 60.0])
    progress = SweepProgress(10, tmp_path, lambda: next(now))
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
    from fednet.cli.main import main

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

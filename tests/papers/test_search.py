"""What is printed without runs: the grids that a paper searched, and its table of costs."""

from __future__ import annotations

import pytest

from fednet import papers
from fednet.cli.main import main
from fednet.sweep import grid


def written(folder, words):
    """Calls `fednet reproduce` with --grid; returns its exit status."""
    return main(["reproduce", *words.split(), "--grid", str(folder)])


@pytest.mark.parametrize("more", ["", "--set rounds=100"])
def test_a_papers_grid_of_a_cell_is_a_sweep_with_samples_held_out(tmp_path, capsys, more):
    """FedGA's: five rates by four displacements, with two seeds."""
    cell = "feddpc/table2 --dataset cifar10 --setting alpha=0.2 --only FedGA --seeds 0,1"
    assert written(tmp_path, f"{cell} {more}") == 0
    path = tmp_path / "feddpc-cifar-10-alpha=0.2-fedga.yaml"
    assert capsys.readouterr().out == f"fednet sweep {path}\n"
    runs = grid.runs(grid.load(path), tmp_path)
    points = {(r.config["train"]["lr"], r.config["algorithm"]["beta"]) for r in runs}
    assert points == {
        (lr, beta) for lr in (1, 0.1, 0.01, 0.001, 0.0001) for beta in (1, 0.1, 0.01, 0.001)
    }
    assert len(runs) == 2 * 20
    (whole,) = [c for c in papers.cells("feddpc/table2") if runs[0].folder.name == c.name]
    for run in runs:
        assert run.config["data"]["validation"] == 0.1
        assert run.config["rounds"] == (100 if more else 400)
        assert run.config["data"]["partition"]["alpha"] == 0.2
        assert run.config["clients"] == whole.config["clients"]


def test_how_much_is_held_out_can_be_set(tmp_path, capsys):
    cell = "fedrds/table3 --dataset mnist --only FedRDS"
    assert written(tmp_path, f"{cell} --set data.validation=0.2") == 0
    sweep = grid.load(capsys.readouterr().out.split()[-1])
    assert {r.config["data"]["validation"] for r in grid.runs(sweep, tmp_path)} == {0.2}
    assert sweep.vary == {"algorithm.sigma0": [0.001, 0.01, 0.1, 1.0]}


def test_a_paper_without_a_grid_is_refused(tmp_path, capsys):
    assert written(tmp_path / "none", "fedabc/table1 --only FedPer") == 2
    assert "states no grid" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_table_of_costs_has_the_papers_notation_beside_what_the_methods_declare(capsys):
    assert main(["reproduce", "FedDPC/table1"]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in said.splitlines() if line}
    assert lines["FedDPC"] == "O(2d + mnd + md) O(4k'd + d) 1 |w| |w| w, delta -"
    assert lines["FedGA"] == "O(4d + mnd + md) O(2k'd) 2 2|w| 2|w| w, g, asked x, g"
    assert len([name for name in lines if name.startswith("Fed")]) == 7

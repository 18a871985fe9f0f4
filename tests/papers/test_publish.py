"""The pages of configs/papers, and what they are written from."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import publish
import pytest
from publish import OrderVerdict, verdict

from fednet import papers
from fednet.papers.results import reproduction
from fednet.report.read import open_run
from tests.report import fake_run

HERE = Path(__file__).parents[2] / "configs" / "papers"


def rows(column: str = "alpha=1", **methods: tuple[float | None, list[float | None]]) -> Any:
    """By method: the paper's figure, and ours by seed."""
    return [
        {
            **dict.fromkeys(reproduction.FIXED),
            "table": "paper/table",
            "in_paper": "yes",
            "method": name,
            "dataset": "D",
            "heterogeneity": column,
            "seed": seed,
            "status": "done",
            "measure": "final_accuracy",
            "paper": paper,
            "ours": value,
        }
        for name, (paper, values) in methods.items()
        for seed, value in enumerate(values)
    ]


def test_a_pair_is_decided_where_its_differences_by_seed_stay_off_zero():
    # A less B: 5, 5, 4; its interval is 4.67 +- 1.43 (t = 4.30). A less C: -10, 11, 2, around 0.
    made = rows(A=(60.0, [50.0, 51.0, 52.0]), B=(55.0, [45.0, 46.0, 48.0]), C=(50.0, [60, 40, 50]))
    assert verdict(made) == OrderVerdict(agree=1, against=0, pairs=3)
    assert verdict(made[:6]).word == "held"


def test_a_pair_of_which_a_seed_never_got_to_the_target_is_not_decided_by_the_others():
    made = rows(A=(60.0, [10.0, 11.0, None]), B=(90.0, [20.0, 21.0, 22.0]))
    for r in made:
        r["measure"] = "rounds_to_target"
    assert verdict(made) == OrderVerdict(pairs=1)
    made[2]["ours"] = 12.0
    assert verdict(made) == OrderVerdict(agree=1, pairs=1)


def test_as_many_decided_pairs_as_chance_decides_decide_nothing():
    # One or more of three by chance: 1 - 0.95**3 = 14 %; two or more: 0.7 %.
    assert OrderVerdict(agree=1, pairs=3).word == "open"
    assert OrderVerdict(agree=2, pairs=3).word == "held"
    # Of sixteen: two or more 19 %, three or more 4 %.
    assert OrderVerdict(against=2, pairs=16).word == "open"
    assert OrderVerdict(against=3, pairs=16).word == "did not hold"


def test_pairs_of_one_seed_are_not_among_those_that_seeds_decide():
    made = rows(A=(60.0, [50.0, 51.0]), B=(55.0, [45.0, 46.1]), C=(50.0, [40.0]))
    assert verdict(made) == OrderVerdict(agree=1, pairs=1, single=2)
    assert verdict(made).said("mini", [0, 1]) == (
        "mini scale, 2 seeds: 1 of 1 pairs decided, 1 of them in the printed order, beside 2 of one"
        " seed"
    )


def test_a_paper_whose_own_method_is_in_no_pair_is_said_to_be_without_it():
    made = rows(A=(60.0, [50.0]), Paper=(70.0, [51.0]), B=(55.0, [45.0]))
    made[1]["changed"] = "algorithm.sigma_mode=scaled"
    assert verdict(made) == OrderVerdict(single=1, without="Paper")
    assert verdict(made).said("mini", [0]).endswith("; Paper, run with other settings, is in none")


def test_what_stands_against_the_printed_order_does_not_hold():
    against = rows(A=(55.0, [50.0, 51.0, 52.0]), B=(60.0, [45.0, 46.0, 48.0]))
    assert verdict(against) == OrderVerdict(agree=0, against=1, pairs=1)
    assert verdict(against).word == "did not hold"
    many = OrderVerdict(agree=3, against=1, pairs=9)
    assert many.word == "held in part"
    assert many.said("full", [0, 1]) == (
        "full scale, 2 seeds: 4 of 9 pairs decided, 3 of them in the printed order"
    )


@pytest.mark.parametrize(
    "made",
    [
        rows(A=(60.0, [50.0]), B=(55.0, [10.0])),  # one seed
        rows(A=(60.0, [50.0, 50.0]), B=(60.0, [10.0, 10.0])),  # printed as equal
        rows(A=(60.0, [None, None]), B=(55.0, [10.0, 10.0])),  # never got there
    ],
)
def test_what_decides_nothing_is_open(made):
    assert verdict(made).word == "open"


def test_where_a_column_has_one_method_columns_are_compared():
    made = [*rows("C=0", A=(316.0, [300.0, 310.0])), *rows("C=1", A=(70.0, [60.0, 75.0]))]
    assert verdict(made) == OrderVerdict(agree=1, against=0, pairs=1)


@pytest.mark.parametrize(
    ("name", "page"), [("README.md", publish.gallery_page), ("FIELD.md", publish.field_page)]
)
def test_the_pages_are_those_of_the_recorded_results(name, page):
    assert (HERE / name).read_text(encoding="utf-8") == page(HERE)


@pytest.mark.long
def test_the_tables_and_pictures_are_those_of_the_recorded_results(tmp_path):
    again = Path(shutil.copytree(HERE, tmp_path / "papers"))
    own = f"Matplotlib v{matplotlib.__version__},"  # another places a letter otherwise
    drawn = [p for p in (again / "results").glob("*.svg") if own in p.read_text(encoding="utf-8")]
    for picture in drawn:
        picture.unlink()
    publish.write(again)
    assert (again / "RESULTS.md").read_bytes() == (HERE / "RESULTS.md").read_bytes()
    others = [p.name for p in drawn if p.read_bytes() != (HERE / "results" / p.name).read_bytes()]
    assert others == []


def test_every_table_is_on_the_page_run_or_not():
    text = publish.gallery_page(HERE)
    assert all(f"[{t}]" in text or f"`fednet reproduce {t}`" in text for t in papers.with_results())


def test_figures_of_several_sources_stand_under_one_another():
    lines = [
        line
        for line in publish.field_page(HERE).splitlines()
        if "MNIST 10 parties beta=0.5" in line
    ]
    flower = "| MNIST 10 parties beta=0.5 | Flower | 98.89 | 99.02 | 99.07 | 98.03 |"
    assert any(line.startswith(flower) for line in lines)
    assert any("FedBench" in line and "| 61.99 |" in line for line in lines)


# -- the compact results ---------------------------------------------------------------------------
def test_a_run_cut_short_has_a_row_of_its_own_and_leaves_its_cell_to_be_run(tmp_path):
    accuracy = [0.1, 0.4, 0.3, 0.5, 0.5]
    made, whole = (
        open_run(fake_run.write(tmp_path / name, rounds=len(curve), accuracy=curve))
        for name, curve in (("a", accuracy[:3]), ("b", accuracy))
    )
    cells = {c.method: c for c in papers.cells("feddc/table1") if c.variant == "E1"}
    rows = [
        reproduction.row(cells["FedDC"], 0, "full", made, changed="rounds=3"),
        reproduction.row(cells["FedAvg"], 0, "full", whole),
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "feddc-table1.csv").write_text(reproduction.as_csv(rows))
    text = publish.write(tmp_path).read_text()
    assert "| feddc/table1 | 30 | 1 |  |" in text
    assert "| FedDC [rounds=3] |" in text
    assert "| FedDC |" not in text


ROW = dict.fromkeys(reproduction.FIXED) | {
    "method": "A",
    "dataset": "D",
    "heterogeneity": "h",
    "seed": 0,
    "status": "done",
    "ours": 1,
}


def test_rows_at_other_settings_than_the_papers_are_not_kept(tmp_path):
    kept = {0: None, 1: "rounds=2", 2: "train.lr=1", 3: "rounds=2, train.lr=1"}
    rows = [{**ROW, "seed": seed, "changed": changed} for seed, changed in kept.items()]
    reproduction.merge(tmp_path / "feddpc-table2.csv", rows, reproduction.FIXED)
    points = [dict.fromkeys(reproduction.CURVE) | {**curve_of(r), "round": 1} for r in rows]
    reproduction.merge(tmp_path / "feddpc-table2-curves.csv", points, reproduction.CURVE)
    publish.keep("feddpc/table2", "full", tmp_path, tmp_path / "kept")
    for name in ("feddpc-table2.csv", "feddpc-table2-curves.csv"):
        found = reproduction.read_csv(tmp_path / "kept" / "results" / name)
        assert [r["seed"] for r in found] == [0, 1], name


def curve_of(row):
    return {k: row[k] for k in ("method", "dataset", "heterogeneity", "seed")}


def test_what_a_search_tried_is_kept_beside_what_earlier_searches_did(tmp_path):
    reproduction.merge(tmp_path / "feddpc-table2.csv", [ROW], reproduction.FIXED)
    tried = tmp_path / "feddpc-table2-chosen.json"
    for cell in ("a", "b"):
        tried.write_text(json.dumps({cell: {"chosen": {"train.lr": 1}}}))
        publish.keep("feddpc/table2", "full", tmp_path, tmp_path / "kept")
    found = json.loads((tmp_path / "kept" / "results" / tried.name).read_text())
    assert sorted(found) == ["a", "b"]


def test_a_table_that_was_not_written_is_named_with_the_command_that_writes_it(tmp_path, capsys):
    assert publish.main(["--from", str(tmp_path), "feddpc/table2"]) == 2
    assert "fednet reproduce feddpc/table2 --scale full" in capsys.readouterr().err


def test_remarks_are_of_tables_and_at_most_ten_lines_each():
    notes = publish.remarks(HERE)
    tables = {*papers.with_results(), *papers.no_runs()}
    assert set(notes) <= tables | {"preface", "field", "elsewhere"}
    lines = {k: text.strip().splitlines() for k, text in notes.items() if k != "elsewhere"}
    assert {k: len(ls) for k, ls in lines.items() if len(ls) > 10} == {}
    assert [line for ls in lines.values() for line in ls if len(line) > 140] == []


def test_a_long_curve_is_thinned_to_its_first_its_last_and_even_steps_between():
    rows = [
        {
            "method": "A",
            "dataset": "D",
            "heterogeneity": "h",
            "variant": None,
            "seed": 0,
            "round": t,
        }
        for t in range(1, 401)
    ]
    rounds = [r["round"] for r in publish.thinned(rows)]
    assert (len(rounds), rounds[0], rounds[-1]) == (100, 1, 400)
    assert {b - a for a, b in itertools.pairwise(rounds)} == {4, 5}

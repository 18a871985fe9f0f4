"""The pages of configs/papers, and what they are written from."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib
import order
import publish
import pytest
from order import OrderVerdict, verdict

from fednet import papers
from fednet.papers import rendering, results
from tests.papers.rows import rows

HERE = Path(__file__).parents[2] / "configs" / "papers"


def test_a_pair_is_significant_where_its_differences_by_seed_exclude_zero():
    # A less B: 5, 5, 4; its interval is 4.67 +- 1.43 (t = 4.30). A less C: -10, 11, 2, around 0.
    made = rows(A=(60.0, [50.0, 51.0, 52.0]), B=(55.0, [45.0, 46.0, 48.0]), C=(50.0, [60, 40, 50]))
    assert verdict(made) == OrderVerdict(agree=1, against=0, pairs=3)
    assert verdict(made[:6]).word == "confirmed"


def test_a_pair_of_which_a_seed_never_got_to_the_target_is_not_significant_by_the_others():
    made = rows("rounds_to_target", A=(60.0, [10.0, 11.0, None]), B=(90.0, [20.0, 21.0, 22.0]))
    assert verdict(made) == OrderVerdict(pairs=1)
    made[2]["ours"] = 12.0
    assert verdict(made) == OrderVerdict(agree=1, pairs=1)


def test_as_many_significant_pairs_as_chance_gives_are_inconclusive():
    # One or more of three by chance: 1 - 0.95**3 = 14 %; two or more: 0.7 %.
    assert OrderVerdict(agree=1, pairs=3).word == "inconclusive"
    assert OrderVerdict(agree=2, pairs=3).word == "confirmed"
    # Of sixteen: two or more 19 %, three or more 4 %.
    assert OrderVerdict(against=2, pairs=16).word == "inconclusive"
    assert OrderVerdict(against=3, pairs=16).word == "not confirmed"


def test_what_contradicts_the_printed_order_is_not_confirmed():
    against = rows(A=(55.0, [50.0, 51.0, 52.0]), B=(60.0, [45.0, 46.0, 48.0]))
    assert verdict(against) == OrderVerdict(agree=0, against=1, pairs=1)
    assert verdict(against).word == "not confirmed"
    many = OrderVerdict(agree=3, against=1, pairs=9)
    assert many.word == "partly confirmed"
    assert many.said("full", [0, 1]) == (
        "full scale, 2 seeds: 4 of 9 pairs significant, 3 of them in the printed order"
    )


# -- the order of methods --------------------------------------------------------------------------
def column(made):
    (methods,) = rendering.grouped(made).values()
    return methods


@pytest.mark.parametrize(
    ("made", "found"),
    [
        # A > C, A > D, B > C, B > D as printed, A > B not; C and D are printed as equal.
        (rows(A=(60.0, [50]), B=(55.0, [52]), C=(50.0, [40]), D=(50.0, [45])), (4, 5, False)),
        # The paper's best was not run.
        (rows(A=(60.0, [None]), B=(55.0, [52.0]), C=(50.0, [40.0])), (1, 1, None)),
        # B at the table's own values is behind A; as its search chose it would be before it.
        (rows(A=(50.0, [50]), B=(45.0, [40]), **{"B [lr 1]": (45.0, [60])}), (1, 1, True)),
        (rows(A=(50.0, [50.0]), **{"B [lr 1]": (45.0, [60.0])}), (0, 1, False)),
    ],
)  # fmt: skip
def test_the_order_of_methods_is_compared_pair_by_pair(made, found):
    assert order.order(column(made)) == found


def test_less_is_better_for_rounds_to_a_target_and_who_never_gets_there_is_behind_all_who_do():
    never = {"A": (40.0, [30.0, None]), "B": (60.0, [None, None]), "C": (80.0, [90.0])}
    made = rows("rounds_to_target", **never)
    # A and B are before C in the paper; half of A's seeds never got there, as all of B's
    assert order.order(column(made)) == (0, 2, False)
    # two of A's three did
    assert order.order(column([*made, {**made[0], "seed": 2}])) == (2, 3, True)


def test_the_own_methods_lead_is_taken_seed_by_seed():
    """Two seeds that differ by 20 points, and a lead of 2 and 4 in both: 3 on average, with a
    deviation of 1.41.
    """
    methods = {
        "Paper": (50.0, [52.0, 34.0]),
        "FedAvg": (49.0, [50.0, 30.0]),
        "Late": (48.0, [10.0]),
    }
    made = rows(**methods)
    lead = (
        "Paper's lead seed by seed (mean ± standard deviation, seeds): less FedAvg +3.00 ± 1.41 (2)"
    )
    assert order.paired(column(made)) == lead
    assert next(order.notes(made)) == f"D alpha=1: {lead}."
    assert not order.paired(column(rows("rounds_to_target", **methods)))


# -- the pages -------------------------------------------------------------------------------------
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


# -- the compact results ---------------------------------------------------------------------------
ROW = dict.fromkeys(results.FIXED) | {
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
    results.merge(tmp_path / "feddpc-table2.csv", rows, results.FIXED)
    own = ("method", "dataset", "heterogeneity", "seed")
    points = [dict.fromkeys(results.CURVE) | {k: r[k] for k in own} | {"round": 1} for r in rows]
    results.merge(tmp_path / "feddpc-table2-curves.csv", points, results.CURVE)
    publish.keep("feddpc/table2", "full", tmp_path, tmp_path / "kept")
    for name in ("feddpc-table2.csv", "feddpc-table2-curves.csv"):
        found = results.read_csv(tmp_path / "kept" / "results" / name)
        assert [r["seed"] for r in found] == [0, 1], name


def test_remarks_are_of_tables_and_at_most_ten_lines_each():
    notes = publish.remarks(HERE)
    tables = {*papers.with_results(), *papers.no_runs()}
    assert set(notes) <= tables | {"preface", "field", "elsewhere"}
    lines = {k: text.strip().splitlines() for k, text in notes.items() if k != "elsewhere"}
    assert {k: len(ls) for k, ls in lines.items() if len(ls) > 10} == {}
    assert [line for ls in lines.values() for line in ls if len(line) > 140] == []

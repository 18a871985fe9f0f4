"""The pages of configs/papers, and what they are written from."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib
import order
import publish
import pytest
import yaml
from order import Counts, counted

from fednet import papers
from fednet.cli import reproduce as verb
from fednet.cli.common import Parser
from fednet.papers import job as jobs
from fednet.papers import rendering, results
from tests.papers.rows import rows

HERE = Path(__file__).parents[2] / "configs" / "papers"


def asked(words):
    """What `fednet reproduce` makes of a command line."""
    parser = Parser()
    verb.add(parser)
    return parser.parse_args(words)


# -- differences -----------------------------------------------------------------------------------
def test_a_pair_is_significant_where_its_differences_by_seed_exclude_zero():
    # A less B: 5, 5, 4; its interval is 4.67 +- 1.43 (t = 4.30). A less C: -10, 11, 2, around 0.
    made = rows(A=(60.0, [50.0, 51.0, 52.0]), B=(55.0, [45.0, 46.0, 48.0]), C=(50.0, [60, 40, 50]))
    assert counted(made) == (Counts(agree=1, pairs=3), Counts())
    against = rows(A=(55.0, [50.0, 51.0, 52.0]), B=(60.0, [45.0, 46.0, 48.0]))
    assert counted(against) == (Counts(against=1, pairs=1), Counts())


def test_a_pair_of_which_a_seed_never_got_to_the_target_is_not_significant_by_the_others():
    made = rows("rounds_to_target", A=(60.0, [10.0, 11.0, None]), B=(90.0, [20.0, 21.0, 22.0]))
    assert counted(made) == (Counts(pairs=1), Counts())
    made[2]["ours"] = 12.0
    assert counted(made) == (Counts(agree=1, pairs=1), Counts())


def test_pairs_of_baselines_are_counted_apart_from_those_of_the_papers_own_method():
    """The method `Paper` of the paper `paper`, ahead of A as printed and not of B; B is ahead of A
    against the print, and equals are no pair.
    """
    made = rows(
        Paper=(60.0, [50.0, 51.0, 52.0]),
        A=(55.0, [45.0, 46.0, 47.1]),
        B=(54.0, [50.0, 52.0, 51.0]),
        C=(60.0, [1.0, 2.0, 3.0]),
    )
    own, others = counted(made[:9])
    assert own == Counts(agree=1, pairs=2)
    assert others == Counts(against=1, pairs=1)
    assert counted([*made[:3], *made[9:]]) == (Counts(), Counts())


def test_what_the_own_method_has_with_other_settings_alone_is_in_no_pair():
    made = rows(Paper=(60.0, [50.0, 51.0]), A=(55.0, [45.0, 46.1]), B=(54.0, [40.0, 41.0]))
    for row in made[:2]:
        row["changed"] = "wire.up.delta=[sign]"
    own, others = counted(made)
    assert (own.pairs, others.pairs) == (0, 1)


@pytest.mark.parametrize(
    ("counts", "word"),
    [
        # One or more of three by chance: 1 - 0.95**3 = 14 %; two or more: 0.7 %.
        (Counts(agree=1, pairs=3), "inconclusive"),
        (Counts(agree=2, pairs=3), "partly confirmed"),
        (Counts(agree=3, pairs=3), "confirmed"),
        # Of sixteen: two or more 19 %, three or more 4 %.
        (Counts(against=2, pairs=16), "inconclusive"),
        (Counts(against=3, pairs=16), "not confirmed"),
        (Counts(agree=3, against=1, pairs=9), "partly confirmed"),
        (Counts(agree=2, against=2, pairs=4), "not confirmed"),
        (Counts(single=9), "inconclusive"),
    ],
)
def test_a_claim_is_confirmed_where_all_its_differences_are_significant_as_printed(counts, word):
    assert counts.word == word


def test_the_deeper_network_gains_more_only_if_it_does_seed_by_seed():
    """FedDC leads with both networks; with the deeper one it has 13, 12 and 14 points less."""
    made = [
        {**r, "variant": variant}
        for variant, ours in (("CNN", [36.0, 37.0, 38.0]), ("VGG-11", [23.0, 25.0, 24.0]))
        for r in rows(FedDC=(50.0, ours), FedAvg=(40.0, [o - 3 for o in ours]))
    ]
    contrast = {"what": "deeper", "more": [["FedDC", "VGG-11"]], "less": [["FedDC", "CNN"]]}
    counts, texts, used = order.contrasted(made, [contrast])
    assert counts == Counts(against=1, pairs=1)
    assert texts == ["deeper -13.0 ± 1.0"]
    assert len(used) == 6
    each = {"what": "lead", "more": [["FedDC"]], "less": [["FedAvg"]], "each": ["CNN", "VGG-11"]}
    counts, texts, _ = order.contrasted(made, [each, {**contrast, "aside": True}])
    assert counts == Counts(agree=2, pairs=2)
    assert texts == ["lead +3.0 ± 0.0, +3.0 ± 0.0", "deeper -13.0 ± 1.0"]


# -- the order of methods --------------------------------------------------------------------------
def column(made):
    (methods,) = rendering.group_by_column(made).values()
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


def test_a_figure_counts_the_runs_of_the_table_that_it_shows():
    """Of Table 2's cells Figure 3 shows those on CIFAR-10, Figure 4 those on CIFAR-100."""
    lines = publish._overview(HERE / "results")
    cells = {line.split("|")[1].strip(): line.split("|")[2:5] for line in lines}
    table, figure, other = (cells[f"feddpc/{t}"] for t in ("table2", "figure3", "figure4"))
    assert table[1].strip() == figure[1].strip() == "12"
    assert other[1].strip() == ""
    assert cells["fedrds/figure4"][1:] == cells["fedrds/table3"][1:]
    for name, missing in (("feddpc/figure4", "CIFAR-100"), ("fedrds/figure4", "SVHN")):
        assert publish._section(name, HERE / "results", {})[-1] == f"Not run here: {missing}."


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


def test_a_row_at_a_changed_setting_that_rows_yaml_names_is_kept_as_that_row(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "rows.yaml").write_text(
        "feddpc/table2: {A twice: {label: 'reading: twice', of: A, set: train.lr=1}}"
    )
    changed = [
        {**ROW, "seed": s, "paper": 50, "changed": c}
        for s, c in enumerate((None, "train.lr=1", "b=2"))
    ]
    results.merge(tmp_path / "feddpc-table2.csv", changed, results.FIXED)
    point = dict.fromkeys(results.CURVE) | {"method": "A", "round": 1}
    own = ("dataset", "heterogeneity", "seed")
    points = [point | {k: r[k] for k in own} for r in changed]
    results.merge(tmp_path / "feddpc-table2-curves.csv", points, results.CURVE)
    publish.keep("feddpc/table2", "full", tmp_path, kept)
    found = results.read_csv(kept / "results" / "feddpc-table2.csv")
    assert [(r["method"], r["seed"], r["changed"]) for r in found] == [
        ("A", 0, None),
        ("A twice", 1, None),
    ]
    assert [(r["in_paper"], r["paper"]) for r in found] == [(None, 50), ("no", None)]
    found = results.read_csv(kept / "results" / "feddpc-table2-curves.csv")
    assert [(r["method"], r["seed"]) for r in found] == [("A", 0), ("A twice", 1)]


# -- what is said of the results -------------------------------------------------------------------
def test_every_row_that_is_no_method_of_its_table_has_a_label_and_no_other_has():
    """Nor is a label without a row. The readings that fednet can run are configurations."""
    said = publish.labels(HERE)
    for name in papers.with_results():
        methods = {c.method for c in papers.cells(name)}
        found = [
            r for scale in ("full", "mini") for r in publish._rows(name, HERE / "results", scale)
        ]
        beside = {rendering.method_label(r) for r in found} - methods
        labelled = set(said.get(name, {}))
        assert beside <= labelled, name
        assert labelled <= {rendering.method_label(r) for r in found}, name
    kinds = ("printed", "in the paper: ", "reading: ")
    for name, beside in said.items():
        for row in beside.values():
            assert row["label"].startswith(kinds)
            if "set" in row:
                words = [name, "--only", row["of"]]
                words += [w for one in row["set"].split(", ") for w in ("--set", one)]
                words += ["--load", str(HERE / "readings.py")]
                assert jobs.choose(asked(words)).changed == row["set"]


def test_every_contrast_of_a_claim_has_runs():
    claims = yaml.safe_load((HERE / "claims.yaml").read_text(encoding="utf-8"))
    assert list(claims) == list(papers.NAMES)
    for claim in (one for paper in claims.values() for one in paper["claims"]):
        assert claim["table"] in {*papers.with_results(), *papers.no_runs()}
        every = publish._done(claim["table"], HERE / "results") if "ran" not in claim else {}
        for contrast in claim.get("contrasts", []):
            for setting in contrast.get("each", [""]):
                one = {**contrast, "each": [setting]}
                assert any(order.contrasted(rows, [one])[1] for rows in every.values()), one


def test_remarks_are_of_tables_and_at_most_ten_lines_each():
    notes = publish.remarks(HERE)
    tables = {*papers.with_results(), *papers.no_runs()}
    assert set(notes) <= tables | {"preface", "field", "elsewhere"}
    lines = {k: text.strip().splitlines() for k, text in notes.items() if k != "elsewhere"}
    assert {k: len(ls) for k, ls in lines.items() if len(ls) > 10} == {}
    assert [line for ls in lines.values() for line in ls if len(line) > 140] == []

"""`fednet frontier`: chains over seeds, and what no other beats."""

from __future__ import annotations

import csv
import itertools

import pytest

from fednet.cli import frontier as verb
from fednet.cli import main
from fednet.config import from_mapping
from fednet.errors import ConfigError
from fednet.report import frontier
from fednet.report.frontier import Point
from fednet.sweep import chains

CONFIG = """
rounds: 2
clients: 3
participation: 1.0
model: {name: mlp, hidden: [8]}
train: {epochs: 1, batch_size: 8, lr: 0.05}
data: {dataset: synthetic, samples: 60, shape: [12], classes: 3, partition: {scheme: iid}}
evaluate: {clients: none}
report: false
"""


def at(accuracy: float, up: float, down: float = 1.0, label: str = "") -> Point:
    return Point(label, (accuracy,), (up,), (down,), (), 0.0, 0.0)


def test_the_front_is_what_no_other_equals_or_beats_in_both():
    a, b, c, d, e = at(0.5, 1), at(0.6, 2), at(0.55, 3), at(0.6, 4), at(0.7, 9)
    assert frontier.front([e, d, c, b, a], "up") == [a, b, e]
    assert frontier.front([at(0.5, 1), at(0.4, 1)], "up") == [at(0.5, 1)]
    # down counts where both do: 1 + 9 against 2 + 1
    assert frontier.front([at(0.5, 1, 9), b], "both") == [b]


def test_spread_is_the_standard_deviation_over_seeds():
    p = Point("x", (0.4, 0.5, 0.6), (1.0, 2.0, 3.0), (4.0, 4.0, 4.0), (), 0.0, 0.0)
    assert (p.mean, p.sd) == (pytest.approx(0.5), pytest.approx(0.1))
    assert p.cost("up") == 2
    assert p.cost("both") == 6
    assert frontier.axes([p], "up") == ["up"]


def test_one_seed_has_no_spread_in_the_table_and_among_the_numbers(tmp_path):
    """It said ± 0.00, as if several had agreed."""
    three = Point("x", (0.4, 0.5, 0.6), (1.0,) * 3, (4.0,) * 3, (), 0.0, 0.0)
    points = [three, at(0.4, 0.5)]
    assert [row[2] for row in frontier.table(points, "up")] == ["50.00 ± 10.00", "40.00"]
    frontier.write(points, "up", tmp_path / "f.csv")
    assert [r["sd"] for r in csv.DictReader((tmp_path / "f.csv").open())] == ["0.100000", ""]


def test_a_chain_with_alternatives_is_as_many_chains():
    assert verb._chains(["none", "topk(0.01|0.1)+int8", "dgc(0.5,0|1)+topk(0.1)"], "--chains") == {
        "none": [],
        "topk(0.01)+int8": ["topk(0.01)", "int8"],
        "topk(0.1)+int8": ["topk(0.1)", "int8"],
        "dgc(0.5,0)+topk(0.1)": ["dgc(0.5,0)", "topk(0.1)"],
        "dgc(0.5,1)+topk(0.1)": ["dgc(0.5,1)", "topk(0.1)"],
    }
    with pytest.raises(ConfigError, match=r"--chains int8\+topk\(0.1\): .*cannot follow"):
        verb._chains(["int8+topk(0.1)"], "--chains")


def test_a_chain_is_for_all_that_goes_that_way_as_tensors():
    assert verb._kinds(from_mapping({}), "up") == ["state"]
    scaffold = from_mapping({"algorithm": "scaffold"})
    assert verb._kinds(scaffold, "up") == ["control", "delta"]
    assert verb._kinds(scaffold, "down") == ["control", "state"]


def test_seconds_of_a_chain_are_of_messages_that_the_other_end_reads():
    shapes = ((20, 30), (20,))
    for items in ([], ["topk(0.1)", "int8"], ["ef21", "powersgd(1)"]):
        assert all(s > 0 for s in chains.seconds(items, shapes))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--link", "10"], "expected two rates in Mbit/s"),
        (["--chains", "gzip"], "unknown compressor 'gzip'"),
        (["--chains", "delta+topk(0.1)"], "delta is for what comes down"),
        (["--set", "algorithm=fedproto"], "fedproto has no global model"),
        (["--set", "algorithm=fedper"], "fedper has no global model"),
        (["--set", "evaluate.every=0"], "evaluate.every: 0: `fednet frontier` draws"),
        (["--set", "evaluate.global=false"], "evaluate.global: false: `fednet frontier` draws"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_starts(words, says, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(CONFIG)
    line = ["frontier", str(tmp_path / "c.yaml"), "--chains", "none", "--out", str(tmp_path / "o")]
    assert main.main([*line, *words]) == 2
    assert says in capsys.readouterr().err
    assert not list((tmp_path / "o").glob("*/*seed*"))


@pytest.mark.long
def test_a_picture_and_its_numbers_are_resumed_and_stay_the_same(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(CONFIG)
    line = ["frontier", str(tmp_path / "c.yaml"), "--in-process", "--out", str(tmp_path)]
    line += ["--chains", "none", "topk(0.1|0.3)", "--seeds", "0,1", "--link", "8,80"]
    assert main.main(line) == 0
    home = tmp_path / "c-frontier"
    rows = list(csv.DictReader((home / "frontier.csv").open()))
    assert [r["chain"] for r in rows] == ["none", "topk(0.1)", "topk(0.3)"]
    assert [r["seeds"] for r in rows] == ["2"] * 3
    up = {r["chain"]: float(r["mb_up"]) for r in rows}
    assert up["topk(0.1)"] < up["topk(0.3)"] < up["none"]
    # 3 clients, 2 rounds: of 131 weights 39 values and a bitmap of 17 bytes, or 13 and 9 bytes; a
    # header's numbers may take a byte or two less
    more = round(1e6 * (up["topk(0.3)"] - up["topk(0.1)"]))
    assert more == pytest.approx(6 * (4 * 26 + 17 - 9), abs=12)
    assert all(float(r["seconds"]) > 0 for r in rows)
    assert "both" in " ".join(r["front"] for r in rows)
    picture = (home / "frontier.svg").read_bytes()
    before = {p: p.stat().st_mtime_ns for p in home.glob("*seed*/summary.json")}
    assert len(before) == 6
    assert main.main(line) == 0  # all is done: it is drawn again
    assert {p: p.stat().st_mtime_ns for p in home.glob("*seed*/summary.json")} == before
    assert (home / "frontier.svg").read_bytes() == picture
    # a chain more is two cells more
    assert main.main([*line[:5], *line[5:6], "int8", *line[6:]]) == 0
    found = list(csv.DictReader((home / "frontier.csv").open()))
    assert len(list(home.glob("*seed*/summary.json"))) == 8
    pairs = itertools.product(rows, found)
    same = [a["accuracy"] == b["accuracy"] for a, b in pairs if a["chain"] == b["chain"]]
    assert same == [True] * 3

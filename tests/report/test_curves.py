from __future__ import annotations

import csv

import matplotlib.figure
import pytest

from fednet.errors import ConfigError
from fednet.report import curves, metrics
from fednet.report.groups import group
from tests.report.fake_run import opened


@pytest.fixture
def run(tmp_path):
    return opened(tmp_path / "a", rounds=4, clients=4)


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("rounds", [(2,), (1, 2, 3, 4)])
def test_a_loss_that_is_not_finite_is_left_out_of_the_axis(run, tmp_path, bad, rounds):
    for r in run.rounds:
        if r.round in rounds:
            r.train_loss = bad
    curves.figure([run], tmp_path / "f.svg", y="train_loss")
    data = rows(tmp_path / "f.csv")
    assert [float(r["mean"]) for r in data if int(r["round"]) not in rounds] == [
        r.train_loss for r in run.rounds if r.round not in rounds
    ]


def test_a_paper_figure_embeds_truetype_and_states_what_it_shows(tmp_path):
    runs = [
        opened(tmp_path / f"{m}{s}", algorithm=m, seed=s)
        for m in ("fedavg", "scaffold")
        for s in (0, 1)
    ]
    caption = curves.figure(runs, tmp_path / "x.pdf", x="mb", width="86mm")
    pdf = (tmp_path / "x.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    for said in (
        "fedavg, scaffold",
        "Means over seeds 0, 1;",
        "95 % confidence intervals",
        "6 clients",
        "up and down",
        "including protocol overhead",
    ):
        assert said in caption
    assert {r["label"] for r in rows(tmp_path / "x.csv")} == {"fedavg", "scaffold"}


def test_seconds_of_two_clocks_are_not_drawn_on_one_axis(tmp_path):
    real, virtual = (
        opened(tmp_path / clock, rounds=2, link={"clock": clock}) for clock in ("real", "virtual")
    )
    for r in virtual.rounds:
        r.seconds_virtual = 90.0
    with pytest.raises(ConfigError, match="wall clock, simulated time"):
        curves.figure([real, virtual], tmp_path / "x.svg", x="seconds")
    assert "seconds (simulated time)" in curves.figure([virtual], tmp_path / "x.svg", x="seconds")


def test_a_band_is_at_the_rounds_that_all_seeds_evaluated(tmp_path):
    runs = [
        opened(tmp_path / f"s{s}", seed=s, rounds=3, accuracy=a)
        for s, a in enumerate(([0.1, 0.2, 0.3], [0.3, None, 0.5]))
    ]
    made = curves.curve(group(runs)).table[1:]
    assert [row[2] for row in made] == [1, 3]  # the rounds
    assert [row[4] for row in made] == pytest.approx([0.2, 0.4])  # the means


@pytest.mark.parametrize(
    ("band", "low", "high"),
    # of 0.1, 0.2 and 0.6: mean 0.3, sample variance (0.04 + 0.01 + 0.09) / 2 = 0.07
    [
        ("minmax", 0.1, 0.6),
        ("std", 0.3 - 0.07**0.5, 0.3 + 0.07**0.5),
        ("ci", 0.3 - 4.302653 * (0.07 / 3) ** 0.5, 0.3 + 4.302653 * (0.07 / 3) ** 0.5),
    ],
)
def test_a_band_is_what_it_was_asked_to_be_and_the_caption_says_so(tmp_path, band, low, high):
    runs = [
        opened(tmp_path / f"s{s}", seed=s, rounds=1, accuracy=[a])
        for s, a in enumerate((0.1, 0.2, 0.6))
    ]
    said = curves.figure(runs, tmp_path / "x.svg", band=band)
    assert metrics.BANDS[band] in said
    (row,) = csv.reader((tmp_path / "x.csv").read_text().splitlines()[1:])
    assert [float(v) for v in row[4:]] == pytest.approx([0.3, low, high])


def test_the_cost_to_a_target_is_drawn_by_method_and_never_averaged_over_some_seeds(tmp_path):
    accuracies = {"fedavg": ([0.2, 0.8], [0.9, 0.9]), "scaffold": ([0.3, 0.8], [0.3, 0.4])}
    runs = [
        opened(tmp_path / f"{m}{s}", algorithm=m, seed=s, rounds=2, accuracy=list(a))
        for m, pair in accuracies.items()
        for s, a in enumerate(pair)
    ]
    said = curves.figure(runs, tmp_path / "x.svg", y="cost", target=0.8, band="minmax")
    assert said.startswith("Rounds to 0.8 global test accuracy: fedavg, scaffold.")
    assert [tuple(r.values()) for r in rows(tmp_path / "x.csv")] == [
        ("fedavg", "2", "2", "1.5", "1.0", "2.0", "2.0 1.0"),
        ("scaffold", "2", "1", "", "", "", "2.0"),
    ]
    curves.figure(runs, tmp_path / "mb.svg", x="mb", y="cost", target=0.8)
    spent = metrics.to_target(runs[0], 0.8, "mb"), metrics.to_target(runs[1], 0.8, "mb")
    assert float(rows(tmp_path / "mb.csv")[0]["mean"]) == pytest.approx(sum(spent) / 2)
    for wrong in ({"y": "cost"}, {"target": 0.8}):
        with pytest.raises(ConfigError, match="belong together"):
            curves.figure(runs, tmp_path / "y.svg", **wrong)
    with pytest.raises(ConfigError, match="none of the runs reaches"):
        curves.figure(runs, tmp_path / "y.svg", y="cost", target=0.99)


def test_unknown_metrics_and_wrong_widths_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'accuracy'"):
        curves.figure([run], tmp_path / "x.pdf", y="acuracy")
    for width in ("wide", "3.4.5in", "41in", "5mm"):
        with pytest.raises(ConfigError, match=r"expected a length such as 3\.4in"):
            curves.figure([run], tmp_path / "x.pdf", width=width)


def interrupted(self, target, **_):
    """Half of a drawing, where the file is written, then Ctrl-C."""
    file = target if hasattr(target, "write") else open(target, "wb")  # noqa: SIM115
    with file:
        file.write(b"half")
        file.flush()
        raise KeyboardInterrupt


def test_a_drawing_that_is_interrupted_leaves_what_was_there(run, tmp_path, monkeypatch):
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", interrupted)
    path = tmp_path / "f" / "a.png"
    path.parent.mkdir()
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        curves.figure([run], path)
    assert [(p.name, p.read_text()) for p in path.parent.iterdir()] == [(path.name, "old")]

from __future__ import annotations

import csv

import matplotlib.figure
import numpy as np
import pytest

from fednet import registry
from fednet.errors import ConfigError
from fednet.files import read_lines
from fednet.report import curves, figures, groups, metrics, style
from fednet.report.groups import group
from fednet.report.read import open_run
from tests.report.fake_run import jsonl, opened, write

EVERY = {
    "bytes",
    "resources",
    "confusion",
    "participation",
    "clients",
    "classes",
    "partition",
    "time",
}


@pytest.fixture
def run(tmp_path):
    return opened(tmp_path / "a", drop={2: {1: "deadline"}}, rounds=4, clients=4)


def axes(figure):
    """The first axes of the figure, drawn."""
    drawn = matplotlib.figure.Figure()
    figure.draw(drawn)
    return drawn.axes[0]


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_every_figure_has_a_sentence_that_says_what_it_shows(run):
    made = list(figures.details(run))
    assert {f.name for f in made} == EVERY
    assert [f.name for f in made if not f.note.endswith(".")] == []


def test_a_kind_of_payload_and_a_part_of_the_time_have_the_same_colour_in_every_report(tmp_path):
    def colours(run):
        found = {}
        for figure in figures.details(run):
            if figure.name in ("bytes", "time", "participation"):
                legend = axes(figure).get_legend()
                for text, patch in zip(legend.get_texts(), legend.get_patches()):
                    found[text.get_text()] = patch.get_facecolor()
        return found

    def made(name, drop):
        return opened(tmp_path / name, rounds=2, clients=4, share=1.0, drop={1: drop})

    one = made("a", {0: "lost", 1: "deadline <3 s"})
    other = made("b", {0: "absent", 1: "deadline <3 s", 2: "lost"})
    lines = list(read_lines(other.dir / "wire.jsonl"))
    for line in lines:
        kinds = line["kinds"]
        if "state" in kinds:  # another method: control variates too, and far larger
            line["kinds"] = {"control": 9000, "sketch": 5000, **kinds}
    jsonl(other.dir / "wire.jsonl", lines)
    first, second = colours(one), colours(open_run(other.dir))
    assert {"control", "sketch", "absent"} == set(second) - set(first)
    assert {name: second[name] for name in first} == first
    assert len({first[k] for k in ("state", "statistics", "protocol overhead")}) == 3
    assert len({second[k] for k in ("absent", "deadline <3 s", "lost", "completed")}) == 4


@pytest.mark.parametrize("name", registry.algorithm.names())
def test_the_kinds_of_each_method_have_a_colour_of_their_own(name):
    exchanges = registry.algorithm.get(name).exchanges
    payloads = [p for e in exchanges for p in (e.down, e.up) if p is not None]
    assert {kind for p in payloads for kind in p.kinds()} <= {*style.KINDS}


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


def test_who_was_asked_and_is_not_done_is_not_said_not_to_have_been_asked(tmp_path):
    run = opened(tmp_path / "a", clients=4, rounds=1, share=1.0)
    run.rounds[0].set(completed=[0, 2], dropped={"3": "late"})
    (figure,) = figures.participation(run)
    words = [figure.hover["words"][code] for (code,) in figure.hover["v"]]
    assert words == ["completed", "not finished", "completed", "dropped: late"]


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


def test_a_caption_says_what_the_configuration_has_written_as_words_too(tmp_path):
    # An alpha of a user's own partitioner.
    path = write(
        tmp_path / "a",
        data={"dataset": "digits", "partition": {"scheme": "own", "alpha": "by age"}},
    )
    assert "own alpha=by age" in groups.setting([open_run(path)])


def test_seconds_of_two_clocks_are_not_drawn_on_one_axis(tmp_path):
    real, virtual = (
        opened(tmp_path / clock, rounds=2, link={"clock": clock}) for clock in ("real", "virtual")
    )
    for r in virtual.rounds:
        r.seconds_virtual = 90.0
    with pytest.raises(ConfigError, match="wall clock, simulated time"):
        curves.figure([real, virtual], tmp_path / "x.svg", x="seconds")
    assert "seconds (simulated time)" in curves.figure([virtual], tmp_path / "x.svg", x="seconds")


@pytest.mark.parametrize(("clients", "step"), [(4, 1), (40, 2)])
def test_clients_in_another_order_have_their_ids_at_the_ticks(tmp_path, clients, step):
    run = opened(tmp_path / "a", clients=clients, rounds=2, share=1.0, personalised=True)
    (figure,) = figures.client_accuracy(run)
    order = figure.hover["c"]
    assert order != sorted(order, key=int)
    axis = axes(figure).xaxis
    assert axis.get_ticklocs().tolist() == list(range(0, clients, step))
    assert [t.get_text() for t in axis.get_ticklabels()] == order[::step]


@pytest.mark.parametrize(("name", "rotation"), [("c{}", 0), ("automobile {}", 90)])
def test_the_confusion_matrix_names_the_classes_and_shows_the_samples(tmp_path, name, rotation):
    run = opened(tmp_path / "a", rounds=1)
    names = [name.format(i) for i in range(10)]
    run.partition["names"] = names
    run.summary.confusion["counts"][3][7] = 5  # 5 of the 25 samples of class 3
    (figure,) = figures.confusion(run)
    ax = axes(figure)
    for axis in (ax.xaxis, ax.yaxis):
        assert [t.get_text() for t in axis.get_ticklabels()] == names
    assert {t.get_rotation() for t in ax.get_xticklabels()} == {rotation}
    assert np.asarray(ax.images[0].get_array())[3, [3, 7]].tolist() == [0.8, 0.2]
    cells = {t.get_position(): t.get_text() for t in ax.texts}
    assert cells == {**{(i, i): "20" for i in range(10)}, (7, 3): "5"}
    assert figure.hover["v"][3][7] == 5
    assert (figure.hover["rl"], figure.hover["cl"]) == ("true class", "predicted class")


def test_time_is_split_by_the_clock_of_the_run(tmp_path):
    run = opened(tmp_path / "a", rounds=2, link={"clock": "virtual"})
    for r in run.rounds:
        r.set(seconds_virtual=9.0, seconds_virtual_by_phase={"sending": 4.0, "training": 5.0})
    (figure,) = [f for f in figures.details(run) if f.name == "time"]
    assert figure.title == "Time per round (simulated time)"
    shown = {s["l"]: s["m"] for s in figure.hover["s"]}
    assert shown == {"sending, s": [4, 4], "training, s": [5, 5]}


def test_the_time_of_training_is_shown_by_device_where_there_are_several(tmp_path):
    run = opened(tmp_path / "a", rounds=2, clients=3, share=1.0)
    assert "devices" not in [f.name for f in figures.details(run)]
    lines = list(read_lines(run.dir / "clients.jsonl"))
    for line in lines:  # clients 0 to 2 need 0.5, 0.6 and 0.7 s
        line["device"] = "cuda:0" if line["client"] == 1 else "cpu"
    jsonl(run.dir / "clients.jsonl", lines)
    (figure,) = [f for f in figures.details(open_run(run.dir)) if f.name == "devices"]
    shown = {s["l"]: s["m"] for s in figure.hover["s"]}
    assert shown == {"lab cpu, s": [1.2, 1.2], "lab cuda:0, s": [0.6, 0.6]}
    axes(figure)


def test_who_was_available_is_drawn_where_a_trace_says_it(run):
    assert "availability" not in {f.name for f in figures.details(run)}
    for r in run.rounds:
        r.here = 4 - r.round % 2
    (figure,) = [f for f in figures.details(run) if f.name == "availability"]
    assert axes(figure).lines[0].get_ydata().tolist() == [3, 4, 3, 4]


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


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_bubble_chart_of_a_partition_is_drawn(tmp_path, ending):
    figures.partition_file(np.array([[3, 0], [1, 4]]), None, tmp_path / f"p.{ending}")
    start = (tmp_path / f"p.{ending}").read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if ending == "png" else b"<?xml")

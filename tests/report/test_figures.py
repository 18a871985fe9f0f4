from __future__ import annotations

import matplotlib.figure
import numpy as np
import pytest

from fednet import registry
from fednet.files import read_lines
from fednet.report import canvas, figures, groups, style
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
    first = colours(one)
    second = colours(open_run(other.dir))
    assert {"control", "sketch", "absent"} == set(second) - set(first)
    assert {name: second[name] for name in first} == first
    assert len({first[k] for k in ("state", "statistics", "protocol overhead")}) == 3
    assert len({second[k] for k in ("absent", "deadline <3 s", "lost", "completed")}) == 4


@pytest.mark.parametrize("name", registry.algorithm.names())
def test_the_kinds_of_each_method_have_a_colour_of_their_own(name):
    exchanges = registry.algorithm.get(name).exchanges
    payloads = [p for e in exchanges for p in (e.down, e.up) if p is not None]
    assert {kind for p in payloads for kind in p.kinds()} <= {*style.KINDS}


def test_who_was_asked_and_is_not_done_is_not_said_not_to_have_been_asked(tmp_path):
    run = opened(tmp_path / "a", clients=4, rounds=1, share=1.0)
    run.rounds[0].set(completed=[0, 2], dropped={"3": "late"})
    (figure,) = figures.participation(run)
    words = [figure.hover["words"][code] for (code,) in figure.hover["v"]]
    assert words == ["completed", "not finished", "completed", "dropped: late"]


def test_a_caption_says_what_the_configuration_has_written_as_words_too(tmp_path):
    # An alpha of a user's own partitioner.
    path = write(
        tmp_path / "a",
        data={"dataset": "digits", "partition": {"scheme": "own", "alpha": "by age"}},
    )
    assert "own alpha=by age" in groups.setting([open_run(path)])


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


def test_a_bar_begins_where_the_one_below_it_ends(run):
    for figure in figures.details(run):
        if figure.name not in ("bytes", "time"):
            continue
        tops = {1: 0.0, -1: 0.0}  # upwards and downwards
        for bars, series in zip(axes(figure).patches, figure.hover["s"]):
            sign = -1 if series["l"].endswith("down, MB") else 1
            corners = bars.get_path().vertices.reshape(len(series["x"]), -1, 2)[:, :4]
            y = sign * corners[..., 1]
            ends = np.sort(np.stack([y.min(1), y.max(1)]), axis=0)
            np.testing.assert_allclose(ends[0], tops[sign], atol=1e-12)
            tops[sign] = ends[1]
            np.testing.assert_allclose(ends[1] - ends[0], series["m"], rtol=1e-4)


def test_what_is_as_wide_as_rounds_or_clients_is_stretched_where_a_part_is_enlarged(run):
    moved = '<g clip-path="'  # by the page's script, which stretches paths only
    with canvas.drawing():
        found = {f.name: canvas.inline(f, "a-")[0] for f in figures.details(run)}
    for name in ("bytes", "time", "clients"):
        assert moved not in found[name]


def test_the_steps_of_many_clients_are_the_means_of_neighbours(tmp_path):
    n = 2 * figures.STEPS + 1
    rows = [
        {"round": 1, "client": c, "final": True, "accuracy_global": (n - c) / n} for c in range(n)
    ]
    path = write(tmp_path / "a", rounds=1, clients=2)
    jsonl(path / "clients.jsonl", rows)
    (figure,) = figures.client_accuracy(open_run(path))
    outline = axes(figure).collections[0].get_paths()[0].vertices
    assert len(outline) < 5 * figures.STEPS
    assert (outline[:, 0].min(), outline[:, 0].max()) == (-0.5, n - 0.5)
    x, y = outline.T
    area = abs(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1])) / 2
    assert area == pytest.approx(sum(row["accuracy_global"] for row in rows))


@pytest.mark.parametrize("sizes", [3, 2 * figures.SIZES])
def test_a_circle_is_as_large_as_the_samples_that_it_stands_for(sizes):
    counts = np.arange(1, 81).reshape(20, 4) % (sizes + 1)
    drawn = axes(figures.bubbles(counts, ["a", "b", "c", "d"])).collections
    found = {}
    for circles in drawn:
        places = circles.get_offsets()
        areas = np.broadcast_to(circles.get_sizes(), len(places))
        found |= {tuple(map(int, place)): area for place, area in zip(places, areas)}
    one = max(found.values()) / counts.max()
    assert found == {place: pytest.approx(one * n) for place, n in np.ndenumerate(counts) if n}


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


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_bubble_chart_of_a_partition_is_drawn(tmp_path, ending):
    figures.partition_file(np.array([[3, 0], [1, 4]]), None, tmp_path / f"p.{ending}")
    start = (tmp_path / f"p.{ending}").read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if ending == "png" else b"<?xml")

"""The axes of the page's figures, beside those that matplotlib draws."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from functools import partial

import pytest

from fednet.report import canvas, curves, figures
from fednet.report.canvas import Figure
from fednet.report.groups import group
from tests.report.fake_run import opened

NAMES = ["bytes", "time", "resources", "participation", "availability", "clients", "classes"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = opened(tmp_path_factory.mktemp("axes") / "a", rounds=30, clients=12, personalised=True)
    for r in run.rounds:
        r.here = r.round % 5
    return {f.name: f for f in [*figures.details(run), curves.curve(group([run]), "mb")]}


def on_page(figure):
    with canvas.drawing():
        return ET.fromstring(canvas.inline(figure, "a-")[0])


def by_matplotlib(figure):
    width, height = figure.size
    rows = -(-len(figure.legend) // canvas.columns(figure.legend, width))
    text = io.StringIO()
    with canvas.canvas(figure.size) as fig:
        figure.draw(fig)
        fig.subplots_adjust(
            left=figure.left / width,
            right=1 - figure.right / width,
            bottom=figure.bottom / height,
            top=1 - (canvas.TOP + canvas.LEGEND_ROW * rows) / height,
        )
        fig.savefig(text, format="svg")
    return ET.fromstring(text.getvalue())


def texts(svg):
    """(text, size, anchor, x, y) of all texts."""
    found = []
    for e in svg.iter():
        if e.tag.endswith("text"):
            css = e.get("style")
            size = float(re.search(r"font(?:-size)?: ([\d.]+)px", css)[1])
            anchor = e.get("text-anchor") or re.search(r"text-anchor: (\w+)|$", css)[1]
            found.append((e.text, size, anchor, float(e.get("x")), float(e.get("y"))))
    return sorted(found)


@pytest.mark.parametrize("name", [*NAMES, "confusion", "partition", "accuracy_mb"])
def test_ticks_and_labels_have_the_places_that_matplotlib_gives_them(made, name):
    theirs = texts(by_matplotlib(made[name]))
    ours = texts(on_page(made[name]))
    assert [t[:3] for t in ours] == [t[:3] for t in theirs]
    for (text, *_, x, y), (*_, x0, y0) in zip(ours, theirs):
        # Where a label is depends on the width of the names beside it, which is not measured.
        apart = 5 if text[0].isalpha() else 0.1
        assert (x, y) == (pytest.approx(x0, abs=apart), pytest.approx(y0, abs=apart)), text


def paths(svg, of):
    (group,) = [e for e in svg.iter("g") if e.get("class") == of]
    grid, marks, *_ = group.iter("path")
    return grid.get("d"), marks.get("d")


def plotted(fig, x, y, **settings):
    ax = fig.add_subplot()
    ax.plot(x, y)
    ax.set(**settings)


def test_lines_of_the_grid_go_through_the_ticks_from_end_to_end_of_the_axes():
    figure = Figure("a", "A", "A.", partial(plotted, x=[0, 8], y=[0, 8], xlim=(0, 8), ylim=(0, 8)))
    svg = on_page(figure)
    left, right = 72 * canvas.LEFT, 72 * (4.5 - canvas.RIGHT)
    top, bottom = 72 * canvas.TOP, 72 * (3.1 - canvas.BOTTOM)
    grid, marks = paths(svg, "xtick")
    across = [left + (right - left) * v / 8 for v in range(9)]
    numbers = [[float(v) for v in re.findall(r"[\d.]+", path)] for path in (grid, marks)]
    assert numbers[0] == pytest.approx([v for x in across for v in (x, bottom, top)], abs=0.01)
    assert numbers[1] == pytest.approx([v for x in across for v in (x, bottom, 3.5)], abs=0.01)
    grid, _ = paths(svg, "ytick")
    up = [bottom - (bottom - top) * v / 8 for v in range(9)]
    numbers = [float(v) for v in re.findall(r"[\d.]+", grid)]
    assert numbers == pytest.approx([v for y in up for v in (left, y, right)], abs=0.01)


def test_what_all_numbers_of_an_axis_are_multiplied_by_is_above_it():
    figure = Figure("a", "A", "A.", partial(plotted, x=[0, 1], y=[0, 3e9]))
    (found,) = [t for t in texts(on_page(figure)) if t[0] == "1e9"]
    assert found[3:] == (pytest.approx(72 * canvas.LEFT, abs=0.01), 72 * canvas.TOP - 4)


def test_long_names_of_classes_read_upwards_below_the_axes(tmp_path):
    run = opened(tmp_path / "a", rounds=1)
    names = [f"automobile {i}" for i in range(10)]
    run.partition["names"] = names
    (figure,) = figures.confusion(run)
    turned = [e for e in on_page(figure).iter("text") if e.get("transform") and e.text in names]
    assert [e.text for e in turned] == names
    assert {e.get("text-anchor") for e in turned} == {"end"}
    assert all(float(e.get("y")) > 72 * (figure.size[1] - figure.bottom) for e in turned)
    places = [float(e.get("x")) for e in turned]
    assert places == sorted(places)


def test_a_name_with_what_nobody_sees_shows_it_as_an_escape():
    figure = Figure("a", "A", "A.", partial(plotted, x=[0, 1], y=[0, 1], xlabel="a\x01b\u202ec"))
    assert "a\\x01b\\u202ec" in [t[0] for t in texts(on_page(figure))]

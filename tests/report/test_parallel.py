from __future__ import annotations

import os
import pickle
import signal
import threading
from functools import partial

import pytest

from fednet.errors import StateError
from fednet.report import curves, figures, page, parallel
from fednet.report.canvas import Figure
from fednet.report.groups import group
from tests.report import test_condensed
from tests.report.fake_run import opened


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: request.param)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test's process may have more
    return request.param


def plot(fig, text):
    fig.add_subplot().set(xlabel=text())


def figure(text, *arguments):
    """A figure with a text that is made where it is drawn."""
    return Figure("figure", "A title", "A note.", partial(plot, text=partial(text, *arguments)))


def drawn(*asked):
    with parallel.drawings() as draw:
        return [found() for found in [draw(figure) for figure in asked]]


def process():
    return f"process {os.getpid()}"


def refuse():
    raise ZeroDivisionError("no figure")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_page_is_the_same_by_one_process_and_by_several(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    run = opened(tmp_path / "a", rounds=3)
    pages = []
    for cores in (1, 2, 3):
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        pages.append(page.render([run]))
    assert pages[0] == pages[1] == pages[2]


def test_every_figure_of_a_page_can_be_sent_to_another_process(tmp_path):
    run = opened(tmp_path / "a", rounds=3, personalised=True)
    test_condensed.save(run.dir, [test_condensed.RAMP] * 3, c5=([test_condensed.RAMP], [0]))
    for r in run.rounds:
        r.here = 3
    made = [*figures.details(run), curves.curve(group([run]))]
    assert {"availability", "condensed"} < {f.name for f in made}
    for f in made:
        assert len(pickle.dumps(f)) < 1e5, f.name  # without the run's rows


def test_drawings_are_those_of_their_figures(cores):
    found = drawn(*(figure("figure {}".format, k) for k in range(7)))
    for k, (svg,) in enumerate(found):
        assert f">figure {k}<" in svg


def test_other_processes_draw_only_where_there_are_cores_for_them(cores):
    found = drawn(*[figure(process)] * 3)
    here = [f">{process()}<" in svg for (svg,) in found]
    assert here == [cores == 1] * 3


def test_a_process_with_threads_is_not_copied(monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 3)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert all(f">{process()}<" in svg for (svg,) in drawn(*[figure(process)] * 3))


def test_the_error_of_a_figure_is_met_where_it_is_waited_for(cores):
    with pytest.raises(ZeroDivisionError, match="no figure"):
        drawn(figure(str), figure(refuse), figure(str))


def test_a_process_that_is_killed_while_it_draws_is_named(monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(StateError, match="was killed"):
        drawn(figure(str), figure(end))


def test_a_page_may_have_no_figures(cores):
    assert drawn() == []

from __future__ import annotations

import os
import signal
import threading

import pytest

from fednet.errors import StateError
from fednet.report import page, parallel
from fednet.report.canvas import Figure, drawing
from tests.report.fake_run import opened


@pytest.fixture(params=[1, 3])
def cores(request, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: request.param)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test's process may have more
    return request.param


def figure(what):
    return Figure(
        "figure", "A title", "A note.", lambda fig: fig.add_subplot().set(xlabel=str(what()))
    )


def drawn(*figures):
    with drawing(), parallel.drawings(figures) as found:
        return list(found)


def refuse():
    raise ZeroDivisionError("no figure")


def test_a_page_is_the_same_by_one_process_and_by_several(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    run = opened(tmp_path / "a", rounds=3)
    pages = []
    for cores in (1, 3):
        monkeypatch.setattr(parallel, "cores", lambda cores=cores: cores)
        pages.append(page.render([run]))
    assert pages[0] == pages[1]


def test_drawings_come_in_the_order_of_their_figures(cores):
    found = drawn(*(figure(lambda k=k: f"figure {k}") for k in range(7)))
    for k, (svg,) in enumerate(found):
        assert f">figure {k}<" in svg


def test_several_processes_draw_only_where_there_are_cores_for_them(cores):
    found = drawn(*[figure(lambda: f"process {os.getpid()}")] * 3)
    here = [f">process {os.getpid()}<" in svg for (svg,) in found]
    assert here == [cores == 1] * 3


def test_a_process_with_threads_is_not_copied(monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 3)
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    found = drawn(*[figure(lambda: f"process {os.getpid()}")] * 3)
    assert all(f">process {os.getpid()}<" in svg for (svg,) in found)


def test_the_error_of_a_figure_is_met_where_it_is_read(cores):
    with pytest.raises(ZeroDivisionError, match="no figure"):
        drawn(figure(str), figure(refuse), figure(str))


def test_a_process_that_is_killed_while_it_draws_is_named(monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(StateError, match="was killed"):
        drawn(figure(str), figure(lambda: os.kill(os.getpid(), signal.SIGKILL)))


def test_a_page_without_figures_is_drawn_by_this_process(cores):
    assert drawn() == []

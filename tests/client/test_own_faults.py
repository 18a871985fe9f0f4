"""What a user's own part may raise, and how long it may take: none of it stalls a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from fednet.algorithms.fedavg import FedAvg
from fednet.errors import without_paths
from fednet.server.watch import TOGETHER_S, third_press_kills
from fednet.wire import messages as m
from tests.chaos.mallory import Liar
from tests.chaos.test_hostile_server import (
    exp,  # noqa: F401  # a fixture
    site,
    task,
    told,
)
from tests.processes import Processes, until


@contextlib.contextmanager
def asked(exp, tmp_path):  # noqa: F811
    """A server whose client is ready, and has been sent its first task."""
    server = Liar(told())
    with site(server, tmp_path):
        server.listen(lambda: server.said(m.Ready))
        server.say(*task(exp, m.Key(1, 0, 0, 0)))
        yield server


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_a_method_that_exits_fails_its_task_and_the_thread_goes_on(
    tmp_path,
    monkeypatch,
    exp,  # noqa: F811
    raised,
):
    honest, left = FedAvg.client_update, [1]

    def local(self, *args):
        if left:
            left.pop()
            raise raised("enough")
        return honest(self, *args)

    monkeypatch.setattr(FedAvg, "client_update", local)
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Failed))
        assert server.said(m.Failed)[0].reason == f"{raised.__name__}: enough"
        server.say(*task(exp, m.Key(1, 0, 1, 0)))
        server.listen(lambda: server.said(m.Reply))


def test_what_a_method_forked_ends_where_it_comes_back_and_the_task_is_done_once(
    tmp_path,
    monkeypatch,
    exp,  # noqa: F811
):
    honest, statuses = FedAvg.client_update, []

    def local(self, *args):
        if not (child := os.fork()):
            raise SystemExit
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return honest(self, *args)

    monkeypatch.setattr(FedAvg, "client_update", local)
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Reply))
    assert statuses == [1]
    assert not server.said(m.Failed)


def test_what_a_site_says_of_a_failure_names_no_file_of_its_own(tmp_path, monkeypatch, exp):  # noqa: F811
    def local(self, *args):
        raise ValueError("/srv/patients/7.png is not\n~/what it was, but 3/4 of ..\\x86 is")

    monkeypatch.setattr(FedAvg, "client_update", local)
    with asked(exp, tmp_path) as server:
        server.listen(lambda: server.said(m.Failed))
    said = "ValueError: (a path) is not (a path) it was, but 3/4 of (a path) is"
    assert server.said(m.Failed)[0].reason == said
    assert without_paths("7 / 8, and/or http") == "7 / 8, and/or http"


def test_the_third_press_of_ctrl_c_ends_what_does_not_end(monkeypatch):
    asked = []
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGINT)
    on = third_press_kills(lambda number, frame: asked.append(number))
    try:
        for press in range(2):
            now[0] += 1.0
            on(signal.SIGINT, None)
            now[0] += TOGETHER_S / 2
            on(signal.SIGINT, None)  # the same press, passed on
            assert len(asked) == 2 * (press + 1)
        on(signal.SIGTERM, None)
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            on(signal.SIGINT, None)
    finally:
        signal.signal(signal.SIGINT, before)


HANGS = """
import time
from fednet.algorithms.fedavg import FedAvg
from fednet.registry import algorithm

@algorithm("hangs")
class Hangs(FedAvg):
    def server_update(self, *args):
        print("hanging", flush=True)
        while True:
            time.sleep(0.05)
"""


@pytest.mark.timeout(120)
def test_a_finish_that_hangs_ends_at_the_third_ctrl_c(tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    data = "data={dataset: synthetic, samples: 40, shape: [4], classes: 2}"
    sets = ("algorithm=hangs", "clients=2", "model={name: mlp, hidden: [4]}", data)
    words = [w for s in sets for w in ("--set", s)]
    with Processes(tmp_path) as started:
        more = ("--load", "hangs.py", "--out", "runs", "--device", "cpu")
        run = started.start("main", "run", "--in-process", *words, *more)
        until(lambda: "hanging" in run.said(), "the method is at its last step", run)
        for _ in range(3):
            assert run.poll() is None
            run.send_signal(signal.SIGINT)
            time.sleep(2 * TOGETHER_S)  # two presses, not one
        assert run.wait(60) == 130

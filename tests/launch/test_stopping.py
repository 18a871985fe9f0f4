"""What Ctrl-C, or the interrupt of a notebook's kernel, does around a run and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fednet
from fednet.cli.common import run_guarded
from fednet.config import Config
from fednet.errors import ConfigError, Stopped, stop_signals
from fednet.launch.supervisor import Supervisor
from fednet.server import process
from fednet.server.watch import ServerOptions
from tests.processes import Processes, lines, small, until

# Saves what is done when it is asked to, which takes it longer than the asker waits unasked.
SAVES = """#!{python}
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    sys.exit(sys.stderr.write("fednet run: stopped: SIGINT; continue with --resume.") and 130)
signal.signal(signal.SIGINT, save)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


@pytest.fixture
def as_before():
    """What the signals did before the test, they do after it."""
    before = [signal.getsignal(number) for number in stop_signals()]
    yield
    assert [signal.getsignal(number) for number in stop_signals()] == before


def test_an_interrupt_of_a_notebook_waits_until_the_runs_processes_have_saved(
    as_before, monkeypatch, tmp_path
):
    python = tmp_path / "python"
    python.write_text(SAVES.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(Stopped, match=r"^stopped: SIGINT; continue with --resume\.$") as caught:
        fednet.run({"name": "asked"}, out=tmp_path / "runs")
    assert caught.value.exit_status == 130


def launcher(monkeypatch, folder: Path, server) -> Supervisor:
    """A launcher whose server only does that, and whose worker waits."""

    def waits(*_):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pause()

    monkeypatch.setattr(Supervisor, "_warm_up", lambda _: None)
    monkeypatch.setattr(Supervisor, "_server", server)
    monkeypatch.setattr(Supervisor, "_worker", waits)
    return Supervisor(Config(name="x"), folder, ServerOptions(None, [], "cpu", None), workers=1)


def test_ctrl_c_after_a_run_that_could_not_begin_is_pythons_again(as_before, monkeypatch, tmp_path):
    def refuses(*_):
        raise ConfigError("no such data.")

    monkeypatch.setattr(process, "open_run", refuses)
    with pytest.raises(ConfigError, match="no such data"):
        process.run_server(Config(name="x"), tmp_path, None, ServerOptions(None, [], "cpu", None))


def test_a_server_that_a_signal_ended_before_it_knew_how_to_stop_was_stopped(
    as_before, monkeypatch, tmp_path
):
    """As between its fork and its first line."""

    def asks(_):
        os.kill(os.getppid(), signal.SIGINT)  # which passes it on
        signal.pause()

    with pytest.raises(Stopped, match="stopped: SIGINT; continue with --resume") as caught:
        launcher(monkeypatch, tmp_path, asks).run()
    assert caught.value.exit_status == 130


def test_a_worker_that_the_server_calls_silent_is_replaced(as_before, monkeypatch, tmp_path):
    (workers := tmp_path / "workers").mkdir()

    def server(supervisor):
        told = set[str]()
        while len(told) < 3:  # in a process of its own
            for pid in {path.name for path in workers.iterdir()} - told:
                supervisor._tell("away", {"why": "silent", "pid": int(pid)})
                told.add(pid)
            time.sleep(0.01)
        return 0

    def worker(*_):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (workers / str(os.getpid())).touch()
        signal.pause()

    started = launcher(monkeypatch, tmp_path, server)
    monkeypatch.setattr(Supervisor, "_worker", worker)
    assert started.run() == 0
    assert len(list(workers.iterdir())) >= 3


ONCE_SLOW = "faults={schedule: [{round: 2, client: 1, kind: delay, seconds: 600}]}"


def of_a_terminal() -> None:
    """In a process: what it does at SIGHUP is what a shell leaves it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_terminal_that_is_closed_stops_client_and_server_cleanly(tmp_path):
    with Processes(tmp_path) as started:
        server = started.server(sets=(ONCE_SLOW,), before=of_a_terminal)
        two = [started.client(k, "--faults", before=of_a_terminal) for k in range(2)]
        until(lambda: lines(tmp_path / "run" / "rounds.jsonl"), "a round", server, *two)
        two[0].send_signal(signal.SIGHUP)
        assert started.ended(two[0])[0] == 0
        assert two[0].said().endswith("left\n")
        events = tmp_path / "run" / "events.jsonl"
        until(lambda: any(e["type"] == "left" for e in lines(events)), "it is told", server)
        server.send_signal(signal.SIGHUP)
        assert started.ended(server)[0] == 4
        assert server.said().endswith("stopped: SIGHUP; continue with --resume.\n")
        assert (tmp_path / "run" / "checkpoint" / "manifest.json").exists()


# Ctrl-C three times, each a press of its own, while a part of one's own does not end: a method, or
# a compressor in the thread that does the server's input and output while rounds are evaluated.
PRESSES = """
import os, signal, threading
from fednet.algorithms.fedavg import FedAvg
from fednet.registry import algorithm, compressor
from fednet.server import watch
from fednet.server.evaluation import Evaluator
from fednet.wire.compressors.values import Bf16

watch.TOGETHER_S = 0.0

def press():
    for number in range(3):
        print("press", number, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
"""
HANGS = """
@algorithm("hangs")
class Hangs(FedAvg):
    def server_update(self, *args):
        press()
        threading.Event().wait()
"""
STUCK = """
stuck, evaluate = threading.Event(), Evaluator.evaluate

@compressor("stuck")
class Stuck(Bf16):
    def decode(self, data, n):
        if threading.current_thread().name == "fednet-io":
            stuck.set()
            threading.Event().wait()
        return super().decode(data, n)

def pressed(*arguments):
    stuck.wait()
    press()
    return evaluate(*arguments)

Evaluator.evaluate = pressed
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("part", "chosen", "where"),
    [
        (HANGS, "algorithm=hangs", ["--in-process"]),
        pytest.param(
            STUCK, "wire={up: {state: [stuck]}}", ["--workers", 1], marks=pytest.mark.long
        ),
    ],
    ids=["hangs", "stuck"],
)
def test_the_third_ctrl_c_does_not_wait_for_a_part_that_never_returns(
    tmp_path, part, chosen, where
):
    (own := tmp_path / "own.py").write_text(PRESSES + part)
    with Processes(tmp_path) as started:
        words = *small(chosen), "--load", own, "--out", tmp_path
        run = started.start("main", "run", *words, *where)
        assert started.ended(run)[0] == 130
        assert "press 2" in run.said()


def test_a_command_whose_parent_ignored_the_end_of_children_knows_how_its_own_ended(tmp_path):
    """A program inherits which signals are ignored, and the system then keeps no status."""
    with Processes(tmp_path) as started:
        assert started.ended(started.fork(false_where_no_status_is_kept))[0] == 1


def false_where_no_status_is_kept() -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return run_guarded("fednet run", lambda: subprocess.run(["false"]).returncode, ends=True)

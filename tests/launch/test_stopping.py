"""What Ctrl-C, or the interrupt of a notebook's kernel, does around a run and after it."""

from __future__ import annotations

import signal
import sys

import pytest

import fednet
from fednet.config import Config
from fednet.errors import ConfigError, Stopped, stops
from fednet.launch.supervisor import Supervisor
from fednet.server import process
from fednet.server.hosting import Hosting

# Saves what is done when it is asked to, which takes it longer than the asker waits unasked.
SAVES = """#!{python}
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    sys.exit(sys.stderr.write("fednet run: stopped: SIGINT; go on with --resume.") and 130)
signal.signal(signal.SIGINT, save)
os.kill(os.getppid(), signal.SIGINT)
signal.pause()
"""


@pytest.fixture
def as_before():
    """What the signals did before the test, they do after it."""
    before = [signal.getsignal(number) for number in stops()]
    yield
    assert [signal.getsignal(number) for number in stops()] == before


def test_an_interrupt_of_a_notebook_waits_until_the_runs_processes_have_saved(
    as_before, monkeypatch, tmp_path
):
    python = tmp_path / "python"
    python.write_text(SAVES.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(Stopped, match=r"^stopped: SIGINT; go on with --resume\.$") as caught:
        fednet.run({"name": "asked"}, out=tmp_path / "runs")
    assert caught.value.exit_status == 130


def test_ctrl_c_while_the_figures_are_drawn_is_no_longer_the_servers(
    as_before, monkeypatch, tmp_path
):
    for step in ("_warm_up", "_fork", "_start", "_end_all"):
        monkeypatch.setattr(Supervisor, step, lambda *_: None)
    monkeypatch.setattr(Supervisor, "_watch", lambda _: 0)
    how = Hosting(None, [], "cpu", None)
    assert Supervisor(Config(name="drawn"), tmp_path, how, workers=1).run() == 0


def test_ctrl_c_after_a_run_that_could_not_begin_is_pythons_again(as_before, monkeypatch, tmp_path):
    def refuses(*_):
        raise ConfigError("no such data.")

    monkeypatch.setattr(process, "Session", refuses)
    with pytest.raises(ConfigError, match="no such data"):
        process.host_rounds(Config(name="x"), tmp_path, None, Hosting(None, [], "cpu", None))

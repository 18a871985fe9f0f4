"""Which runs are stored, how large and how old they are, and which are deleted."""

from __future__ import annotations

import os
import sys
import time

import pytest

from fednet.cli.main import main
from fednet.errors import ConfigError
from fednet.experiment import lock
from fednet.files import write_record
from fednet.report import runs

DAY = 86_400.0


def stored(path, days: float, state: str = "done", size: int = 1000):
    """A run that ended so many days ago, with a file of that size."""
    (path / "log").mkdir(parents=True)
    (path / "config.yaml").write_text("rounds: 4\n")
    write_record(path / "status.json", {"state": state, "round": 4, "rounds": 4})
    (path / "log" / "server.log").write_bytes(bytes(size))
    at = time.time() - days * DAY
    for file in path.rglob("*"):
        os.utime(file, (at, at))
    return path


@pytest.fixture
def folder(tmp_path):
    stored(tmp_path / "old", 100)
    stored(tmp_path / "new", 1, state="running", size=5_000_000)
    (tmp_path / "no-run").mkdir()
    (tmp_path / ".old.log").write_bytes(bytes(3_000_000))  # of fednet serve
    os.utime(tmp_path / ".old.log", (0, 0))
    return tmp_path


def names(found) -> list[str]:
    return [run.path.name for run in found]


def test_runs_are_listed_with_their_size_and_age_the_newest_first(folder, capsys):
    new, old = runs.find_runs([folder])
    assert names([new, old]) == ["new", "old"]
    assert (old.state, old.rounds, new.state) == ("finished", 4, "ended unexpectedly")
    assert 3_001_000 < old.bytes < 3_002_000
    assert old.days(time.time()) == pytest.approx(100, abs=0.01)
    assert names(runs.find_runs([folder / "old", folder])) == ["new", "old"]
    assert main(["runs", str(folder), "--older", "30"]) == 0
    said = capsys.readouterr().out
    assert "100.0 days" in said
    assert "1 runs, 3.00 MB" in said
    with pytest.raises(ConfigError, match="there is no such folder"):
        runs.find_runs([folder / "none"])


def test_old_runs_are_deleted_with_their_logs_after_asking(folder, capsys, monkeypatch):
    words = ["runs", str(folder), "--older", "30", "--delete"]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert main(words) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert main(words) == 0
    assert "nothing was deleted" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(words) == 0
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["new", "no-run"]


def test_a_run_that_a_process_uses_is_kept(folder, capsys):
    with lock.holding(folder / "old"):
        status = main(["runs", str(folder), "--delete", "--yes"])
    assert status == 2
    assert "is in use" in capsys.readouterr().err
    assert names(runs.find_runs([folder])) == ["old"]

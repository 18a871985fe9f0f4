"""Where a run goes, and what of it a resume may change: nothing is ever overwritten."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from fednet import config as configuration
from fednet.cli.main import main
from fednet.errors import ConfigError, StateError
from fednet.experiment.rundir import RunDirectory, claim, forget, log_to
from fednet.files import line
from fednet.launch import start
from fednet.report import status
from tests.processes import lines


def begun(path: Path, finished: bool) -> None:
    """With a round on record."""
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text("name: run\n")
    (path / "rounds.jsonl").write_text('{"round": 1}\n')
    if finished:
        (path / "summary.json").write_text("{}")


def test_beside_finished_runs_a_new_one_is_the_next_in_number(tmp_path):
    assert claim(tmp_path, "run", resume=False) == tmp_path / "run"
    begun(tmp_path / "run", finished=True)
    assert claim(tmp_path, "run", resume=False) == tmp_path / "run-2"
    begun(tmp_path / "run-2", finished=True)
    assert claim(tmp_path, "run", resume=False) == tmp_path / "run-3"
    begun(tmp_path / "run-3", finished=False)
    with pytest.raises(ConfigError, match=r"run-3 holds an unfinished run; .*--resume, or"):
        claim(tmp_path, "run", resume=False)


def test_a_resume_goes_on_with_the_newest_of_the_name_or_begins_the_first(tmp_path):
    assert claim(tmp_path, "run", resume=True) == tmp_path / "run"
    begun(tmp_path / "run", finished=True)
    begun(tmp_path / "run-2", finished=False)
    assert claim(tmp_path, "run", resume=True) == tmp_path / "run-2"
    begun(tmp_path / "run-2", finished=True)
    assert claim(tmp_path, "run", resume=True) == tmp_path / "run-2"


def open_directory(config, out, resume):
    """Opened, and closed again at once."""
    with start.open_directory(config, out, resume) as opened:
        return opened


def config(**changes):
    return configuration.from_mapping({"name": "run", "rounds": 2, **changes})


def test_a_finished_run_is_left_as_it_is_unless_more_is_asked_of_it(tmp_path):
    _, path, finished = open_directory(config(), tmp_path, resume=False)
    assert not finished
    (path / "summary.json").write_text("{}")
    before = (path / "config.yaml").read_bytes()
    assert open_directory(config(), tmp_path, resume=True)[1:] == (path, True)
    assert (path / "config.yaml").read_bytes() == before
    assert open_directory(config(rounds=3), tmp_path, resume=True)[1:] == (path, False)
    assert not (path / "summary.json").exists()
    assert configuration.load(path / "config.yaml", []).rounds == 3


def test_what_a_resume_would_change_is_listed_by_its_keys_and_nothing_is_written(tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    before = (path / "config.yaml").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"--resume: seed, train.lr differ from the run's own configuration.*only "
        r"rounds, clients, stop, round, evaluate",
    ):
        open_directory(
            config(seed=1, clients=3, train={"lr": 0.5}, rounds=5), tmp_path, resume=True
        )
    assert (path / "config.yaml").read_bytes() == before
    free = {"rounds": 5, "round": {"deadline": 3.0}, "stop": {"seconds": 9.0}, "report": False}
    elsewhere = {"data": {"root": str(tmp_path), "download": True}}
    open_directory(config(evaluate={"every": 2}, **free, **elsewhere), tmp_path, resume=True)


def test_a_refused_run_leaves_its_name_free_but_what_is_the_users_own_stays(tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    (path / "notes.txt").write_text("mine")
    forget(path)
    assert [p.name for p in path.iterdir()] == ["notes.txt"]
    assert claim(tmp_path, "run", resume=False) == path


def test_rounds_are_not_forgotten_where_their_checkpoint_is_gone(tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    (path / "rounds.jsonl").write_text('{"round": 1}\n')
    forget(path)
    assert (path / "rounds.jsonl").exists()


def test_a_run_says_that_it_is_starting_before_its_server_is_up(tmp_path):
    with start.open_directory(config(), tmp_path, False) as (_, path, _):
        head, how = status.show(path).splitlines()
    assert head == "starting: preparing data, model and workers before the first round"
    assert how.startswith(f"server process {os.getpid()} is running (last update ")


def test_a_run_that_ended_before_its_first_round_did_is_replaced(tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "manifest.json").write_text('{"progress": {"round": 0}}')
    (path / "events.jsonl").write_text("{}\n")
    assert open_directory(config(seed=5), tmp_path, resume=False)[1:] == (path, False)
    assert configuration.load(path / "config.yaml", []).seed == 5
    assert not (path / "checkpoint").exists()
    assert not (path / "events.jsonl").exists()


def test_a_run_of_void_rounds_alone_is_replaced(tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    rounds = lambda *void: b"".join(line({"void": said}) for said in void)  # noqa: E731
    (path / "rounds.jsonl").write_bytes(rounds(True, True))
    (path / "checkpoint").mkdir()
    manifest = path / "checkpoint" / "manifest.json"
    manifest.write_text('{"progress": {"round": 2, "void": 2}}')
    assert open_directory(config(), tmp_path, resume=True)[1:] == (path, False)
    assert manifest.exists()
    assert open_directory(config(), tmp_path, resume=False)[1:] == (path, False)
    assert not manifest.exists()
    (path / "rounds.jsonl").write_bytes(rounds(True, False))
    with pytest.raises(ConfigError, match="holds an unfinished run"):
        open_directory(config(), tmp_path, resume=False)


def test_seconds_of_events_pass_whatever_the_clock_on_the_wall_is_set_to(tmp_path, monkeypatch):
    run = RunDirectory(tmp_path)
    monkeypatch.setattr("time.time", lambda: 0.0)
    run.event("set back")
    monkeypatch.undo()
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["time"], event["elapsed"] >= 0) == (0.0, True)


@pytest.mark.parametrize("name", ["rounds.jsonl", "wire.jsonl"])
@pytest.mark.parametrize("spoil", [lambda p: os.truncate(p, 3), Path.unlink])
def test_records_that_are_removed_or_cut_while_a_run_writes_them_are_missed(tmp_path, name, spoil):
    """What is written from then on would go nowhere, as where an editor replaces the file."""
    directory = RunDirectory(tmp_path)
    directory.append({"rounds": [{"round": 1}]})
    directory.wire.append({"round": 1, "bytes": 9})
    directory.flush()
    spoil(tmp_path / name)
    with pytest.raises((StateError, FileNotFoundError), match=name):
        directory.flush()
    directory.close()


def test_a_log_that_cannot_be_written_prints_no_traceback(capsys):
    handler = log_to(Path("/dev/full"))
    try:
        logging.getLogger("fednet.anywhere").error("said elsewhere")
    finally:
        logging.getLogger("fednet").removeHandler(handler)
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_a_resume_of_a_finished_run_draws_the_report_that_was_not_drawn(tmp_path):
    from tests.report.fake_run import write

    written = write(tmp_path / "run")
    assert main(["run", str(written), "--resume", "--quiet"]) == 0
    assert b"fedavg" in (written / "report.html").read_bytes()


@pytest.mark.parametrize("manifest", ['{"progress": {"round": 1}}', "torn", "[]"])
def test_a_run_whose_checkpoint_has_a_round_or_is_damaged_is_not_replaced(manifest, tmp_path):
    _, path, _ = open_directory(config(), tmp_path, resume=False)
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "manifest.json").write_text(manifest)
    with pytest.raises(ConfigError, match="holds an unfinished run"):
        open_directory(config(seed=5), tmp_path, resume=False)
    assert (path / "checkpoint" / "manifest.json").read_text() == manifest


def test_where_nothing_can_be_written_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file: nothing can be written there"):
        claim(tmp_path / "file", "run", resume=False)
    with pytest.raises(ConfigError, match="file is a file, where the run's directory is to be"):
        claim(tmp_path, "file", resume=False)

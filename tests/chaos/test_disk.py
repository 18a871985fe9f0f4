"""A disk that is full, for real: a file system of a few megabytes, mounted for the test; and one
that fails once to write what it was given.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fednet.cli.main import main
from tests.processes import Federation, planned, small, undisturbed

# A reply of round 2 is kept back, once, so that the disk can be filled meanwhile.
WAIT = planned("delay", seconds=2)
RUN = ["run", *small("report=false"), "--in-process", "--quiet"]


@pytest.fixture
def disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "fednet-test", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Use all space; removing the file frees it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while os.statvfs(disk).f_bavail:  # the run may free a page meanwhile
            with contextlib.suppress(OSError):
                file.write(bytes(4096))
    return filler


def test_a_full_disk_stops_the_server_and_a_resume_continues_once_there_is_room(tmp_path, disk):
    with Federation(disk, algorithm="scaffold", faults=WAIT) as fed:
        fed.tmp = tmp_path
        fed.client("0-3", state=tmp_path / "state")
        fed.server()
        fed.until(lambda: fed.events("fault"))
        filler = fill(disk)
        assert fed.status() == 3
        assert "No space left on device" in fed.output()
        assert "the last checkpoint is saved; continue with --resume" in fed.output()
        assert "Traceback" not in fed.output()
        filler.unlink()
        fed.server(resume=True)
        fed.finish()
        assert fed.hashes() == undisturbed(algorithm="scaffold")
        assert not [p for p in fed.path.rglob("*") if p.name.startswith(("round-", "."))]


def test_a_client_whose_disk_is_full_says_so_and_the_rounds_continue_without_it(tmp_path, disk):
    rules = {"on_error": "drop", "lost": {"closed": 0.5, "silent": 10.0}}
    changes = {"algorithm": "scaffold", "rounds": 1_000_000, "round": rules, "faults": WAIT}
    with Federation(tmp_path, **changes) as fed:
        one = fed.client("1", state=disk)
        fed.begin("0,2,3")
        fed.until(lambda: fed.events("fault"))
        filler = fill(disk)
        fed.until(lambda: fed.completed()[-1:] == [[0, 2, 3]])
        fed.until(lambda: "No space left on device" in fed.output())
        assert "Traceback" not in fed.output()
        filler.unlink()
        fed.until(lambda: one.poll() or fed.completed()[-1] == [0, 1, 2, 3])
        if one.poll() is not None:
            assert fed.status(one) == 3
            fed.client("1", state=disk)
        fed.until(lambda: fed.completed()[-1] == [0, 1, 2, 3])
        fed.stop()


def test_a_round_that_waits_for_a_client_with_a_full_disk_has_the_same_bits_once_it_has_room(
    tmp_path, disk
):
    """The client is lost, for the reason that it says, as if its process had been killed."""
    rules = {"lost": {"closed": None, "silent": None}}
    changes = {"algorithm": "scaffold", "round": rules, "faults": WAIT}
    with Federation(tmp_path, **changes) as fed:
        one = fed.client("1", state=disk)
        fed.begin("0,2,3")
        fed.until(lambda: fed.events("fault"))
        filler = fill(disk)
        assert fed.status(one) == 3
        assert "this client stops: No space left on device" in fed.output()
        fed.until(lambda: fed.events("away"))
        assert [e["why"] for e in fed.events("away")] == [
            "left: No space left on device ((a path))"
        ]
        filler.unlink()
        fed.client("1", state=disk)
        fed.finish()
        assert [r["dropped"] for r in fed.rounds()] == [{}] * len(fed.rounds())
        assert fed.hashes() == undisturbed(algorithm="scaffold")


def test_a_client_whose_disk_stays_full_is_lost_for_that_reason_and_the_rounds_continue(
    tmp_path, disk
):
    changes = {"algorithm": "scaffold", "round": {"lost": {"closed": 0.1}}, "faults": WAIT}
    with Federation(tmp_path, **changes) as fed:
        fed.client("1", state=disk)
        fed.begin("0,2,3")
        fed.until(lambda: fed.events("fault"))
        fill(disk)
        assert fed.status(fed.last) == 0
        dropped = [r["dropped"] for r in fed.rounds()]
        assert dropped[0] == {}
        assert dropped[-1]["1"].startswith("lost: left: No space left on device")
        assert all(set(each) <= {"1"} for each in dropped)


@pytest.mark.parametrize("kilobytes", [56, 148])
def test_a_full_disk_is_said_with_what_is_left_anywhere_in_a_run_in_one_process(
    tmp_path, disk, capsys, kilobytes
):
    same = [*RUN, "--set", "rounds=20", "--set", "algorithm=scaffold"]
    run = [*same, "--out", str(disk)]
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - kilobytes * 1024)
    assert main(run) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("fednet run: the run stopped: No space left on device")
    assert said.endswith(("continue with --resume.", "--resume starts it from the beginning."))
    filler.unlink()
    assert main([*run, "--resume"]) == 0
    assert main([*same, "--out", str(tmp_path)]) == 0
    models = [
        json.loads((out / "run" / "summary.json").read_text())["model_sha256"]
        for out in (disk, tmp_path)
    ]
    assert models[0] == models[1]


def test_what_a_full_disk_keeps_from_being_made_is_named_and_made_once_there_is_room(disk, capsys):
    filler = fill(disk)
    commands = {
        "keys/server.key": ["keys", "server", str(disk / "keys")],
        "mine.py": ["new", "algorithm", str(disk / "mine.py")],
        "run/lock": [*RUN, "--out", str(disk)],
    }
    for name, command in commands.items():
        assert main(command) in (2, 3)
        said = capsys.readouterr().err
        assert str(disk / name) in said
        assert "No space left on device" in said
        assert not (disk / name).exists()
    filler.unlink()
    assert [main(command) for command in commands.values()] == [0, 0, 0]


# -- files that are flushed ------------------------------------------------------------------------
FLUSHED = [*RUN, "--set", "checkpoint.fsync=true", "--set", "algorithm=scaffold"]


def watch(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], object]) -> None:
    """From now on `before` is called with the path of each file that is flushed to the disk."""
    fsync = os.fsync

    def watched(file: int) -> None:
        before(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model of an undisturbed run."""
    out = tmp_path_factory.mktemp("calm")
    assert main([*FLUSHED, "--out", str(out)]) == 0
    return json.loads((out / "run" / "summary.json").read_text())["model_sha256"]


@pytest.mark.parametrize("name", ["checkpoint/journal", "state-", "rounds.jsonl"])
def test_a_disk_that_fails_once_is_said_with_the_file_and_a_resume_continues(
    tmp_path, monkeypatch, capsys, model, name
):
    failed = list[str]()

    def fail_once(path: str) -> None:
        if not failed and name in path:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    watch(monkeypatch, fail_once)
    run = [*FLUSHED, "--out", str(tmp_path / "out")]
    assert main(run) == 3
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Input/output error" in said
    folder = "checkpoint/" if name == "state-" else ""
    assert f"run/{folder}{name}" in said
    assert "fault of fednet" not in said
    assert not (tmp_path / "out" / "fednet.log").exists()
    assert main([*run, "--resume"]) == 0
    summary = json.loads((tmp_path / "out" / "run" / "summary.json").read_text())
    assert summary["model_sha256"] == model


def test_states_of_clients_are_flushed_to_the_disk_as_the_checkpoint_is(tmp_path, monkeypatch):
    flushed = set[str]()
    watch(monkeypatch, lambda path: flushed.add(Path(path).parent.name))
    assert main([*FLUSHED, "--out", str(tmp_path)]) == 0
    assert {"checkpoint", "client-0", "client-1"} <= flushed

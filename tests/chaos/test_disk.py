"""A disk that is full, for real: a file system of a few megabytes, mounted for the test; and one
that fails once to write what it was given.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fednet.cli.main import main
from tests.federation import Federation
from tests.processes import ROOT, small

# A moment that lasts, in which the disk is filled: a reply of round 2 is kept back, once. It
# changes no bit.
WAIT = {"schedule": [{"round": 2, "client": 1, "kind": "delay", "seconds": 2}]}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
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
    """Takes all there is; removing the file frees it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert not os.statvfs(disk).f_bavail
    return filler


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    with Federation(tmp_path_factory.mktemp("calm"), algorithm="scaffold") as fed:
        fed.client("0-3")
        fed.server()
        fed.finish()
        return fed.hashes()


def test_a_full_disk_stops_the_server_and_a_resume_goes_on_once_there_is_room(
    tmp_path: Path, disk: Path, calm: list[tuple[int, str, str]]
) -> None:
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
        assert fed.hashes() == calm
        left = [p for p in fed.path.rglob("*") if p.name.startswith(("round-", "."))]
        assert not left


def test_a_client_whose_disk_is_full_says_so_and_the_rounds_go_on_without_it(
    tmp_path: Path, disk: Path
) -> None:
    with Federation(
        tmp_path,
        algorithm="scaffold",
        rounds=1_000_000,
        round={"on_error": "drop", "lost": {"closed": 0.5, "silent": 10.0}},
        faults=WAIT,
    ) as fed:
        fed.client("0,2,3")
        one = fed.client("1", state=disk)
        fed.server()
        fed.until(lambda: fed.events("fault"))
        filler = fill(disk)
        fed.until(lambda: [r["completed"] for r in fed.rounds()][-1:] == [[0, 2, 3]])
        fed.until(lambda: "No space left on device" in fed.output())
        assert "Traceback" not in fed.output()
        filler.unlink()
        fed.until(lambda: one.poll() or fed.rounds()[-1]["completed"] == [0, 1, 2, 3])
        if one.poll() is not None:
            assert fed.status(one) == 3
            fed.client("1", state=disk)
        fed.until(lambda: fed.rounds()[-1]["completed"] == [0, 1, 2, 3])
        fed.last.send_signal(signal.SIGTERM)
        assert fed.status() == 4


@pytest.mark.parametrize("kilobytes", [56, 100, 148, 172])
def test_a_full_disk_is_said_with_what_is_left_wherever_it_meets_a_run_in_one_process(
    disk: Path, capsys: pytest.CaptureFixture[str], kilobytes: int
) -> None:
    run = ["run", *small("rounds=20", "report=false"), "--in-process", "--quiet"]
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - kilobytes * 1024)
    assert main([*run, "--out", str(disk)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("fednet run: the run stopped: No space left on device")
    assert said.endswith(("continue with --resume.", "--resume starts it from the beginning."))
    filler.unlink()
    assert main([*run, "--out", str(disk), "--resume"]) == 0


def test_what_a_full_disk_keeps_from_being_made_is_named_and_made_once_there_is_room(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filler = fill(disk)
    commands = {
        "keys/server.key": ["keys", "server", str(disk / "keys")],
        "mine.py": ["new", "algorithm", str(disk / "mine.py")],
        "run/lock": ["run", *small("report=false"), "--in-process", "--out", str(disk)],
    }
    for name, command in commands.items():
        assert main(command) in (2, 3)
        said = capsys.readouterr().err
        assert str(disk / name) in said
        assert "No space left on device" in said
        assert not (disk / name).exists()
    filler.unlink()
    assert [main(command) for command in commands.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    "name", ["lock", "incarnation", "flight.jsonl", "state-", "manifest.json", "rounds.jsonl"]
)
def test_a_disk_that_fails_once_is_said_with_the_file_and_a_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = ["run", *small("checkpoint.fsync=true", "report=false"), "--in-process", "--quiet"]
    sound, failed = os.fsync, list[str]()

    def fsync(file: int) -> None:
        if not failed and name in (path := os.readlink(f"/proc/self/fd/{file}")):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sound(file)

    assert main([*run, "--out", str(tmp_path / "calm")]) == 0
    monkeypatch.setattr(os, "fsync", fsync)
    assert main([*run, "--out", str(tmp_path / "out")]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert "Input/output error" in said
    assert f"run/{'' if name == 'lock' or name == 'rounds.jsonl' else 'checkpoint/'}{name}" in said
    assert "fault of fednet" not in said
    assert not (tmp_path / "out" / "fednet.log").exists()
    assert main([*run, "--out", str(tmp_path / "out"), "--resume"]) == 0
    ended = [json.loads((tmp_path / d / "run/summary.json").read_text()) for d in ("calm", "out")]
    assert ended[0]["model_sha256"] == ended[1]["model_sha256"]


def test_states_of_clients_are_flushed_to_the_disk_as_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound, flushed = os.fsync, set[str]()

    def fsync(file: int) -> None:
        flushed.add(os.path.basename(os.path.dirname(os.readlink(f"/proc/self/fd/{file}"))))
        sound(file)

    monkeypatch.setattr(os, "fsync", fsync)
    run = ["run", *small("checkpoint.fsync=true", "report=false", "algorithm=scaffold")]
    assert main([*run, "--in-process", "--quiet", "--out", str(tmp_path)]) == 0
    assert {"checkpoint", "client-0", "client-1"} <= flushed


def test_what_is_flushed_to_the_disk_says_which_file_it_was() -> None:
    files = (ROOT / "fednet").rglob("*.py")
    assert [p.name for p in files if "os.fsync" in p.read_text()] == ["descriptors.py"]

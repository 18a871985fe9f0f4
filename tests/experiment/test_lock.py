"""Who works on a directory: one process, which the next one is told of."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fednet.client.books import MessageFile
from fednet.client.states import StatesHold
from fednet.errors import CannotGoOn, ConfigError, machine_error
from fednet.experiment import lock
from fednet.experiment.rundir import claim
from fednet.transport import keys

HOLD = """
import sys, time
from pathlib import Path
from fednet.experiment import lock
with lock.holding(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the directory."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_of_the_first_and_changes_nothing(tmp_path, other):
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    who = f"run is in use by process {other.pid} on {re.escape(socket.gethostname())};"
    with pytest.raises(ConfigError, match=who), lock.holding(tmp_path / "run"):
        pass
    (tmp_path / "run" / "config.yaml").write_text("name: run\n")
    (tmp_path / "run" / "rounds.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(ConfigError, match=who):  # and not that it wants a resume
        claim(tmp_path, "run", resume=False)
    other.kill()
    other.wait()
    with pytest.raises(ConfigError, match="holds an unfinished run; continue it with --resume"):
        claim(tmp_path, "run", resume=False)
    assert {p: p.read_bytes() for p in before} == before


def test_what_a_killed_process_held_is_free(tmp_path, other):
    other.kill()
    other.wait()
    with lock.holding(tmp_path / "run"):
        assert lock.read(tmp_path / "run" / "lock").pid == os.getpid()
    assert not (tmp_path / "run").exists()


def test_a_lock_that_could_not_be_written_is_held_by_nobody(tmp_path, monkeypatch):
    """As where the disk is full: the same process may try again."""

    def full(file, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(lock.os, "pwrite", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/run/lock'"):
            lock.take(tmp_path / "run" / "lock")
    with lock.holding(tmp_path / "run"):
        assert lock.read(tmp_path / "run" / "lock").pid == os.getpid()


def test_a_holder_from_whom_another_machine_took_it_writes_no_more(tmp_path):
    with lock.holding(tmp_path / "run"):
        lock.check(tmp_path / "run")
        other = msgspec.structs.replace(lock.me(), host="elsewhere", pid=12)
        (tmp_path / "run" / "lock").write_bytes(msgspec.json.encode(other))
        with pytest.raises(CannotGoOn, match="names process 12 on elsewhere"):
            lock.check(tmp_path / "run")
    assert lock.read(tmp_path / "run" / "lock") == other  # which is not this one's to delete


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"host": "a', b"[]"])
def test_a_damaged_lock_names_nobody(tmp_path, monkeypatch, content):
    monkeypatch.setattr(lock, "ENDING_S", 0.0)
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "lock"
    path.write_bytes(content)
    with lock.holding(tmp_path / "run"):
        lock.check(tmp_path / "run")
        path.write_bytes(content)
        with pytest.raises(CannotGoOn, match="names nobody"):
            lock.check(tmp_path / "run")
        with pytest.raises(ConfigError, match="in use by another process"):
            lock.take(path)


def test_a_run_stays_locked_until_what_its_holder_forked_has_ended(tmp_path, monkeypatch):
    fork = HOLD.replace("    print(", "    import os\n    os.fork() and print(")
    words = [sys.executable, "-c", fork, str(tmp_path / "run")]
    monkeypatch.setattr(lock, "ENDING_S", 0.0)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        process.kill()
        process.wait()
        with pytest.raises(ConfigError, match="is in use by process"):
            lock.take(tmp_path / "run" / "lock")
        process.stdin.close()  # what it forked ends
        monkeypatch.setattr(lock, "ENDING_S", 60.0)
        lock.take(tmp_path / "run" / "lock").release()


# -- file systems ----------------------------------------------------------------------------------
def use(where: str, folder: Path) -> None:
    """Takes a lock of each kind."""
    if where == "run":
        with lock.holding(folder):
            pass
    elif where == "states":
        StatesHold().take(folder, [3])
    elif where == "keys":
        keys.allow(folder, [0], "k" * keys.KEY_LENGTH)
    else:
        MessageFile().open(folder, "one")


@pytest.fixture(params=["run", "states", "keys", "book"])
def where(request, tmp_path):
    if request.param == "keys":
        keys.make_server_keys(tmp_path)
    return request.param


def break_locks(monkeypatch, number: int) -> None:
    def broken(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", broken)
    monkeypatch.setattr(fcntl, "fcntl", broken)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_with_the_file_and_what_is_expected(
    tmp_path, monkeypatch, where, number
):
    break_locks(monkeypatch, number)
    said = rf"{tmp_path}/[a-z.]+: its file system has no locks .*expected a folder on one that has"
    with pytest.raises(ConfigError, match=said):
        use(where, tmp_path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_lock_that_a_failing_disk_refuses_names_its_file(tmp_path, monkeypatch, where, number):
    break_locks(monkeypatch, number)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        use(where, tmp_path)
    assert str(tmp_path) in machine_error(raised.value)

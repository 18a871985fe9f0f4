"""What is read of processes and of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fednet import proc


def ended() -> int:
    """Return the id of a process that has ended, and that nobody waits for."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    return child.pid


def test_a_process_runs_until_it_ends_also_if_its_parent_has_not_noticed():
    assert proc.running(os.getpid())
    assert not proc.running(ended())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    os.kill(child, 0)  # its id is still there
    assert not proc.running(child)
    os.waitpid(child, 0)


@pytest.mark.parametrize("pid", [0, -1, 10**30])
def test_what_can_be_no_process_does_not_run(pid):
    assert not proc.running(pid)


def test_another_users_process_runs_although_it_cannot_be_looked_at(monkeypatch):
    def refused(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    assert proc.running(os.getpid())


def test_a_processes_name_may_look_like_its_state():
    words = "from pathlib import Path; Path('/proc/self/comm').write_text('a) Z 1 2'); input()"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE) as child:
        comm = Path(f"/proc/{child.pid}/comm")
        while comm.read_text() != "a) Z 1 2\n":
            time.sleep(0.01)
        assert proc.running(child.pid)
        child.communicate(b"\n")


def test_processor_time_and_memory_of_a_process_grow_and_are_0_for_one_that_ended():
    before = proc.processor_seconds(os.getpid())
    while proc.processor_seconds(os.getpid()) == before:
        sum(range(10_000))
    assert proc.processor_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.1)
    held = bytearray(os.urandom(1 << 20)) * 64
    assert proc.memory_bytes(os.getpid(), "status", "VmHWM") > len(held)
    gone = ended()
    assert proc.processor_seconds(gone) == 0.0
    assert proc.memory_bytes(gone, "status", "VmHWM") == 0
    assert proc.memory_bytes(os.getpid(), "status", "Vm") == 0  # no such row


def test_descriptors_are_those_that_are_open():
    before = proc.descriptors()
    with open(os.devnull), open(os.devnull):
        assert proc.descriptors() == before + 2


def test_a_machine_without_these_files_is_one_of_which_nothing_is_known(tmp_path, monkeypatch):
    assert 0 < proc.free_memory() < 1 << 50
    assert proc.processor()
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert proc.processor() == {}
    with pytest.raises(OSError):
        proc.free_memory()

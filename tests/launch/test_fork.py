"""What `fednet run` forks ends where it was forked, and says why with its own status, also where
nobody takes what it prints.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from fednet.errors import LACKS_MEMORY, ConfigError
from fednet.launch.supervisor import fork
from tests.processes import Rig


def refused():
    raise ConfigError("too long a name.")


def prints():
    print("a line")
    return 0


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device", "x")


def no_memory():
    raise MemoryError


def broken():
    raise KeyError("y")


def forks(work, folder, full=None):
    """In a process of its own: forks one that does `work`. full: the stream that nobody takes."""
    os.chdir(folder)
    if full is not None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), full)
        sys.stdout = os.fdopen(
            1, "w", closefd=False
        )  # which holds a line back, as a new process's does
    me = os.getpid()
    try:
        child = fork("server", work, Path("log"))
    finally:
        if os.getpid() != me:
            os._exit(77)  # it went on as if it were the one that forked it
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))


@pytest.mark.parametrize(("work", "full", "status"), [(refused, 2, 2), (prints, 1, 0)])
def test_where_nobody_takes_what_it_says_its_status_stands(work, full, status, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("a disk that is full")
    with Rig(tmp_path) as rig:
        assert rig.ended(rig.fork(forks, work, tmp_path, full))[0] == status


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (full_disk, "No space left on device: x."),
        (no_memory, f"{LACKS_MEMORY}."),
        (broken, "KeyError: 'y' (the whole traceback is in log)."),
    ],
)
def test_what_the_machine_refuses_one_of_them_is_said_in_a_sentence(work, said, tmp_path):
    with Rig(tmp_path) as rig:
        assert rig.ended(rig.fork(forks, work, tmp_path)) == (3, f"fednet run: {said}\n")

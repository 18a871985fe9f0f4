"""What starts the processes of tests leaves none behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, WAIT_S

STARTS = """
import pathlib, signal, sys
from tests.processes import Rig
with Rig(pathlib.Path(sys.argv[1])) as rig:
    one = rig.start("client", "--id", "0", "--server", "tcp://127.0.0.1:1")
    print(one.pid, rig.fork(signal.sigwait, [signal.SIGUSR1]).pid, flush=True)
    signal.pause()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process outlives its parent")
def test_what_tests_started_ends_with_them_though_nothing_of_theirs_could_be_run(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", STARTS, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in tests.stdout.readline().split()]
        assert len(handles) == 2
        assert select.select(handles, [], [], 0)[0] == []
        tests.send_signal(signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], WAIT_S)[0] == [handle]
        os.close(handle)

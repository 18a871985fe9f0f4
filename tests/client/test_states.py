"""Which process uses the state of a client."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from fednet.client.states import StatesHold
from fednet.errors import ConfigError

HOLD_STATES = """
import sys
from pathlib import Path
from fednet.client.states import StatesHold
StatesHold().take(Path(sys.argv[1]), [0, 1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_client_is_hosted_by_one_process_unless_one_launcher_started_them(tmp_path):
    first = StatesHold()
    second = StatesHold()
    third = StatesHold()
    first.take(tmp_path, [0, 1, 2])
    second.take(tmp_path, [3])
    with pytest.raises(ConfigError, match=f"the state of client 2 .* by process {os.getpid()} on"):
        third.take(tmp_path, [4, 2])
    second.take(tmp_path, [4])  # which a refused one does not keep; 3 is free again
    third.take(tmp_path, [3])
    for hold in (first, second, third):
        hold.release()
    workers = [StatesHold(shared=True), StatesHold(shared=True)]
    for worker in workers:
        worker.take(tmp_path, [0, 1])
    with pytest.raises(ConfigError, match="the state of client 0"):
        StatesHold().take(tmp_path, [0])
    workers[0].release()
    with pytest.raises(ConfigError, match="the state of client 0"):
        StatesHold().take(tmp_path, [0])
    workers[1].release()
    first.take(tmp_path, [0, 1])


def test_states_of_a_killed_process_are_free(tmp_path):
    words = [sys.executable, "-c", HOLD_STATES, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"the state of client 1 .* by process {process.pid}"):
            StatesHold().take(tmp_path, [1, 2])
        process.kill()
    StatesHold().take(tmp_path, [1, 2])


def test_a_hold_on_states_that_were_deleted_ends_and_makes_no_folder_again(tmp_path):
    hold = StatesHold()
    hold.take(tmp_path / "state", [0, 1])
    shutil.rmtree(tmp_path / "state")
    hold.release()
    assert not (tmp_path / "state").exists()

"""What `fednet run` forks ends where it was forked, and says why with its own status, also where
nobody takes what it prints.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fednet.errors import LACKS_MEMORY
from tests.processes import ROOT

FORKED = """
import os
from pathlib import Path
from fednet.errors import ConfigError
from fednet.launch.supervisor import fork

def refused():
    raise ConfigError("too long a name.")

me = os.getpid()
try:
    child = fork("server", {work}, Path("log"))
finally:
    if os.getpid() != me:
        os._exit(77)  # it went on as if it were the one that forked it
os._exit(child.status())
"""


def forked(work, cwd, **streams):
    return subprocess.run(
        [sys.executable, "-c", FORKED.format(work=work)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
        **streams,
    )


@pytest.mark.parametrize(
    ("work", "full", "status"),
    [("refused", "stderr", 2), ("lambda: print('a line') or 0", "stdout", 0)],
)
def test_where_nobody_takes_what_it_says_its_status_stands(work, full, status, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("a disk that is full")
    with open("/dev/full", "w") as nobody:
        assert forked(work, tmp_path, **{full: nobody}).returncode == status


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("OSError(28, 'No space left on device', 'x')", "No space left on device: x."),
        pytest.param("MemoryError()", f"{LACKS_MEMORY}.", marks=pytest.mark.long),
        ("KeyError('y')", "KeyError: 'y' (the whole traceback is in log)."),
    ],
)
def test_what_the_machine_refuses_one_of_them_is_said_in_a_sentence(raised, said, tmp_path):
    work = f"lambda: (_ for _ in ()).throw({raised})"
    done = forked(work, tmp_path, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, f"fednet run: {said}\n")


def test_an_error_is_printed_in_one_place():
    files = sorted((ROOT / "fednet").rglob("*.py"))
    told = [f.name for f in files if "file=sys.stderr" in f.read_text("utf-8")]
    told += [f.name for f in files if "sys.stderr.write" in f.read_text("utf-8")]
    assert told == ["errors.py"]

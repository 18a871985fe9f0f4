"""The books of a run whose server is killed and goes on are those that are recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_books_of_runs_that_were_killed_are_as_recorded():
    # A process of its own: it forks, and `train.portable` has to be set before torch computes.
    command = [sys.executable, "-m", "tests.golden.books"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr

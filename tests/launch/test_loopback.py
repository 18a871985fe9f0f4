"""A machine whose network has no loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ALONE = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.long
def test_without_a_loopback_a_run_ends_at_once_with_the_cause(tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs a network of its own")
    words = [sys.executable, "-m", "fednet.cli.main", "run", "--quiet", "--out", str(tmp_path)]
    done = subprocess.run([*ALONE, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "this machine's network has no loopback: 127.0.0.1 cannot be reached" in done.stderr
    assert "no client joined" not in done.stderr

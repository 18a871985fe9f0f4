"""Every method and every part that changes bits still ends with the recorded hashes."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.golden.bits import FILE

ROOT = Path(__file__).parents[2]
KNOWN = json.loads(FILE.read_text())


def has_avx2() -> bool:
    cpu = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and cpu.exists() and "avx2" in cpu.read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    torch.__version__ != KNOWN["torch"] or not has_avx2(),
    reason=f"the hashes are those of torch {KNOWN['torch']} on x86-64 with AVX2",
)
def test_runs_end_with_the_recorded_bits():
    # A process of its own: `train.portable` has to be set before torch computes for the first time.
    command = [sys.executable, "-m", "tests.golden.bits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr

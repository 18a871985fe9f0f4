"""Every method and every part that changes bits still ends with the recorded hashes; and the books
of runs whose server is killed and resumed are the recorded ones.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.golden.bits import FILE
from tests.processes import ROOT

KNOWN = json.loads(FILE.read_text())


def has_avx2() -> bool:
    cpu = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and cpu.exists() and "avx2" in cpu.read_text()


SAME_PLATFORM = pytest.mark.skipif(
    torch.__version__ != KNOWN["torch"] or not has_avx2(),
    reason=f"the hashes are those of torch {KNOWN['torch']} on x86-64 with AVX2",
)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "words",
    [
        pytest.param("bits --half 0", marks=SAME_PLATFORM),
        pytest.param("bits --half 1", marks=SAME_PLATFORM),
        "books",
    ],
)
def test_runs_end_as_recorded(words):
    # A process of its own: `train.portable` has to be set before torch computes for the first time.
    command = [sys.executable, "-m", *f"tests.golden.{words}".split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr

"""`python -m tests.bench`: an option that cannot be measured is refused before anything runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.bench.__main__ import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pack --workload cnn,moon", "unknown workload 'moon'"),
        ("round --repeat 0", "expected a whole number of at least 1, got '0'"),
        ("round --workload W1,moon", "unknown workload 'moon'"),
        ("card --part moon", "unknown part 'moon'"),
        ("moon", "invalid choice: 'moon'"),
    ],
)
def test_an_option_that_cannot_be_measured_is_refused(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_what_measures_memory_has_no_torch_of_its_own():
    """The pages of its libraries would be shared, and count half for the run that is measured."""
    seen = "import sys, tests.bench.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], check=False).returncode == 0

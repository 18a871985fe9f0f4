"""`python -m tests.bench`: an option that cannot be measured is refused before anything runs."""

from __future__ import annotations

import pytest

from tests.bench.__main__ import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("secagg --dropout nan", "expected shares from 0 to below 1, got 'nan'"),
        ("secagg --clients 2", "--clients 2: expected at least 3"),
        ("secagg --clients 10,99999999", "expected a whole number from 1 to 10000"),
        ("pack --json /nowhere/x.json", "there is no folder '/nowhere'"),
        ("pack --workload cnn,moon", "unknown"),
        ("round --repeat 0", "expected a whole number from 1 to 1000, got '0'"),
        ("round --workload W1,moon", "unknown workload 'moon'"),
        ("round --set rounds=1", "unrecognized arguments: --set rounds=1"),
        ("moon", "invalid choice: 'moon'"),
    ],
)
def test_an_option_that_cannot_be_measured_is_refused(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err

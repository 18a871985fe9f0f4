"""The books of a run whose server is killed and goes on are those that are recorded."""

from __future__ import annotations

import json

import pytest

from tests.golden.books import FILE, cases, sums

KNOWN = json.loads(FILE.read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", cases())
def test_the_books_of_a_run_that_was_killed_are_as_recorded(tmp_path, name):
    assert sums(cases()[name], tmp_path) == KNOWN[name]

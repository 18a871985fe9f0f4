from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("sizes", ROOT / ".ci" / "sizes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_over_its_limit(check):
    assert check.over(check.sizes()) == []


def test_a_long_file_a_long_function_and_many_arguments_are_noticed(check, tmp_path):
    (tmp_path / "p").mkdir()
    names = ", ".join("abcdefghi")
    body = "\n".join(["    pass"] * 60)
    (tmp_path / "p" / "one.py").write_text(f"def long({names}):\n{body}\n" + "\n" * 300)
    (tmp_path / "p" / "two.py").write_text(
        f'def said({names}):\n    """Nine arguments."""\n'
        "from typing import Any\n\nAny  # why\n# why\nAny\nAny\n"
    )
    assert check.over(check.sizes(tmp_path, "p")) == [
        "p/one.py: 361 lines, at most 350",
        "p/one.py::long: 61 lines, at most 60",
        "p/one.py::long: 9 arguments, at most 8",
        "p/two.py:8: 1 line with Any and without a comment that says why, at most 0",
        "p: 9 of a thousand lines with Any, at most 1",
    ]

"""What a paper does not say, or says twice differently, and what the runs take instead
(`settled.yaml`).
"""

from __future__ import annotations

import functools
from pathlib import Path

import yaml

from fednet.plain import JsonDict


@functools.cache
def settled() -> dict[str, list[JsonDict]]:
    """Paper -> [{text, in: {table, method, values}}]; `in`, where it is, says by which cells'
    values the text can be checked.
    """
    found: dict[str, list[JsonDict]] = yaml.safe_load(
        (Path(__file__).parent / "settled.yaml").read_text(encoding="utf-8")
    )
    return found


def lines(paper: str) -> list[str]:
    """The settled choices as they stand in RESULTS.md."""
    return [
        "Where the paper is silent, or says two things, the runs take:",
        "",
        *(f"- {entry['text']}" for entry in settled()[paper]),
    ]

"""Rows of a table, as runs of it leave them."""

from __future__ import annotations

from typing import Any

from fednet.papers import results


def rows(
    measure: str = "best_accuracy", **methods: tuple[float | None, list[float | None]]
) -> list[Any]:
    """By method: the paper's figure, and ours by seed."""
    blank = dict.fromkeys(results.FIXED) | {
        "table": "paper/table",
        "scale": "full",
        "dataset": "D",
        "heterogeneity": "alpha=1",
        "status": "done",
        "measure": measure,
    }
    return [
        {**blank, "method": name, "paper": paper, "ours": value, "seed": seed}
        for name, (paper, values) in methods.items()
        for seed, value in enumerate(values)
    ]

"""What a sweep says as it goes: the cell that begins, how the last ended, how long it takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from fednet.descriptors import named


class SweepProgress:
    """The progress of the cells that one process does. cells: how many there are; folder: where
    they are.
    """

    def __init__(
        self, cells: int, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cells, self._folder, self._clock = cells, folder, clock
        self._began, self._ended, self._unsaid = clock(), 0, list[str]()

    def ended(self, name: str) -> None:
        """That cell has."""
        self._ended += 1
        self._unsaid.append(name)

    def begins(self, number: int, name: str) -> str:
        """The line for a cell, the number-th, that begins now."""
        said = [f"[{number}/{self._cells}] {name}"]
        if self._ended:
            each = (self._clock() - self._began) / self._ended
            said.append(f"about {_span(each * (self._cells - number + 1))} left")
        for last in self._unsaid:
            accuracy = self._accuracy(last)
            if accuracy is not None:
                said.append(f"{last} ended with global accuracy {100 * accuracy:.2f} %")
        self._unsaid.clear()
        return "; ".join(said)

    def _accuracy(self, name: str) -> float | None:
        try:
            summary = json.loads(named(self._folder / name / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # it failed
        return (summary.get("accuracy") or {}).get("final")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

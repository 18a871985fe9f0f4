"""How a server process is started: where it computes, and who watches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fednet.plain import JsonMapping
from fednet.records.rows import Round, Row


class Watcher(Protocol):
    """Who is told of a run while it goes: `cli.display.Display`, `launch.start.Silent`."""

    def __enter__(self) -> object: ...

    def __exit__(self, *what: object) -> None: ...

    def round_started(self, round: int, rounds: int, cohort: Sequence[int], /) -> None: ...

    def progress(self, info: JsonMapping, /) -> None:
        """Whom the round waits for: `waiting` and `arrived`, see `ServerIO.snapshot`."""
        ...

    def round_done(self, record: Row, /) -> None: ...

    def note(self, text: str, /) -> None: ...

    def warn(self, text: str, /) -> None:
        """What is said with --quiet too."""
        ...

    def finished(self, summary: JsonMapping, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Hosting:
    """display: shows the run while it goes. command: the words that started it, for the summary.
    data: where data lie. until: on the monotonic clock, when to stop. callback: called with the
    record of each round.
    """

    display: Watcher
    command: Sequence[str] = ()
    device: str = "auto"
    data: Path | None = None
    until: float | None = None
    callback: Callable[[Round], None] | None = None

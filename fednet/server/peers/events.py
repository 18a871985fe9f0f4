"""The run's events as they are written: what peers can bring about at will is thinned out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fednet.files import read_lines
from fednet.plain import JsonDict

# Events that a peer can bring about at will.
LOUD = ("refused", "late", "doubled", "failed", "data_changed")
# Of such events, those of one kind and worker have one line in this time, and are counted.
QUIET_S = 1.0


def said(run: Path, event: str) -> Iterator[JsonDict]:
    """The events of that type that are on record in a run's directory."""
    return (e for e in read_lines(run / "events.jsonl") if e["type"] == event)


class Events:
    """The run's events, with those that a peer can bring about at will thinned out: the first of a
    kind and worker is written, and a moment later how many more there were. Called by one thread.
    note(event, fields): writes one.
    """

    def __init__(self, note: Callable[[str, JsonDict], None]) -> None:
        self._note = note
        self._loud: dict[tuple[str, str, str], tuple[float, int, JsonDict]] = {}

    def tell(self, event: str, fields: JsonDict) -> None:
        if event not in LOUD:
            return self._note(event, fields)
        name = (event, str(fields.get("what", "")), str(fields.get("worker", "")))
        if name in self._loud:
            since, more, _ = self._loud[name]
            self._loud[name] = since, more + 1, fields
        else:
            self._note(event, fields)
            self._loud[name] = time.monotonic(), 0, {}

    def write_counts(self, last: bool = False) -> None:
        """Writes what was only counted for long enough; last: all of it."""
        now = math.inf if last else time.monotonic()
        for name, (since, more, fields) in list(self._loud.items()):
            if now - since < QUIET_S:
                continue
            if more:
                self._note(name[0], {**fields, "count": more})
                self._loud[name] = now, 0, {}
            else:
                del self._loud[name]

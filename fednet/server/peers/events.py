"""The run's events as they are written: what peers can bring about at will is thinned out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fednet.errors import timed
from fednet.files import read_lines
from fednet.ids import as_text
from fednet.plain import JsonDict

log = logging.getLogger(__name__)

# Events that a peer can bring about at will.
LOUD = ("refused", "late", "doubled", "failed", "data_changed")
# Of such events, those of one kind and worker have one line in this time, and are counted.
QUIET_S = 1.0
# What is said of a site, by event. Of one that is gone: why.
SITES = {
    "joined": "joined",
    "rejoined": "connected again",
    "ready": "ready",
    "away": "",
    "back": "heard of again",
    "superseded": "another process has taken its place",
}
EXPECTED = ("joined", "ready")  # which are for the log alone


def said(run: Path, event: str) -> Iterator[JsonDict]:
    """The events of that type that are on record in a run's directory."""
    return (e for e in read_lines(run / "events.jsonl") if e["type"] == event)


def in_words(event: str, fields: JsonDict) -> str:
    """What is said of a site that came, went or was refused; "" for other events."""
    if event == "refused" and fields["what"] in ("join", "connection", "ready"):
        whose = fields.get("address") or fields.get("worker") or "a client process"
        return f"refused {whose}: {fields['reason']}"
    if event not in SITES:
        return ""
    who = f"client(s) {as_text(fields['clients'])}"
    if fields.get("host"):
        who += f" on {fields['host']}, process {fields['pid']}"
    return f"{who}: {fields['why'] if event == 'away' else SITES[event]}"


class Events:
    """The run's events, with those that a peer can bring about at will thinned out: the first of a
    kind and worker is written, and a moment later how many more there were. Called by one thread.
    note(event, fields): writes one. say(text): shows what is said of sites that go, come back or
    are refused, until it is set to None.
    """

    def __init__(
        self,
        note: Callable[[str, JsonDict], None],
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._write, self.say = note, say
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

    def _note(self, event: str, fields: JsonDict) -> None:
        self._write(event, fields)
        if text := in_words(event, fields):
            log.info("%s", text)
            if self.say is not None and event not in EXPECTED:
                self.say(timed(text))

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

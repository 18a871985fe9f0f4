"""The progress of a run: one live line at a terminal, plain lines elsewhere, nothing with
--quiet.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fednet.cli import words
from fednet.errors import complain, nowhere, timed
from fednet.ids import as_text
from fednet.plain import JsonDict, JsonMapping

if TYPE_CHECKING:
    from fednet.records.rows import Row

ERASE = "\r\x1b[2K"


def redrawn() -> bool:
    """Whether a line can be drawn over. A notebook is no terminal: Jupyter claims to be one for
    `!fednet` in a cell, but keeps every line.
    """
    notebook = "JPY_PARENT_PID" in os.environ
    return sys.stdout.isatty() and not notebook and os.environ.get("TERM") != "dumb"


class Display:
    """Called by the engine's loop; holds nothing that the run needs. live: whether it draws a line
    on how the run goes on. Only the process that has entered it does, so that there is one.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.live = quiet, False
        self._redrawn = redrawn()
        self.round, self.head = 0, "starting"
        self.waiting: JsonDict = {}
        self.started = time.monotonic()

    def __enter__(self) -> Display:
        self.live = self._redrawn and not self.quiet
        return self

    def __exit__(self, *what: object) -> None:
        self._end_line()

    # -- called by the engine ----------------------------------------------------------------------
    def round_started(self, round: int, rounds: int, cohort: Sequence[int]) -> None:
        self.round = round
        noun = "client" if len(cohort) == 1 else "clients"
        self.head = f"round {round}/{rounds}: {noun} {as_text(cohort)}"
        self.waiting = {}
        self._draw()

    def progress(self, info: JsonMapping) -> None:
        """info: `waiting`, a list of records (client, host, pid, device, phase, step, steps,
        since), and `arrived`, a list of ids.
        """
        self.waiting = dict(info)
        self._draw()

    def round_done(self, record: Row) -> None:
        if record.get("round") == self.round:  # else the next has been opened before
            self.head, self.waiting = f"{self.head.partition(':')[0]} is done", {}
        line = words.round_line(record)
        self.note(line if self.live else timed(line))

    def note(self, text: str) -> None:
        if not self.quiet:
            # Another process may be drawing its line.
            self._write(f"{ERASE if self._redrawn else ''}{text}\n")
            self._draw()

    def warn(self, text: str) -> None:
        """On stderr, with --quiet too."""
        complain(timed(text))

    def finished(self, summary: JsonMapping) -> None:
        """The final table."""
        self._end_line()
        rows = words.summary_rows(summary)
        width = max((len(name) for name, _ in rows), default=0) + 2
        for name, value in rows:
            self.note(f"{name:<{width}}{value}")

    # -- how it looks ------------------------------------------------------------------------------
    def _end_line(self) -> None:
        if self.live:
            self._write(ERASE)
        self.live = False

    def _line(self) -> str:
        spent = words.span(time.monotonic() - self.started)
        return f"{self.head}  {words.waiting_for(self.waiting, time.time())}  {spent}".strip()

    def _draw(self) -> None:
        if self.live:
            wide = shutil.get_terminal_size().columns - 1
            self._write(f"{ERASE}{self._line()[:wide]}")

    def _write(self, text: str) -> None:
        """A reader that has gone, such as a closed terminal or a full disk, does not stop the
        run.
        """
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            self.quiet, self.live = True, False
            nowhere(sys.stdout)

"""The progress of a run: one live line at a terminal, plain lines elsewhere, nothing with
--quiet.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fednet.cli import words
from fednet.errors import complain, nowhere, timed
from fednet.plain import JsonDict, JsonMapping

if TYPE_CHECKING:
    from fednet.records.rows import Row


def redrawn() -> bool:
    """Whether a line can be drawn over. FORCE_COLOR does not make a terminal, and neither does a
    notebook: Jupyter claims to be one for `!fednet` in a cell, but keeps every line.
    """
    notebook = "JPY_PARENT_PID" in os.environ
    return sys.stdout.isatty() and not notebook and os.environ.get("TERM") != "dumb"


class PlainConsole(Console):
    """A console whose reader may go: a closed pipe or terminal, or a full disk, does not stop the
    run. rich would end the process, or raise.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere(sys.stdout)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()


class Display:
    """Called by the engine's loop; holds nothing that the run needs. The engine enters it after it
    has forked its processes.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or PlainConsole(
            highlight=False,
            soft_wrap=True,
            force_terminal=redrawn(),
            force_jupyter=False,
        )
        self.quiet = quiet
        self.live: Live | None = None
        self.round, self.head = 0, "starting"
        self.waiting: JsonDict = {}
        self.started = time.monotonic()

    def __enter__(self) -> Display:
        if not self.quiet and self.console.is_terminal:
            # Drawn by a thread of rich's own, four times a second: the engine only leaves the
            # newest facts here.
            self.live = Live(
                console=self.console,
                get_renderable=self._line,
                refresh_per_second=4,
                transient=True,
            )
            self.live.start()
        return self

    def __exit__(self, *what: object) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    # -- called by the engine ----------------------------------------------------------------------
    def round_started(self, round: int, rounds: int, cohort: Sequence[int]) -> None:
        self.round = round
        self.head = f"round {round}/{rounds}: {words.ids(cohort)}"
        self.waiting = {}

    def progress(self, info: JsonMapping) -> None:
        """info: `waiting`, a list of records (client, host, pid, device, phase, step, steps,
        since), and `arrived`, a list of ids.
        """
        self.waiting = dict(info)

    def round_done(self, record: Row) -> None:
        if record.get("round") == self.round:  # else the next has been opened before
            self.head, self.waiting = f"{self.head.partition(':')[0]} is done", {}
        line = words.round_line(record)
        self._say(line if self.console.is_terminal else timed(line))

    def note(self, text: str) -> None:
        self._say(text)

    def warn(self, text: str) -> None:
        """On stderr, with --quiet too."""
        complain(timed(text))

    def finished(self, summary: JsonMapping) -> None:
        """The final table."""
        if self.quiet:
            return
        if self.live is not None:
            self.live.stop()
            self.live = None
        rows = words.summary_rows(summary)
        if not self.console.is_terminal:  # plain lines, never folded: to be searched
            width = max((len(name) for name, _ in rows), default=0) + 2
            for name, value in rows:
                self._say(f"{name:<{width}}{value}")
            return
        made = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        made.add_column(no_wrap=True)
        made.add_column(overflow="fold")
        for name, value in rows:
            made.add_row(Text(name), Text(value))
        self.console.print(made)

    # -- how it looks ------------------------------------------------------------------------------
    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text))

    def _line(self) -> Text:
        spent = words.span(time.monotonic() - self.started)
        return Text(
            f"{self.head}  {words.waiting_for(self.waiting, time.time())}  {spent}".strip(),
            overflow="ellipsis",
            no_wrap=True,
        )

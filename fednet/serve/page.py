"""The page of `fednet serve`: the queue, the clients, and each run's curves, bytes and log.

It is read-only: `fednet queue` submits and cancels runs.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections import Counter
from pathlib import Path

from fednet.errors import ConfigError, FednetError
from fednet.files import last_lines
from fednet.plain import JsonDict
from fednet.records import line_parts
from fednet.report import open_run, page, status
from fednet.serve.http import Pages
from fednet.serve.queue import Queue

NUMBER = "[0-9]{1,9}"
REFRESH_S = 5
REDRAWN_S = 60  # drawing takes seconds of a processor that the run needs


class QueuePages(Pages):
    """Serves the pages of a folder. One thread draws at a time, as matplotlib requires."""

    def __init__(self, address: tuple[str, int], queue: Queue) -> None:
        self.queue = queue
        self._drawing = threading.Lock()
        super().__init__(address, f"--page {address[0]}:{address[1]}")

    def page(self, path: str, accept: str) -> tuple[bytes, str]:
        run = re.fullmatch(f"/runs/({NUMBER})", path)
        if path == "/":
            text = self.index()
        elif run:
            text = self.run(int(run[1]))
        else:
            raise ConfigError("There is no such page.")
        return text.encode(), "text/html; charset=utf-8"

    def index(self) -> str:
        entries = self.queue.entries()
        order = {entry.number: place for place, entry in enumerate(self.queue.open(entries))}
        shown = []
        for entry in reversed(entries):
            run = self.queue.run_folder(entry)
            has = (run / "rounds.jsonl").exists()
            state: str = entry.state
            log: list[str] = []
            now = ""
            if entry.state == "waiting":
                before = order[entry.number]
                state += f", {before} before it" if before else ", it starts next"
            elif entry.state == "running":
                if self.queue.is_cancelled(entry):
                    state += ", it is being stopped"
                log = last_lines(run / "log" / "server.log", 12)
                if (run / "status.json").exists():
                    now = _status(run)
            found: JsonDict = {"entry": entry, "state": state, "status": now, "log": log}
            shown.append(
                found | {"has": has, "result": _result(run, _version_of(run)) if has else ""}
            )
        states = Counter(entry.state for entry in entries)
        return (
            page.templates()
            .get_template("serve.jinja")
            .render(
                folder=str(self.queue.folder),
                runs=shown,
                states=", ".join(f"{count} {state}" for state, count in states.items()),
                refresh=REFRESH_S,
            )
        )

    def run(self, number: int) -> str:
        """The report of a run, as far as it is."""
        run = self.queue.run_folder(self.queue.entry(number))
        with self._drawing:
            return _report(run, _version_of(run))


def _status(run: Path) -> str:
    """Returns what a run is doing; what is wrong with its status.json hides no other run."""
    try:
        return status.text(status.read(run), run, time.time())
    except (FednetError, OSError) as broken:
        return str(broken)
    except (ValueError, OverflowError):  # a time that is none
        return f"{run / 'status.json'}: not what was written there."


@functools.lru_cache(maxsize=10)
def _report(run: Path, changed: tuple[float, bool]) -> str:
    return page.render([open_run(run)], again=REDRAWN_S)


@functools.lru_cache(maxsize=1000)
def _result(run: Path, changed: tuple[float, bool]) -> str:
    """Returns the newest numbers of a run, and how long its rounds took so far."""
    try:
        rounds = open_run(run).rounds
    except (FednetError, OSError) as broken:
        return str(broken)
    pieces = [f"{len(rounds)} rounds in {status.span(sum(r.seconds or 0.0 for r in rounds))}"]
    measured = filter(None, map(line_parts, reversed(rounds)))
    return ", ".join(pieces + next(measured, []))


def _version_of(run: Path) -> tuple[float, bool]:
    """Another value when the run has another round, or has ended."""
    rows = (run / "rounds.jsonl").stat().st_mtime if run.is_dir() else 0.0
    return rows, (run / "summary.json").exists()


def serve(address: tuple[str, int], queue: Queue) -> QueuePages:
    """Starts to serve, in threads of its own, until `end`. Raises ConfigError."""
    server = QueuePages(address, queue)
    server.begin()
    return server

"""Works through the queue: one run after the other, each a `fednet-server` at the same address with
the same keys, so that clients with --stay find every one.

A run's process ends with this one, however this one ends; the next `fednet serve` continues that
run from its checkpoint.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from fednet.errors import ConfigError, Stopped, signal_name, stop_signals
from fednet.experiment import lock
from fednet.files import last_lines
from fednet.launch.parent import RunProcess
from fednet.serve.queue import Queue, QueuedRun

LOOK_S = 0.2


class Runner:
    """words: further arguments of each `fednet-server`, such as --bind. say: gets a line a run."""

    def __init__(self, queue: Queue, words: Sequence[str], say: Callable[[str], None]) -> None:
        self.queue = queue
        self._words = list(words)
        self._say = say
        self._stop = threading.Event()
        self._by_keyboard = False

    def run(self) -> None:
        """Works through the queue until it is asked to stop, and then raises Stopped. Raises
        ConfigError if another process serves this folder.
        """
        for number in stop_signals():
            signal.signal(number, self._request_stop)
        with lock.holding(self.queue.folder):
            while not self._stop.is_set():
                # The run that was running when the last runner ended comes before those that wait.
                if entries := self.queue.open(self.queue.entries()):
                    self._run_one(entries[0])
                else:
                    self._stop.wait(LOOK_S)
        raise Stopped("stopped; queued runs are kept.", self._by_keyboard)

    def _request_stop(self, number: int, frame: object) -> None:
        self._by_keyboard = number == signal.SIGINT
        self._stop.set()

    def _run_one(self, entry: QueuedRun) -> None:
        continues = entry.state == "running"
        entry.state = "running"
        self.queue.write(entry)
        self._say(f"run {entry.number} ({entry.name}) {'continues' if continues else 'starts'}")
        status, last = self._run_server(entry)
        if self._stop.is_set() and (status in (4, 130) or status < 0):
            return  # the next `fednet serve` continues it
        entry.status = status
        entry.reason = last
        entry.state = "done" if status == 0 else "failed"
        if self.queue.is_cancelled(entry) and status != 0:
            entry.state = "cancelled"
            entry.reason = ""
        elif status not in (0, ConfigError.exit_status):  # a run that was not refused can continue
            at = shlex.quote(str(self.queue.folder))
            entry.reason = (
                f"{last} To continue it: fednet queue submit --at {at} --resume {entry.number}"
            )
        self.queue.write(entry)
        why = f": {entry.reason}" if entry.reason else ""
        self._say(f"run {entry.number} ({entry.name}) {entry.state}{why}")

    def _run_server(self, entry: QueuedRun) -> tuple[int, str]:
        """(exit status, last line) of the run's process. One that is killed has no last line."""
        self.queue.runs.mkdir(parents=True, exist_ok=True)
        config = self.queue.runs / f".{entry.name}.yaml"
        config.write_text(entry.config, encoding="utf-8")
        log = self.queue.runs / f".{entry.name}.log"
        line = [sys.executable, "-m", "fednet.cli.server", str(config), *self._words]
        if (self.queue.runs / entry.name / "config.yaml").exists():
            line.append("--resume")
        with log.open("ab") as out:
            began = out.tell()
            process = RunProcess([*line, "--out", str(self.queue.runs)], out)
        try:
            status = None
            while status is None:
                time.sleep(LOOK_S)
                status = process.status(self._stop.is_set() or self.queue.is_cancelled(entry))
        finally:
            process.close()
            config.unlink(missing_ok=True)
        last = "" if status == 0 else "".join(last_lines(log, start=began))[:300]
        if status < 0:
            last = f"ended by {signal_name(-status)}. {last}".rstrip()
        return status, last

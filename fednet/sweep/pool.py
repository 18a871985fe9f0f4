"""Runs of a sweep or a table, J at a time, each in a process of its own under a claim.

A run that is done is left alone, one that was cut short is resumed, and one that another process
does is left to it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from fednet import config as configuration
from fednet.errors import CannotGoOn, StateError, Stopped, stop_signals
from fednet.experiment import placement
from fednet.files import write_aside
from fednet.server.watch import stop_signals_handled
from fednet.sweep import claims, marks
from fednet.sweep.marks import RunSpec

STOP_S = 30.0  # a run stops cleanly within 10 s of being asked
LOOK_S = 0.2  # between two looks at the processes and at what was asked
STOPPED = (4, 130)  # exit statuses of a run that was asked to stop
# glibc gives large blocks back to the system at once, and then takes them again for the next batch:
# a third of a small run's processor time. With these a run keeps what it has until it ends.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Running:
    """The process of one run; its output goes to the run's log."""

    def __init__(self, task: RunSpec, held: claims.Claim, words: Sequence[str]) -> None:
        self.task = task
        self._held, self._beat, self._deadline = held, time.monotonic(), math.inf
        self._recorded = _recorded(task)
        environment = {**KEEP, **os.environ, **dict.fromkeys(THREADS, "1")}
        with task.book("log").open("wb") as out:
            self._process = held.start(words, out, env=environment)

    def look(self, wait_s: float, stop: bool) -> int | None:
        """Its exit status once it has ended, waiting for at most wait_s. stop: it is asked to end,
        and killed if that takes too long.
        """
        now = time.monotonic()
        if stop and self._deadline == math.inf:
            self._process.terminate()
            self._deadline = now + STOP_S
        if now > self._deadline:
            self._process.kill()
        if now - self._beat > claims.BEAT_S:
            self._held.beat()
            self._beat = now
        try:
            status = self._process.wait(timeout=wait_s)
        except subprocess.TimeoutExpired:
            return None
        self._held.beat()  # raises if the folder is gone: then nothing is marked
        return status

    def state(self, status: int) -> str:
        """The run's state after it ended with that status: done | refused | begun | torn | failed.
        torn: what an earlier start left cannot be continued.
        """
        if status == 0:
            return "done"
        if status == marks.REFUSED:
            return "refused"
        if status in STOPPED or status < 0:  # a signal says nothing about the configuration
            return "begun"
        as_before = self._recorded is not None and _recorded(self.task) == self._recorded
        cannot_go_on = status in (CannotGoOn.exit_status, StateError.resuming)
        return "torn" if cannot_go_on and as_before else "failed"

    def close(self) -> None:
        """Kills it if it still runs, so that no run is left behind without a claim."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._held.release()


def _recorded(task: RunSpec) -> int | None:
    """Rounds that a run has on record; None if it was not begun."""
    if not task.run.exists():
        return None
    path = task.run / "rounds.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def command(task: RunSpec, options: Sequence[str]) -> list[str]:
    """The command line that starts a run, or continues it if it was begun."""
    line = [sys.executable, "-m", "fednet.cli.main", "run", str(task.book("yaml"))]
    resume = ["--resume"] if (task.run / "config.yaml").exists() else []
    return [*line, *resume, "--out", str(task.folder), *options]


def work(
    tasks: Sequence[RunSpec],
    jobs: int,
    device: str,
    *,
    load: Sequence[str] = (),
    sets: Sequence[str] = (),
    options: Sequence[str] = ("--in-process", "--quiet"),
    retry_failed: bool = False,
    notify: Callable[[RunSpec, str], None] = lambda task, state: None,
) -> dict[str, str]:
    """Does the runs that are not done. Returns each one's state by name. load, sets, options:
    further arguments of `fednet run`. retry_failed: else a run that failed (it diverged, say) is
    not tried again; one that was refused (its data are missing, say) always is.

    notify(task, state) is called when a run begins, with "begins", before that with "changed",
    "edited" or "torn" if it has to be done again, when it has ended, and with "held" for one that
    another process does. Raises Stopped, once the runs have saved what they have, if this process
    or one of the runs was asked to stop.
    """
    placement.check(device)  # once, not by each run
    over = ("done",) if retry_failed else ("done", "failed")
    asked = {t.name: marks.digest(t, load, sets) for t in tasks}
    for task in tasks:
        marks.state(task, asked[task.name])  # raises if it cannot be read
        _write_down(task)
    words = ["--device", device, *options]
    words += [word for file in load for word in ("--load", file)]
    words += [word for text in sets for word in ("--set", text)]

    def begin(task: RunSpec) -> Running | None:
        """Starts the run; None if it has ended, or another process does it."""
        if marks.state(task, asked[task.name]) in over:
            return None
        held = claims.claim(task.books, task.name)
        if held is None:
            notify(task, "held")
            return None
        found = marks.state(task, asked[task.name])
        if found in over:  # another process did it meanwhile
            held.release()
            return None
        if found in ("changed", "edited"):
            notify(task, found)
            marks.set_aside(task)
        notify(task, "begins")
        return Running(task, held, command(task, words))

    queue = list({task.run: task for task in tasks}.values())
    for task, state, status in _ended(queue, jobs, begin):
        if state in ("done", "failed"):
            marks.write(task, state, asked[task.name], status)
        notify(task, state)
        if state == "torn":
            marks.set_aside(task)
            queue.insert(0, task)
    return {t.name: marks.state(t, asked[t.name]) for t in tasks}


def _ended(
    waiting: list[RunSpec], jobs: int, begin: Callable[[RunSpec], Running | None]
) -> Iterator[tuple[RunSpec, str, int]]:
    """Each run that `begin` started, once it has ended, with its state and its exit status; at most
    `jobs` at a time. `waiting` may be added to meanwhile.
    """
    going: list[Running] = []
    signals: list[int] = []  # that asked this process to stop
    halted: tuple[str, bool] | None = None  # where, and whether by the keyboard
    with stop_signals_handled(lambda number, frame: signals.append(number)):
        try:
            while going or (waiting and not halted):
                while waiting and len(going) < jobs and not halted:
                    begun = begin(waiting.pop(0))
                    if begun is not None:
                        going.append(begun)
                for one in list(going):
                    status = one.look(LOOK_S / len(going), halted is not None)
                    if signals and not halted:
                        halted = one.task.name, signals[0] == signal.SIGINT
                    if status is None:
                        continue
                    if not halted and (status in STOPPED or -status in stop_signals()):
                        halted = one.task.name, status in (130, -signal.SIGINT)
                    going.remove(one)
                    one.close()
                    yield one.task, one.state(status), status
        finally:
            for one in going:
                one.close()
    if halted:
        where, by_keyboard = halted
        raise Stopped(f"stopped in {where}; the same command continues.", by_keyboard)


def _write_down(task: RunSpec) -> None:
    """Writes the configuration that the run's process reads. It draws no page: one is made over all
    runs.
    """
    task.books.mkdir(parents=True, exist_ok=True)
    path = task.book("yaml")
    whole = configuration.from_mapping({**task.config, "report": False}, str(path))
    text = configuration.to_yaml(whole)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_aside(path, text)

"""Runs in processes of their own, J at a time, each under a claim and all stopped together.

`work` does the runs of a table: each in one process with one thread, which on one machine is the
fastest per core. A run that is done is left alone, one that was cut short is resumed, one that
another process does is left to it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fednet import config as configuration
from fednet.errors import Stopped, stop_signals
from fednet.experiment import placement
from fednet.files import write_aside
from fednet.sweep import claims, marks
from fednet.sweep.marks import REFUSED, TORN, RunSpec

if TYPE_CHECKING:
    from types import FrameType


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)

STOP_S = 30.0  # a run stops cleanly within 10 s of being asked
LOOK_S = 0.2  # between two looks at the processes and at what was asked
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# glibc gives large blocks back to the system at once, and then takes them again for the next batch:
# a third of a small run's processor time. With these a run keeps what it has until it ends.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class Running(Generic[T]):
    """The process of one run. task: what it is for; its output goes to `log`."""

    def __init__(
        self,
        task: T,
        held: claims.Claim,
        words: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.task, self.log = task, log
        self._held, self._beat, self._deadline = held, time.monotonic(), math.inf
        with log.open("wb") as out:
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

    def stopped(self, status: int) -> bool:
        """Whether it ended with that status because it was asked to: cleanly, before it could do so
        cleanly, or killed because it took too long.
        """
        asked = self._deadline < math.inf
        return status in (4, 130) or -status in stop_signals() or (asked and status < 0)

    def close(self) -> None:
        """Kills it if it still runs, so that no run is left behind without a claim."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._held.release()


class Pool:
    """Processes, at most `jobs` at a time, until all is done or a signal asks to stop."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._halted: tuple[str, bool] | None = None

    def halt(self, where: str, by_keyboard: bool) -> None:
        """Starts no more runs, and asks those that run to stop. where: for the message."""
        self._halted = self._halted or (where, by_keyboard)

    def ended(
        self, waiting: list[T], begin: Callable[[T], Running[T] | None]
    ) -> Iterator[tuple[Running[T], int]]:
        """Each run that `begin` started, once it has ended, with its exit status. `waiting` may be
        added to meanwhile. Raises Stopped, once all have ended, if it was halted.
        """
        going: list[Running[T]] = []
        with Stop() as stop:
            try:
                while going or (waiting and not self._halted):
                    while waiting and len(going) < self._jobs and not self._halted:
                        begun = begin(waiting.pop(0))
                        if begun is not None:
                            going.append(begun)
                    for one in list(going):
                        status = one.look(LOOK_S / len(going), self._halted is not None)
                        if stop.asked:
                            self.halt(one.task.name, stop.asked == signal.SIGINT)
                        if status is not None:
                            going.remove(one)
                            one.close()
                            yield one, status
            finally:
                for one in going:
                    one.close()
        if self._halted:
            where, by_keyboard = self._halted
            raise Stopped(f"stopped in {where}; the same command continues.", by_keyboard)


class Stop:
    """Notes which signal asked this process to stop, while it is entered."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = number

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._before.items():
            signal.signal(number, old)


def claimed(task: RunSpec, ended: Callable[[], bool]) -> claims.Claim | None:
    """The claim on a run; None if it has ended, also while it was being claimed, or if another
    process holds it.
    """
    if ended():
        return None
    held = claims.claim(task.books, task.name)
    if held is not None and ended():
        held.release()
        return None
    return held


# -- the runs of a table ---------------------------------------------------------------------------
def work(
    tasks: Sequence[RunSpec],
    jobs: int,
    device: str,
    *,
    load: Sequence[str] = (),
    sets: Sequence[str] = (),
    notify: Callable[[RunSpec, str], None] = lambda task, state: None,
) -> dict[str, str]:
    """Does the runs that are not done. Returns each one's state by name. A run that failed (it
    diverged, say) is not tried again; one that was refused (its data are missing, say) is the next
    time.

    notify(task, state) is called when a run has ended, with "changed", "edited" or "torn" if one
    has to be done again, and with "held" at the end for one that another process still does. Raises
    Stopped if this process was asked to stop, once the runs have saved what they have.
    """
    placement.check(device)  # once, not by each run
    asked = {t.name: marks.digest(t, load, sets) for t in tasks}
    for task in tasks:
        marks.state(task, asked[task.name])  # raises if it cannot be read
        _write_down(task)
    more = [word for file in load for word in ("--load", file)]
    more += [word for text in sets for word in ("--set", text)]
    environment = {**KEEP, **os.environ, **dict.fromkeys(THREADS, "1")}
    held_elsewhere: list[RunSpec] = []

    def begin(task: RunSpec) -> Running[RunSpec] | None:
        def over() -> bool:
            return marks.state(task, asked[task.name]) in ("done", "failed")

        held = claimed(task, over)
        if held is None:
            if not over():
                held_elsewhere.append(task)
            return None
        found = marks.state(task, asked[task.name])
        if found in ("changed", "edited"):
            notify(task, found)
            marks.set_aside(task)
        words = [sys.executable, "-m", "fednet.cli.cellrun", str(task.book("yaml"))]
        words += [str(task.folder), device, *more]
        return Running(task, held, words, task.book("log"), environment)

    queue = list({task.run: task for task in tasks}.values())
    for _ in range(2):  # what another process holds is tried once more at the end
        held_elsewhere.clear()
        for one, status in Pool(jobs).ended(queue, begin):
            word = _word(status)
            if word in ("done", "failed"):
                marks.write(one.task, word, asked[one.task.name], status)
            notify(one.task, word)
            if word == "torn":
                marks.set_aside(one.task)
                queue.insert(0, one.task)
        queue = list(held_elsewhere)
    for task in held_elsewhere:
        notify(task, "held")
    return {t.name: marks.state(t, asked[t.name]) for t in tasks}


def _write_down(task: RunSpec) -> None:
    """Writes the configuration that the run's process reads."""
    task.books.mkdir(parents=True, exist_ok=True)
    path = task.book("yaml")
    text = configuration.to_yaml(configuration.from_mapping(task.config, str(path)))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_aside(path, text)


def _word(status: int) -> str:
    """A run's state after it ended with that exit status."""
    if status < 0:  # killed from outside, which says nothing about the configuration
        return "begun"
    words = {0: "done", REFUSED: "refused", TORN: "torn", 4: "begun", 130: "begun"}
    return words.get(status, "failed")

"""Runs of a table, J processes at a time, each run in one process of its own with one thread.

On one machine that is the fastest per core: a run in a single process sends nothing through a
socket, and needs no core beside its own. What is done is left alone, what was cut short is resumed,
what another process is at is left to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fednet import config as configuration
from fednet.errors import Stopped
from fednet.experiment import placement
from fednet.files import write_aside
from fednet.sweep import claims
from fednet.sweep.marks import REFUSED, TORN, RunSpec, digest, records, set_aside, state, state_now
from fednet.sweep.running import STOP_S, Stop

LOOK_S = 0.2
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# glibc gives large blocks back to the system at once, and then takes them again for the next batch:
# a third of a small run's processor time. What a run has had it keeps until it ends.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


@dataclass
class StartedRun:
    task: RunSpec
    claim: claims.Claim
    process: subprocess.Popen[bytes]
    asked: tuple[str, str]
    beat: float


def work(
    tasks: Sequence[RunSpec],
    jobs: int,
    device: str,
    *,
    load: Sequence[str] = (),
    sets: Sequence[str] = (),
    notify: Callable[[RunSpec, str], None] = lambda task, state: None,
) -> dict[str, str]:
    """Runs what is not done yet. Returns each task's state by name; a failed run (diverged, say) is
    not tried again, one that was refused (for want of its data, say) is the next time.

    notify(task, state) is called when a run has ended, with "changed", "edited" or "torn" when one
    has to be done again, and with "held" at the end for one that another process is still at.
    Raises Stopped where this process was asked to stop, once the runs have saved what they have;
    the same call goes on.
    """
    placement.check(device)  # said once, not by each run
    pool = _Pool(tasks, device, load, sets, notify)
    with Stop() as stop:
        try:
            while pool.open:
                pool.start(jobs, stop)
                if stop.asked:
                    _stop(pool.running)
                    raise Stopped(
                        "the runs were stopped; the same command goes on.",
                        stop.asked == signal.SIGINT,
                    )
                pool.look()
                time.sleep(LOOK_S)
        except BaseException:  # nothing may leave a run behind that no claim speaks for
            for one in pool.running:
                one.process.kill()
                one.process.wait()
            raise
    return pool.states()


class _Pool:
    """Runs under way, and those that wait."""

    def __init__(
        self,
        tasks: Sequence[RunSpec],
        device: str,
        load: Sequence[str],
        sets: Sequence[str],
        notify: Callable[[RunSpec, str], None],
    ) -> None:
        self._tasks, self._device, self._load, self._sets = tasks, device, load, sets
        self._notify = notify
        self._hashes = {t.name: digest(t, load, sets) for t in tasks}
        self.states()  # raises for what cannot be read
        self._queue = list(_each_once(tasks))
        # By another process: asked for once more at the end.
        self._held: list[RunSpec] = []
        self._again = False
        self.running: list[StartedRun] = []
        for task in self._queue:
            _write_down(task)

    def states(self) -> dict[str, str]:
        """Each task's, by name."""
        return {t.name: state(t, self._hashes[t.name]) for t in self._tasks}

    @property
    def open(self) -> bool:
        """Whether there is something left to do."""
        return bool(self._queue or self.running or (self._held and not self._again))

    def start(self, jobs: int, stop: Stop) -> None:
        """Starts as many tasks as may be under way at a time."""
        if not self._queue and not self.running:
            self._queue, self._held, self._again = self._held, [], True
        while self._queue and len(self.running) < jobs and not stop.asked:
            task = self._queue.pop(0)
            asked = self._hashes[task.name]
            begun = _begin(task, asked, self._device, self._load, self._sets, self._notify)
            if begun is not None:
                self.running.append(begun)
            elif state_now(task) not in ("done", "failed"):
                self._held.append(task)
                if self._again:
                    self._notify(task, "held")

    def look(self) -> None:
        """Which runs have ended; the claims of the others are kept alive."""
        for one in list(self.running):
            if one.process.poll() is not None:
                self.running.remove(one)
                word = _settle(one)
                self._notify(one.task, word)
                if word == "torn":
                    set_aside(one.task)
                    self._queue.insert(0, one.task)
            elif time.monotonic() - one.beat > claims.BEAT_S:
                one.claim.beat()
                one.beat = time.monotonic()


def _each_once(tasks: Sequence[RunSpec]) -> Iterator[RunSpec]:
    seen = set()
    for task in tasks:
        if task.run not in seen:
            seen.add(task.run)
            yield task


def _write_down(task: RunSpec) -> None:
    task.books.mkdir(parents=True, exist_ok=True)
    path = task.books / f"{task.name}.yaml"
    text = configuration.to_yaml(configuration.from_mapping(task.config, str(path)))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_aside(path, text)


def _begin(
    task: RunSpec,
    asked: tuple[str, str],
    device: str,
    load: Sequence[str],
    sets: Sequence[str],
    notify: Callable[[RunSpec, str], None],
) -> StartedRun | None:
    if state(task, asked) in ("done", "failed"):
        return None
    held = claims.claim(task.books, task.name)
    if held is None:
        return None
    found = state(task, asked)
    if found in ("done", "failed"):  # by the one that held it until now
        held.release()
        return None
    if found in ("changed", "edited"):
        notify(task, found)
        set_aside(task)
    words = [
        sys.executable,
        "-m",
        "fednet.cli.cellrun",
        str(task.books / f"{task.name}.yaml"),
        str(task.folder),
        device,
    ]
    words += [w for file in load for w in ("--load", file)] + [
        w for text in sets for w in ("--set", text)
    ]
    environment = {**KEEP, **os.environ, **dict.fromkeys(THREADS, "1")}
    with (task.books / f"{task.name}.log").open("wb") as log:
        process = held.start(words, log, env=environment)
    return StartedRun(task, held, process, asked, time.monotonic())


def _settle(one: StartedRun) -> str:
    one.claim.beat()  # of a folder that is gone nothing is noted
    status = one.process.returncode
    word = {0: "done", REFUSED: "refused", TORN: "torn", 4: "begun", 130: "begun"}.get(
        status, "failed"
    )
    if status < 0:  # killed from outside: nothing that the configuration is to blame for
        word = "begun"
    if word in ("done", "failed"):
        mark = one.task.books / f"{one.task.name}.{word}"
        write_aside(mark, f"{one.asked[0]} {status} {records(one.task)} {one.asked[1]}\n")
    one.claim.release()
    return word


def _stop(running: Sequence[StartedRun]) -> None:
    for one in running:
        one.process.terminate()
    until = time.monotonic() + STOP_S
    for one in running:
        try:
            one.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        _settle(one)
    if isinstance(running, list):
        running.clear()

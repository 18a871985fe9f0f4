"""Does the runs of a sweep or a table, some at a time, each in a process of its own.

    FOLDER/NAME/           a run
    FOLDER/.cells/NAME/    its configuration, its log, a lock while a process is at it, and a file
                           `failed` if it failed
    FOLDER/.cells/order    the names of all runs, in the order of the sweep

The state of a run follows from its directory. A run that is done is left alone, one that was cut
short is resumed, and one that another process is at is left to it.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fednet import config as configuration
from fednet.config import WHERE
from fednet.errors import ConfigError, Stopped, stop_signals
from fednet.experiment import lock, placement
from fednet.files import last_lines, read_text, write_aside
from fednet.launch.parent import RunProcess
from fednet.launch.start import check_code
from fednet.plain import JsonDict
from fednet.server.watch import stop_signals_handled
from fednet.sweep import order

LOOK_S = 0.05  # between two looks at the processes
REFUSED = ConfigError.exit_status  # the configuration or the data are at fault
STOPPED = (4, 130)  # exit statuses of a run that was asked to stop
# glibc gives large blocks back to the system at once, and then takes them again for the next batch:
# a third of a small run's processor time. With these a run keeps what it has until it ends.
KEEP = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class RunSpec:
    """A run to be made: `config` is its whole configuration; the directory is `folder` / its
    name.
    """

    config: JsonDict
    folder: Path

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def run(self) -> Path:
        return self.folder / self.name

    @property
    def books(self) -> Path:
        return self.folder / ".cells" / self.name

    @property
    def log(self) -> Path:
        return self.books / "log"

    @property
    def state(self) -> str:
        """done | failed | begun | to do."""
        if (self.run / "summary.json").exists():
            return "done"
        if (self.books / "failed").exists():
            return "failed"
        return "begun" if self.run.exists() else "to do"

    @property
    def why(self) -> str:
        """The last line that the run printed; empty if there is none."""
        return "".join(last_lines(self.log))

    def check(self) -> configuration.Config:
        """Returns its configuration. Raises ConfigError if it is wrong, or if the run is done and
        had another configuration or other files of the user.
        """
        whole = configuration.from_mapping(self.config, self.name)
        if self.state == "done":
            path = self.run / "config.yaml"
            if not path.exists():
                raise ConfigError(f"{path} is missing; put it back, or delete the run.")
            before = configuration.compose(read_text(path, "delete the run"), str(path)).plain()
            both = [before, configuration.to_mapping(whole)]
            if changed := configuration.differing(both, ("report", "load", "track", *WHERE)):
                raise ConfigError(
                    f"{self.run} was run under another configuration ({', '.join(changed)}); give "
                    f"another name or --out."
                )
            check_code(whole, self.run / "code")
        return whole


def command(task: RunSpec, options: Sequence[str]) -> list[str]:
    """Returns the command line that starts a run, or continues it if it was begun."""
    line = [sys.executable, "-m", "fednet.cli.main", "run", str(task.books / "config.yaml")]
    resume = ["--resume"] if (task.run / "config.yaml").exists() else []
    return [*line, *resume, "--out", str(task.folder), *options]


class Running:
    """The process of one run, which holds the run's lock."""

    def __init__(self, task: RunSpec, held: lock.Lock, options: Sequence[str]) -> None:
        self.task = task
        self._held = held
        (task.books / "failed").unlink(missing_ok=True)
        if not (task.run / "checkpoint" / "manifest.json").exists():
            shutil.rmtree(task.run, ignore_errors=True)  # nothing of it can be continued
        env = {**KEEP, **os.environ, **dict.fromkeys(THREADS, "1")}
        with task.log.open("wb") as out:
            self.process = RunProcess(command(task, options), out, env)

    def close(self) -> None:
        self.process.close()
        self._held.release()


def work(
    tasks: Sequence[RunSpec],
    jobs: int,
    device: str,
    options: Sequence[str] = ("--in-process", "--quiet"),
    notify: Callable[[RunSpec, str], None] = lambda task, state: None,
) -> None:
    """Does the runs that are not done, `jobs` at a time. options: arguments of `fednet run`.

    notify(task, state) is called with "begins" and, when a run has ended, with done | refused |
    begun | failed; with "held" for one that another process is at. Raises ConfigError before
    anything starts, and Stopped, once the runs have saved what they have, if this process or one of
    the runs was asked to stop.
    """
    placement.check(device)  # once, not by each run
    if "--in-process" in options and "--workers" not in options:
        # The cores are shared by the runs that are done at a time.
        options = (*options, "--workers", str(max(1, placement.cores() // jobs)))
    waiting = {task.run: (task, task.check()) for task in tasks}
    for folder in {task.folder for task in tasks}:
        order.append(folder, [task.name for task in tasks if task.folder == folder])
    going: list[Running] = []
    signals: list[int] = []  # that asked this process to stop
    halted: tuple[str, bool] | None = None  # where, and whether by the keyboard
    with stop_signals_handled(lambda number, frame: signals.append(number)):
        try:
            while going or (waiting and not halted):
                while waiting and len(going) < jobs and not halted:
                    task, whole = waiting.pop(next(iter(waiting)))
                    if task.state == "done":
                        continue
                    try:
                        held = lock.take(task.books / "lock")
                    except ConfigError:
                        notify(task, "held")
                        continue
                    if task.state == "done":  # another process did it meanwhile
                        held.release()
                        continue
                    notify(task, "begins")
                    # It draws no page: one is made over all runs.
                    text = configuration.to_yaml(whole.replace(report=False))
                    write_aside(task.books / "config.yaml", text)
                    going.append(Running(task, held, ["--device", device, *options]))
                for one in list(going):
                    status = one.process.status(stop=halted is not None)
                    if signals and not halted:
                        halted = one.task.name, signals[0] == signal.SIGINT
                    if status is None:
                        continue
                    if not halted and (status in STOPPED or -status in stop_signals()):
                        halted = one.task.name, status in (130, -signal.SIGINT)
                    going.remove(one)
                    one.close()
                    notify(one.task, _state_after(one.task, status))
                if going:
                    time.sleep(LOOK_S)
        finally:
            for one in going:
                one.close()
    if halted:
        where, by_keyboard = halted
        raise Stopped(f"stopped in {where}; the same command continues.", by_keyboard)


def _state_after(task: RunSpec, status: int) -> str:
    """Returns the state of a run that ended with that exit status, and notes a failure."""
    if status == 0:
        return "done"
    if status == REFUSED:
        return "refused"
    if status in STOPPED or status < 0:  # a signal says nothing about the configuration
        return "begun"
    (task.books / "failed").touch()
    return "failed"

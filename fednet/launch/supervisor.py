"""`fednet run` on one machine: the launcher, which forks the server and the workers.

The launcher imports and builds what they all need, and nothing more, so that they share the memory
of torch, of the data and of the initial model. Nothing of zmq, no CUDA and no thread exists before
a fork. Then it waits until one of its children ends, or until the server says something of a worker
through a pipe: `ready PID`, `silent PID`. It replaces a worker that died or fell silent, and once a
round a server that died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import capacity
from fednet.buffers import without_collection
from fednet.capacity import die_with_parent
from fednet.config import Config
from fednet.errors import (
    CannotGoOn,
    ConfigError,
    FednetError,
    StateError,
    StopRequested,
    complain,
    machine_error,
    signal_name,
    stop_signals,
)
from fednet.experiment import placement
from fednet.experiment.rundir import log_to
from fednet.plain import JsonMapping
from fednet.records.manifest import read_manifest
from fednet.server.endpoint import listen, listening, run_keys
from fednet.server.faults import struck
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions, stop_signals_handled, stopped_by

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 16  # what a pipe holds
DEATHS = 20  # of workers that no task can be blamed for
UNREADY = 2  # tries of each worker, where all end by themselves before they are ready


@dataclass
class Child:
    """A process that was forked here. role: "server", or a worker's device. ready: the server may
    have given this worker a task.
    """

    pid: int
    role: str
    ready: bool = False

    def signal(self, number: int) -> None:
        """Does nothing where it has ended: its id is not used again before it was waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def fork(role: str, work: Callable[[], int], logs: Path) -> Child:
    """Forks a process that does `work` and exits with the status that this returns. logs: the
    folder for the traceback of an error that nobody expected.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Child(pid, role)
    status = 3
    try:
        die_with_parent()
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL if role == "server" else signal.SIG_IGN)
        status = work()
    except FednetError as wrong:
        complain(f"fednet run: {wrong}")
        status = wrong.exit_status
    except KeyboardInterrupt:
        status = 130
    except BaseException as broken:  # a forked child never returns into the launcher's stack
        import traceback

        text = traceback.format_exc()
        traced = logs / f"{role.replace(':', '-')}.log"
        with contextlib.suppress(OSError), traced.open("a", encoding="utf-8") as file:
            file.write(text)
        last = text.strip().splitlines()[-1]
        reason = machine_error(broken) or f"{last} (the whole traceback is in {logs})."
        complain(f"fednet run: {reason}")
    finally:
        with contextlib.suppress(OSError):  # what its work printed, where nobody takes that
            sys.stdout.flush()
        os._exit(status)


class Supervisor:
    """Launches one run, and replaces its processes."""

    def __init__(
        self, config: Config, directory: Path, how: ServerOptions, *, workers: int | None
    ) -> None:
        self.config = config
        self.directory = directory
        self.how = how
        self.wanted = workers
        self.children: dict[int, Child] = {}  # by the descriptor that tells when one has ended
        self.server_rounds: list[int] = []  # the rounds in which a server died
        self.planned = 0  # of its deaths, those that the configuration asked for
        self.stopping: int | None = None  # the signal that asked for a stop
        self.keys: Path | None = None
        self.places: list[str] = []  # each worker's device
        self.deaths = 0  # of workers that ended by themselves, or before they were ready
        self.unready = 0  # of these, the last ones in a row that ended by themselves, and unready
        # Neither end waits for the other. A line that finds the pipe full is lost: a worker that is
        # silent and lives is then not replaced.
        self.pipe, self.pipe_in = os.pipe()
        os.set_blocking(self.pipe, False)
        os.set_blocking(self.pipe_in, False)

    def run(self) -> int:
        """Does the whole run; returns its exit status. No process that it starts outlives it."""
        self.places = placement.workers(self.wanted, self._devices(), self.config.clients)
        (self.directory / "server.json").unlink(missing_ok=True)
        with without_collection():
            self._warm_up()
        self.keys = run_keys(self.config, self.directory)
        status = 3
        with stop_signals_handled(self._pass_on):
            try:
                self._fork("server")
                for device in self.places:
                    self._fork(device)
                status = self._watch()
                return status
            finally:
                # The workers end by themselves, but where rounds are left they would wait for a
                # server.
                grace_s = 3.0 if status == 0 else 0.0
                for number, seconds in ((0, grace_s), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
                    for child in self.children.values():
                        child.signal(number)
                    until = time.monotonic() + seconds
                    while self.children and (left := until - time.monotonic()) > 0:
                        self._reap(connection.wait(list(self.children), left))
                os.close(self.pipe)
                os.close(self.pipe_in)

    def _devices(self) -> list[str]:
        """Asks a process of its own: asking CUDA here would make forking impossible."""
        drivers = Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version")
        has_gpu = any(driver.exists() for driver in drivers)
        if self.how.device == "cpu" or (self.how.device == "auto" and not has_gpu):
            return ["cpu"]
        words = [
            sys.executable,
            "-c",
            "import sys, json; from fednet.experiment import placement; "
            "print(json.dumps(placement.place(sys.argv[1])))",
            self.how.device,
        ]
        asked = subprocess.run(words, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise ConfigError(asked.stderr.strip().splitlines()[-1].partition(": ")[2])
        found: list[str] = json.loads(asked.stdout)
        return found

    def _warm_up(self) -> None:
        """Imports what the children share, and builds what is the same in all of them."""
        capacity.align_for_reuse()
        if self.config.train.optimizer != "sgd":
            # (torch's own optimizers import it when they are made: here once, instead of once a
            # worker)
            import torch._dynamo  # noqa: F401

        import fednet.client.join
        import fednet.client.worker
        import fednet.data.loading
        import fednet.server.rounds
        import fednet.server.summary
        import fednet.training.hosts
        import fednet.transport.zeromq.client
        import fednet.transport.zeromq.server  # noqa: F401
        from fednet.experiment import build as experiment

        experiment.build_to_share(self.config, self.how.data, self.places[0])
        capacity.give_back_freed()

    # -- what the children do ----------------------------------------------------------------------
    def _fork(self, role: str) -> None:
        work = self._server if role == "server" else partial(self._worker, role)
        child = fork(role, work, self.directory / "log")
        self.children[os.pidfd_open(child.pid)] = child
        if self.stopping is not None:  # in between
            self._pass_on(self.stopping, None)

    def _server(self) -> int:
        capacity.keep_freed_memory()
        transport = listen(self.config, "tcp://127.0.0.1:*", self.keys, False)
        endpoint = listening(self.config, self.directory, transport)
        how = replace(self.how, on_event=self._tell)
        with how.display:
            run_server(self.config, self.directory, endpoint, how)
        return 0

    def _tell(self, event: str, fields: JsonMapping) -> None:
        """Tells the launcher of a worker."""
        if event == "away" and fields["why"] == "silent":
            event = "silent"
        if event in ("ready", "silent"):
            with contextlib.suppress(BlockingIOError):
                os.write(self.pipe_in, f"{event} {fields['pid']}\n".encode())

    def _worker(self, device: str) -> int:
        from fednet.client import join
        from fednet.client.policy import Policy

        log_to(self.directory / "log" / f"worker-{os.getpid()}.log")
        keys = self.keys / "clients" / "all.key" if self.keys is not None else None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        status = join.main(
            f"0-{self.config.clients - 1}",
            Policy.of_run(self.how.data),
            run=self.directory,
            device=device,
            state=self.directory / "state",
            keys=keys,
            gpu_share=1 / self.places.count(device),
        )
        return max(0, status)

    # -- looking after them ------------------------------------------------------------------------
    def _watch(self) -> int:
        """Waits until the server ends by itself; returns its status. 0: the run is done."""
        while True:
            ready = connection.wait([self.pipe, *self.children])
            # First what the server has written: what a death means depends on whether that worker
            # was ready.
            text = ""
            with contextlib.suppress(BlockingIOError):
                text = os.read(self.pipe, PIPE_BYTES).decode()
            workers = {c.pid: c for c in self.children.values() if c.role != "server"}
            for line in text.splitlines():
                event, pid = line.split()
                child = workers.get(int(pid))
                if child is not None and event == "ready":
                    child.ready = True
                elif child is not None:  # it is silent: it lives, but hangs, and is replaced
                    child.signal(signal.SIGKILL)
            for child, status in self._reap(ready):
                if child.role != "server":
                    if self.stopping is None and status != 0:
                        self._worker_died(child, status)
                    continue
                if status >= 0:
                    return status
                if self.stopping is not None:  # before it knew how to stop
                    raise stopped_by(StopRequested(self.stopping))
                self._server_died(status)

    def _server_died(self, status: int) -> None:
        planned = sum(1 for _, client, _ in struck(self.directory) if client < 0)
        round = 0
        # What is wrong with it, the next server says.
        with contextlib.suppress(StateError):
            round = read_manifest(self.directory / "checkpoint")[0].round
        if planned > self.planned:
            self.planned = planned
        elif round in self.server_rounds:
            raise CannotGoOn(
                f"the server died twice in round {round + 1} ({signal_name(-status)}); "
                f"finished rounds are saved; continue with --resume."
            )
        else:
            self.server_rounds.append(round)
        self._fork("server")

    def _worker_died(self, worker: Child, status: int) -> None:
        """Starts another worker in its place, unless workers keep ending. The server counts the
        deaths of a worker that a signal ended while it was at a task, by task
        (`protocol.tasks.DEATHS`). All others are counted here.
        """
        if status > 0 or not worker.ready:
            self.deaths += 1
        if worker.ready or status < 0:
            self.unready = 0
        else:
            self.unready += 1
        if self.deaths > DEATHS or self.unready >= UNREADY * len(self.places):
            how = f"with status {status}" if status > 0 else f"by {signal_name(-status)}"
            raise CannotGoOn(
                f"workers keep ending {how}; their messages are above, or in "
                f"{self.directory / 'log'}."
            )
        self._fork(worker.role)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        """Asks the server to stop. Workers end after it."""
        self.stopping = number
        for child in list(self.children.values()):
            if child.role == "server":
                child.signal(number)

    def _reap(self, ready: Container[object]) -> list[tuple[Child, int]]:
        """Removes the children that have ended. Returns them with their exit status, which is minus
        the signal's number if a signal ended it. ready: by `wait`.
        """
        found = []
        for descriptor in [d for d in self.children if d in ready]:
            os.close(descriptor)
            child = self.children.pop(descriptor)
            found.append((child, os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])))
        return found

"""`fednet run` is a small supervisor.

It imports and builds what all need, and nothing more, then forks the server and the workers, which
so share the pages of torch, of the data and of the initial model; it starts anew a worker that
died, and once a round a server that died. Nothing of zmq, CUDA or a thread exists before a fork.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import capacity
from fednet.buffers import uncollected
from fednet.config import Config
from fednet.errors import (
    Asked,
    CannotGoOn,
    ConfigError,
    FednetError,
    StateError,
    complain,
    refused,
    signal_name,
    stops,
)
from fednet.experiment import placement
from fednet.experiment.faults import struck
from fednet.experiment.rundir import log_to
from fednet.launch.parent import die_with_parent, go_first
from fednet.records.manifest import read_manifest
from fednet.server.endpoint import listen, listening, run_keys
from fednet.server.process import host_rounds
from fednet.server.watch import Hosting, early, while_stopping

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often it is looked whether a worker that lives has fallen silent
DEATHS = 20  # of workers that no task can be blamed for
UNREADY = 2  # tries of each worker, where all end by themselves before they are ready


class Supervisor:
    """Forks the server and the workers, and looks after them."""

    def __init__(
        self,
        config: Config,
        directory: Path,
        how: Hosting,
        *,
        workers: int | None,
    ) -> None:
        self.config, self.directory, self.how, self.wanted = config, directory, how, workers
        self.pids: dict[int, str] = {}  # pid -> "server", or a worker's device
        self.server_rounds: list[int] = []  # the rounds in which a server died
        self.planned = 0  # of these, the ones that the configuration asked for
        self.stopping: int | None = None
        self.keys: Path | None = None
        self.places: list[str] = []  # each worker's device
        self.shares: dict[str, float] = {}  # of a device, by its name: each worker's
        self.deaths = 0  # workers that ended by themselves, or before they were ready
        self.unready = 0  # of these, the last ones in a row that ended by themselves, and unready
        events = directory / "events.jsonl"
        self.heard = events.stat().st_size if events.exists() else 0  # bytes that were read of it
        self.ready: set[int] = set()  # pids of workers that a task may have been given to

    def run(self) -> int:
        devices = self._devices()
        self.places = places = placement.workers(self.wanted, devices, self.config.clients)
        (self.directory / "server.json").unlink(missing_ok=True)
        with uncollected():
            self._warm_up(places)
        self.keys = run_keys(self.config, self.directory)
        with while_stopping(self._pass_on):
            return self._run(places)

    def _run(self, places: list[str]) -> int:
        status = 3
        try:
            self._fork("server", self._server)
            self.shares = {place: 1 / places.count(place) for place in places}
            for place in places:
                self._start(place)
            if self.stopping is not None:
                self._pass_on(self.stopping, None)
            status = self._watch()
            return status
        finally:
            # Where rounds are left, the workers would wait for a server.
            self._end_all(3.0 if status == 0 else 0.0)

    def _devices(self) -> list[str]:
        """Found in a process of its own: asking CUDA here would forbid to fork."""
        if self.how.device == "cpu" or (self.how.device == "auto" and not _has_gpu()):
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

    def _warm_up(self, places: list[str]) -> None:
        """Imports what the children share, and builds what is the same in all of them."""
        if self.config.train.optimizer != "sgd":
            # (torch's own optimizers import it when they are made: here once, instead of once a
            # worker)
            import torch._dynamo  # noqa: F401

        import fednet.client.join
        import fednet.data.loading
        import fednet.server.rounds
        import fednet.server.summary
        import fednet.training.hosts
        import fednet.transport.zeromq.dealer
        import fednet.transport.zeromq.router  # noqa: F401
        from fednet.experiment import build as experiment

        experiment.build_to_share(self.config, self.how.data)

    def _fork(self, name: str, work: Callable[[], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.pids[pid] = name
            return pid
        status = 3
        try:
            die_with_parent()
            go_first(250 if name == "server" else 500)  # of all, a worker is started anew soonest
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for number in stops():
                signal.signal(number, signal.SIG_DFL if name == "server" else signal.SIG_IGN)
            status = work()
        except FednetError as wrong:
            complain(f"fednet run: {wrong}")
            status = wrong.exit_status
        except KeyboardInterrupt:
            status = 130
        except BaseException as broken:  # a forked child never returns into the supervisor's stack
            import traceback

            text = traceback.format_exc()
            with (
                contextlib.suppress(OSError),
                (self.directory / "log" / f"{name.replace(':', '-')}.log").open(
                    "a", encoding="utf-8"
                ) as file,
            ):
                file.write(text)
            said, where = text.strip().splitlines()[-1], self.directory / "log"
            complain(
                f"fednet run: {refused(broken) or f'{said} (the whole traceback is in {where}).'}"
            )
        finally:
            with contextlib.suppress(OSError):  # what its work printed, where nobody takes that
                sys.stdout.flush()
            os._exit(status)

    def _server(self) -> int:
        capacity.keep_freed()
        transport = listen(self.config, "tcp://127.0.0.1:*", self.keys, False)
        endpoint = listening(self.config, self.directory, transport)
        with self.how.display:
            host_rounds(self.config, self.directory, endpoint, self.how)
        return 0

    def _start(self, device: str) -> None:
        """Starts a worker on that device."""
        self._fork(device, lambda: self._worker(device))

    def _worker(self, device: str) -> int:
        from fednet.client import join
        from fednet.client.policy import Policy

        log_to(self.directory / "log" / f"worker-{os.getpid()}.log")
        keys = self.keys / "clients" / "all.key" if self.keys is not None else None
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return max(
            0,
            join.main(
                join.Options(
                    f"0-{self.config.clients - 1}",
                    Policy.of_run(self.how.data),
                    run=self.directory,
                    device=device,
                    state=self.directory / "state",
                    keys=keys,
                    launched=join.Launched(str(self.directory), self.shares[device]),
                )
            ),
        )

    def _watch(self) -> int:
        """Watches the processes until the server ends with status 0, by which the run is done."""
        signal.signal(signal.SIGALRM, lambda number, frame: self._look())
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        try:
            return self._wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _wait(self) -> int:
        while True:
            pid, raw = os.waitpid(-1, 0)
            name = self.pids.pop(pid, None)
            if name is None:
                continue
            status = os.waitstatus_to_exitcode(raw)
            if name == "server":
                if status >= 0:
                    return status
                if self.stopping is not None:  # before it knew how to stop
                    raise early(Asked(self.stopping))
                self._server_died(status)
            elif self.stopping is None and status != 0:
                self._worker_died(name, pid, status)

    def _server_died(self, status: int) -> None:

        planned = sum(1 for _, client, _ in struck(self.directory / "events.jsonl") if client < 0)
        round = 0
        # What is wrong with it, the next server says.
        with contextlib.suppress(StateError):
            round = read_manifest(self.directory / "checkpoint")[0].round
        if planned > self.planned:
            self.planned = planned
        elif self.server_rounds.count(round) >= 1:
            raise CannotGoOn(
                f"the server died twice in round {round + 1} ({signal_name(-status)}); "
                f"what was finished is saved, --resume goes on."
            )
        else:
            self.server_rounds.append(round)
        self._fork("server", self._server)

    def _look(self) -> None:
        """Reads on in the server's events. A worker that lives, and that the server has not heard
        of for `round.lost.silent`, is ended, so that one takes its place.
        """
        events = self.directory / "events.jsonl"
        if not events.exists():  # the server has not come to it
            return
        with events.open("rb") as file:
            file.seek(self.heard)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self.heard += len(whole)
        mute = set()
        for event in map(json.loads, whole.splitlines()):
            if event["type"] == "ready":
                self.ready.add(event["pid"])
            elif event["type"] == "away" and event["why"] == "silent":
                mute.add(event["pid"])
            elif event["type"] in ("back", "rejoined"):
                mute.discard(event["pid"])
        for pid in mute:
            if self.pids.get(pid, "server") != "server":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _worker_died(self, device: str, pid: int, status: int) -> None:
        """A worker that a signal ended while it was at a task is the server's to count, by task
        (`protocol.tasks.DEATHS`); all others are counted here.
        """
        self._look()
        ready = pid in self.ready
        self.deaths += status > 0 or not ready
        self.unready = 0 if ready or status < 0 else self.unready + 1
        if self.deaths > DEATHS or self.unready >= UNREADY * len(self.places):
            how = f"with status {status}" if status > 0 else f"by {signal_name(-status)}"
            raise CannotGoOn(
                f"workers keep ending {how}; what they said stands above, or in "
                f"{self.directory / 'log'}."
            )
        self._start(device)

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.stopping = number
        for pid, name in self.pids.items():
            if name == "server":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _end_all(self, grace_s: float) -> None:
        """Nothing that was started here outlives this. grace_s: for those that end by
        themselves.
        """
        self._reap(grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in list(self.pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            self._reap(2.0)

    def _reap(self, seconds: float) -> None:
        """Waits so long, at most, for all that was started here to end."""
        until = time.monotonic() + seconds
        while self.pids and time.monotonic() < until:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                self.pids.pop(pid, None)
            else:
                time.sleep(0.02)


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists()

"""What one server process has open. The steps of a run work on it: see exchange.py, evaluation.py
and rounds.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from fednet import world as worlds
from fednet.config import Config
from fednet.experiment import build, placement, privacy
from fednet.experiment.clock import VirtualClock
from fednet.experiment.faults import Faults, struck
from fednet.experiment.rundir import log_to
from fednet.server.clients import connected
from fednet.server.endpoint import Endpoint
from fednet.server.records import Records
from fednet.server.resources import Resources
from fednet.server.tracking import Trackers
from fednet.server.watch import Hosting
from fednet.training.hosts import ServerHost


class Session:
    """One server process's directory, connections, protocol, books, clock and host, each built
    after those that it needs; `close` ends what is open.

    blamed: who broke a protocol of secure aggregation: by client, in which round, and how. noise:
    what the server adds to a sum of clipped updates.
    """

    def __init__(self, config: Config, directory: Path, endpoint: Endpoint, how: Hosting) -> None:
        self.config, self.directory, self.endpoint, self.how = config, directory, endpoint, how
        self.logs = log_to(directory / "log" / "server.log")
        self.experiment = exp = build.build(config, how.data)
        self.method = exp.algorithm
        privacy.check(exp)
        device = placement.place(how.device)[0]
        on_gpu = device.startswith("cuda")
        self.records = Records(config, exp, directory)
        self.faults = Faults(
            config,
            struck(directory),
            lambda round, kind: self.records.files.event("fault", round, kind=kind),
            [each.summation.trains for each in exp.algorithm.exchanges].index(True),
            len(exp.algorithm.exchanges),
        )
        self.clients = connected(exp, self.records, endpoint, how, on_gpu, self.faults.at)
        self.tracker = Trackers(config, directory, how.display.note)
        federation = exp.federation
        public = None if federation is None else federation.only(federation.public)
        self.host = ServerHost(
            exp.setting, lambda: exp.scratch(device), config.training_clients, public, device
        )
        self.clock = VirtualClock(config) if config.link.clock == "virtual" else None
        self.world = worlds.of(config) if self.clock is None else self.clock.world
        self.resources = Resources(gpus=on_gpu)
        self.blamed: dict[int, tuple[int, str]] = {}
        checkpoints = self.records.checkpoints
        key, drawn = checkpoints.folder / "noise.key", checkpoints.exists
        self.noise = privacy.noise_of(config, "server", key, drawn)

    def close(self, over: bool, why: str, crashed: bool) -> None:
        """Tells the clients how the run ended, and closes everything. over: nothing is left to do;
        why: what ended it early. crashed: a thread may still be using the files and connections,
        and may never return from a user's own part; they are left to the end of the process.
        """
        io, watch = self.clients.io, self.clients.watch
        io.events.say = None  # that clients leave now is not shown
        endings: list[Callable[[], object]] = [
            io.events.close,
            lambda: self.records.files.event("stopped", watch.completed, reason=why),
            lambda: watch.status("done" if over and not why else "stopped"),
            self.resources.close,
        ]
        if crashed:
            endings += [self.endpoint.leave, self.records.files.flush]
        else:
            endings += [
                lambda: io.finish(over, why),
                self.endpoint.leave,
                lambda: io.close(over),
                self.records.files.flush,
                self.records.files.close,
                self.records.journal.close,
                self.tracker.close,
                lambda: logging.getLogger("fednet").removeHandler(self.logs),
                self.logs.close,
            ]
        for last in endings:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                last()

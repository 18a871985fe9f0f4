"""What one server process has open. The steps of a run work on it: see exchange.py, evaluation.py
and rounds.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

from fednet import loading
from fednet import world as worlds
from fednet.config import Config
from fednet.data.datasets.site import class_names
from fednet.errors import ConfigError
from fednet.experiment import build, placement, privacy
from fednet.experiment.clock import VirtualClock
from fednet.experiment.faults import Faults, struck
from fednet.experiment.rundir import log_to
from fednet.journal.link import Link
from fednet.models.start import pinned
from fednet.plain import JsonMapping
from fednet.protocol.server import ServerProtocol
from fednet.records import reading
from fednet.server.endpoint import Endpoint, patience, text_for_clients
from fednet.server.events import Events
from fednet.server.inbox import Inbox, Sent, declared, decoder
from fednet.server.io import ServerIO
from fednet.server.records import Records
from fednet.server.resources import Resources
from fednet.server.tracking import Trackers
from fednet.server.watch import Hosting, Watch
from fednet.training.hosts import ServerHost
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.messages import WHOLE


class Session:
    """One server process's directory, connections, protocol, books, clock and host, each built
    after those that it needs; `close` ends what is open.

    sent: the weights that each client was sent with its last task. blamed: who broke a protocol of
    secure aggregation: by client, in which round, and how. noise: what the server adds to a sum of
    clipped updates.
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
        self.journal = self.records.open_journal()
        self.events = Events(self._event, how.display.note, endpoint.alone)
        endpoint.announce(self.events, self.records.incarnation)
        self.sent = Sent()
        decode = decoder(exp, self.sent, self.samples, self.tested)
        on_gpu_whole = endpoint.part == WHOLE and on_gpu
        self.inbox = Inbox(directory / "checkpoint", self.journal, decode, on_gpu_whole)
        self.protocol = self._protocol()
        self.protocol.sites.recall(reading.events(directory, "declared"))
        self.link = self._link()
        self.faults = Faults(
            config,
            struck(directory),
            lambda round, kind: self.records.files.event("fault", round, kind=kind),
            [each.summation.trains for each in exp.algorithm.exchanges].index(True),
            len(exp.algorithm.exchanges),
        )
        endpoint.listen(exp)
        self.io = ServerIO(
            self.protocol,
            endpoint.transport,
            self.link,
            self.inbox,
            self.events,
            endpoint.pump,
            self.faults.at,
        )
        self.watch = Watch(directory, self.io, how, config.rounds, endpoint.keyring)
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

    def _event(self, event: str, fields: JsonMapping) -> None:
        self.records.files.event(event, **{"round": self.protocol.round, **fields})
        if self.how.on_event is not None:
            self.how.on_event(event, fields)

    def _protocol(self) -> ServerProtocol:
        """Raises ConfigError where `model.sha256` names another model."""
        exp, endpoint = self.experiment, self.endpoint
        if exp.hollow:
            raise ConfigError(
                f"model.sha256: {exp.sha256[:12]} is not the digest of the model that this "
                f"configuration gives; leave it out."
            )
        config = pinned(exp.config, exp.sha256)
        text = text_for_clients(config)
        keyring = endpoint.keyring
        return ServerProtocol(
            self.records.run_id,
            self.records.incarnation,
            config.clients,
            lambda ids, session: m.Welcome(
                run=self.records.run_id,
                inc=self.records.incarnation,
                session=session,
                name=config.name,
                config=text,
                ids=ids,
                beat_s=endpoint.beat_s,
            ),
            time.monotonic(),
            files=loading.loaded(),
            layout=exp.digest,
            part=endpoint.part,
            key_refusal=(lambda user, client: "") if keyring is None else keyring.refusal,
            site_name=(lambda client: "") if keyring is None else keyring.name,
            no_key=(lambda client: "") if keyring is None else keyring.lacking,
            declared=declared(exp),
            rules=patience(config, endpoint.pump is not None, endpoint.wide),
            class_names=class_names(config.data) if config.data.dataset == "site" else "",
            open=config.round.open if endpoint.alone else None,
            round=0 if self.records.resumed is None else self.records.resumed.progress.round,
        )

    def _link(self) -> Link:
        curve = self.config.security.curve
        return Link(
            "server",
            self.endpoint.transport.send,
            functools.partial(framing, curve=curve),
            self.journal,
            connection_bytes(curve, "server"),
            self.endpoint.part,
        )

    def samples(self, client: int) -> int | None:
        """How many samples a client trains on; None while that is unknown."""
        if self.experiment.federation is not None:
            return self.experiment.samples(client)
        facts = self.protocol.sites.facts.get(client)
        if facts is None:  # it has not joined this server yet, perhaps an earlier one
            return self.protocol.sites.declared.get(client)
        return facts.train

    def tested(self, client: int) -> tuple[int, int]:
        """How many labels or values a client can evaluate on: in its own test set, by the partition
        or as its site declared, and in the class-balanced one, which sites do not have.
        """
        federation = self.experiment.federation
        if federation is not None:
            data = federation.data
            tested = len(federation.tests[client]) * data.targets_each
            return tested, data.n_test * data.targets_each
        facts = self.protocol.sites.facts.get(client)
        return 0 if facts is None else facts.test, 0

    def close(self, over: bool, why: str, crashed: bool) -> None:
        """Tells the clients how the run ended, and closes everything. over: nothing is left to do;
        why: what ended it early. crashed: a thread may still be using the files and connections,
        and may never return from a user's own part; they are left to the end of the process.
        """
        self.events.say = None  # that clients leave now is not shown
        endings: list[Callable[[], object]] = [
            self.events.close,
            lambda: self.records.files.event("stopped", self.watch.completed, reason=why),
            lambda: self.watch.status("done" if over and not why else "stopped"),
            self.resources.close,
        ]
        if crashed:
            endings += [self.endpoint.leave, self.records.files.flush]
        else:
            endings += [
                lambda: self.io.finish(over, why),
                self.endpoint.leave,
                lambda: self.io.close(over),
                self.records.files.flush,
                self.records.files.close,
                self.journal.close,
                self.tracker.close,
                lambda: logging.getLogger("fednet").removeHandler(self.logs),
                self.logs.close,
            ]
        for last in endings:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                last()

"""What one server process has open. The steps of a run work on it: see exchange.py, evaluation.py
and rounds.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fednet import config as configuration
from fednet import loading
from fednet import world as worlds
from fednet.algorithms.state import State
from fednet.config import Config
from fednet.data.datasets.site import class_names
from fednet.errors import CannotGoOn, ConfigError, StateError
from fednet.experiment import build, lock, placement, privacy
from fednet.experiment.clock import VirtualClock
from fednet.experiment.faults import Faults, struck
from fednet.experiment.rundir import (
    RunDirectory,
    check_records,
    clear_run,
    cut,
    log_to,
    write_configuration,
)
from fednet.files import read_lines, write_aside
from fednet.journal.events import Started
from fednet.journal.file import JournalFile
from fednet.journal.journal import Journal
from fednet.journal.link import Link
from fednet.models.start import pinned
from fednet.plain import JsonMapping
from fednet.protocol.server import ServerProtocol
from fednet.records import reading
from fednet.records.manifest import RESTORE, RunProgress
from fednet.server.checkpoint import Checkpoints
from fednet.server.endpoint import Endpoint, patience, text_for_clients
from fednet.server.events import Events
from fednet.server.growth import check_division, grown
from fednet.server.inbox import Inbox, Sent, declared, decoder
from fednet.server.io import ServerIO
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

    files: the run's directory. added: clients that join the run with this resume. resumed: what the
    checkpoint held. sent: the weights that each client was sent with its last task. blamed: who
    broke a protocol of secure aggregation: by client, in which round, and how. durable: versions of
    the clients' states in the last checkpoint. noise: what the server adds to a sum of clipped
    updates.
    """

    def __init__(self, config: Config, directory: Path, endpoint: Endpoint, how: Hosting) -> None:
        self.config, self.directory, self.endpoint, self.how = config, directory, endpoint, how
        self.logs = log_to(directory / "log" / "server.log")
        self.experiment = exp = build.build(config, how.data)
        self.method = exp.algorithm
        privacy.check(exp)
        device = placement.place(how.device)[0]
        on_gpu = device.startswith("cuda")
        self._open_directory()
        self.events = Events(self._event, how.display.note, endpoint.alone)
        endpoint.announce(self.events, self.incarnation)
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
            lambda round, kind: self.files.event("fault", round, kind=kind),
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
        self.durable: dict[int, str] = {}
        key, drawn = self.checkpoints.folder / "noise.key", self.checkpoints.exists
        self.noise = privacy.noise_of(config, "server", key, drawn)

    def _open_directory(self) -> None:
        """Opens the run's directory, and loads its checkpoint if there is one. What earlier servers
        wrote is cut to it. Raises ConfigError where the run has fewer clients until now and the
        others cannot join.
        """
        directory, config, exp = self.directory, self.config, self.experiment
        clear_run(directory)
        refuse_other_release(directory / "checkpoint")
        own = functools.partial(lock.check, directory)
        self.checkpoints = Checkpoints(directory / "checkpoint", config.checkpoint.fsync, own)
        self.added = range(0)
        self.resumed: tuple[State, RunProgress, dict[str, torch.Tensor]] | None = None
        self.run_id = secrets.token_hex(8)
        if self.checkpoints.exists:
            state, progress, residuals = self.checkpoints.load(exp.algorithm.Server)
            before = progress.clients or config.clients
            if before != config.clients:
                state = grown(config, exp.algorithm, state, before)
                if exp.federation is not None:
                    check_division(exp.federation, directory, before)
                self.added = range(before, config.clients)
            write_configuration(config, directory)
            progress.clients = config.clients
            self.resumed = state, progress, residuals
            self.run_id = progress.run
            cut(directory, progress.lengths)
            check_records(directory, progress.round - len(progress.records.get("rounds", ())))
        self.files = RunDirectory(directory)
        # Each round would be recorded twice.
        if self.resumed is None and any(read_lines(directory / "rounds.jsonl")):
            raise CannotGoOn(
                f"{directory} has finished rounds but no checkpoint to resume from; the run "
                f"directory was changed by hand."
            )
        if not (directory / "config.yaml").exists():  # a run is read back by its configuration
            write_aside(directory / "config.yaml", configuration.to_yaml(config))
        self.incarnation = self.checkpoints.incarnation(directory)
        self.journal = self._journal()

    def _event(self, event: str, fields: JsonMapping) -> None:
        self.files.event(event, **{"round": self.protocol.round, **fields})
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
            self.run_id,
            self.incarnation,
            config.clients,
            lambda ids, session: m.Welcome(
                run=self.run_id,
                inc=self.incarnation,
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
            round=self.resumed[1].round if self.resumed is not None else 0,
        )

    def _journal(self) -> Journal:
        """What earlier servers wrote, taken up; the rows that follow from it are written again.
        Raises StateError where it is not as they left it.
        """
        progress = self.resumed[1] if self.resumed else None
        path, rows = self.directory / "checkpoint" / "journal", self.files.wire
        if progress is not None and not path.exists():
            raise StateError(f"{path} is missing, and no server continues without it; {RESTORE}.")
        fsync = self.config.checkpoint.fsync
        journal = Journal(rows.append, JournalFile(path, fsync), lambda: rows.flush(fsync))
        journal.recall(self.files.cut_wire)
        started = Started(self.incarnation)
        if progress is not None:
            if journal.position < progress.journal:
                raise StateError(
                    f"{path}: it is older than the checkpoint beside it, or was cut; {RESTORE}."
                )
            under_way = sorted(progress.tasks())
            started = Started(self.incarnation, progress.round, under_way, progress.totals)
        journal.note(started)
        journal.flush()
        return journal

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
            lambda: self.files.event("stopped", self.watch.completed, reason=why),
            lambda: self.watch.status("done" if over and not why else "stopped"),
            self.resources.close,
        ]
        if crashed:
            endings += [self.endpoint.leave, self.files.flush]
        else:
            endings += [
                lambda: self.io.finish(over, why),
                self.endpoint.leave,
                lambda: self.io.close(over),
                self.files.flush,
                self.files.close,
                self.journal.close,
                self.tracker.close,
                lambda: logging.getLogger("fednet").removeHandler(self.logs),
                self.logs.close,
            ]
        for last in endings:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                last()


def refuse_other_release(checkpoint: Path) -> None:
    """Raises StateError for a run of a development version, whose logs no server reads any more."""
    found = [*checkpoint.glob("flight.jsonl"), *checkpoint.glob("round-*/replies.log")]
    if found:
        raise StateError(
            f"{found[0]}: written by an earlier development version of fednet; resume the run with "
            f"that version, or start it again under another name."
        )

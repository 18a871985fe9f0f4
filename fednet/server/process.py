"""The server's process: builds its parts in order, runs the rounds, and closes everything."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from fednet import __version__, loading
from fednet import config as configuration
from fednet.algorithms.state import State
from fednet.buffers import give_back_idle, seldom_collected
from fednet.capacity import give_back_freed
from fednet.config import Config
from fednet.data.site import class_names
from fednet.errors import CannotGoOn, ClientsJoin, ConfigError, FednetError
from fednet.experiment import build, determinism, lock, placement, privacy
from fednet.experiment.build import Experiment
from fednet.experiment.clock import VirtualClock
from fednet.experiment.evaluations import evaluated_clients
from fednet.experiment.faults import Faults, struck
from fednet.experiment.rundir import (
    RunDirectory,
    check_records,
    clear_run,
    cut,
    log_to,
    resume_hint,
    write_configuration,
)
from fednet.files import read_lines, write_aside, write_json
from fednet.ids import as_text
from fednet.models.start import pinned
from fednet.plain import JsonMapping
from fednet.protocol.server import ServerProtocol
from fednet.records import Round, Summary, reading
from fednet.records.manifest import RunProgress
from fednet.server.asynchronous import run_updates
from fednet.server.books import WriteAheadLog, recover
from fednet.server.checkpoint import Checkpoints
from fednet.server.endpoint import Endpoint, text_for_clients
from fednet.server.evaluation import Evaluator
from fednet.server.exchange import Exchanges
from fednet.server.growth import check_division, grown
from fednet.server.inbox import Inbox, Sent, declared, decoder
from fednet.server.io import Events, ServerIO
from fednet.server.resources import Resources
from fednet.server.rounds import Rounds, run_rounds
from fednet.server.summary import finish, write
from fednet.server.tracking import Trackers
from fednet.server.watch import (
    Hosting,
    Watch,
    handle_stop_signals,
    remember_stop,
    stop_raises,
    third_press_kills,
)
from fednet.training.hosts import ServerHost
from fednet.training.samples import FEW
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.ledger import Ledger
from fednet.wire.link import Link
from fednet.wire.messages import WHOLE
from fednet.world import held_out

log = logging.getLogger(__name__)


def host_rounds(config: Config, directory: Path, endpoint: Endpoint, how: Hosting) -> Summary:
    """Runs a server from its first step to its last; returns the summary. endpoint: how it reaches
    its clients; its transport is closed at the end. Raises ClientsJoin where it has to start again
    with more clients.
    """
    drive = run_rounds if config.schedule.mode == "sync" else run_updates
    with stop_raises():
        switches = determinism.set_switches(config.train)
        session = Session(config, directory, endpoint, how)
        rounds = session.rounds
        handle_stop_signals(third_press_kills(functools.partial(remember_stop, session.watch)))
        over, why, crashed, join = False, "", False, False
        try:
            session.begin()
            if endpoint.pump is None:
                give_back_freed()  # what was built was tried too, and its gradients are gone
            with seldom_collected(endpoint.pump is None):
                rounds.run(drive)
            over = True
            give_back_idle()  # the models that are written take as much
            summary = finish(rounds, how.command, switches)
        except OSError as broken:
            why = f"{broken.strerror} ({broken.filename or directory})"
            raise CannotGoOn(f"the run stopped: {why}; {resume_hint(directory)}.") from broken
        except FednetError as broken:
            over, why = isinstance(broken, CannotGoOn), str(broken)
            join = isinstance(broken, ClientsJoin)
            raise
        except KeyboardInterrupt:  # the third Ctrl-C
            crashed = endpoint.pump is None
            raise
        finally:
            session.close(over, why, crashed)
            if join:  # a signal may have come since the round ended
                session.watch.check_request()
    try:
        whole = write(directory, summary)
    except OSError as broken:
        raise CannotGoOn(
            f"the run is over, but its summary could not be written: {broken.strerror} "
            f"({broken.filename or directory}); --resume writes it."
        ) from broken
    session.flight.path.unlink(missing_ok=True)
    how.display.finished({**whole, "dir": str(directory)})
    return whole


class Session:
    """The parts of one server process, built in the order in which they need one another; `close`
    ends what they have open. files: the run's directory.
    """

    def __init__(self, config: Config, directory: Path, endpoint: Endpoint, how: Hosting) -> None:
        self.config, self.directory, self.endpoint, self.how = config, directory, endpoint, how
        self.logs = log_to(directory / "log" / "server.log")
        self.experiment = exp = build.build(config, how.data)
        privacy.check(exp)
        device = placement.place(how.device)[0]
        on_gpu = device.startswith("cuda")
        self._open_directory()
        self.events = Events(self._event, how.display.note)
        endpoint.announce(self.events, self.incarnation)
        self.sent = Sent()
        decode = decoder(exp, self.sent, self.samples, self.tested)
        self.inbox = Inbox(directory / "checkpoint", decode, endpoint.part == WHOLE and on_gpu)
        self.protocol = self._protocol()
        self.protocol.sites.recall(reading.events(directory, "declared"))
        self.link = self._link()
        self.faults = Faults(
            config,
            struck(directory),
            lambda round, kind: self.files.event("fault", round, kind=kind),
            exp.algorithm.main_exchange if exp.algorithm.in_memory else 0,
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
            self._write_down,
        )
        self.watch = Watch(self.files, self.io, how.display, config.rounds, how.until)
        self.tracker = Trackers(config, directory, how.display.note)
        callbacks: list[Callable[[Round], None]] = [self.tracker.round]
        if how.callback is not None:
            callbacks.append(how.callback)
        self.host = ServerHost(
            exp.setting,
            lambda: exp.scratch(device),
            config.training_clients,
            exp.federation.public_data() if exp.federation is not None else None,
            device,
        )
        self.clock = VirtualClock(config) if config.link.clock == "virtual" else None
        self.resources = Resources(gpus=on_gpu)
        self.exchanges = Exchanges(self)
        self.evaluator = Evaluator(self)
        self.rounds = Rounds(self, self.run_id, callbacks)

    def _open_directory(self) -> None:
        """Opens the run's directory, and loads its checkpoint if there is one. What earlier servers
        wrote is cut to it. Raises ConfigError where the run has fewer clients until now and the
        others cannot join.
        """
        directory, config, exp = self.directory, self.config, self.experiment
        clear_run(directory)
        own = functools.partial(lock.check, directory)
        self.checkpoints = Checkpoints(directory / "checkpoint", config.checkpoint.fsync, own)
        self.added = range(0)  # clients that join the run with this resume
        self.resumed: tuple[State, RunProgress, dict[str, torch.Tensor]] | None = None
        self.run_id = secrets.token_hex(8)
        if self.checkpoints.exists:
            state, progress, residuals = self.checkpoints.load(exp.algorithm.Server)
            before = progress.clients or config.clients
            if before != config.clients:
                state = grown(config, exp.algorithm, state, before)
                if exp.federation is not None:
                    check_division(exp.federation, directory, before)
                write_configuration(config, directory)
                self.added = range(before, config.clients)
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

    def _event(self, event: str, fields: JsonMapping) -> None:
        self.files.event(event, **fields)
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
            declared=declared(exp),
            rules=endpoint.rules,
            class_names=class_names(config.data) if config.data.dataset == "site" else "",
            open=config.round.open if endpoint.alone else None,
        )

    def _link(self) -> Link:
        curve = self.config.security.curve
        ledger = Ledger(self.files.wire.append, self.incarnation, numbered=True)
        flight = self.directory / "checkpoint" / "flight.jsonl"
        self.flight = WriteAheadLog(flight, self.config.checkpoint.fsync)
        rows, progress = read_lines(self.files.wire.path), self.resumed[1] if self.resumed else None
        self.inbox.bills = recover(self.flight, ledger, rows, self.inbox.on_record(), progress)
        self.files.wire.flush()
        self.flight.keep(ledger)
        return Link(
            "server",
            self.endpoint.transport.send,
            functools.partial(framing, curve=curve),
            ledger,
            connection_bytes(curve, "server"),
            self.endpoint.part,
        )

    def _write_down(self) -> None:
        """Hands all rows to the operating system."""
        self.files.wire.flush()
        self.flight.note(self.link.ledger)

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

    def begin(self) -> None:
        """Records that this process started, and starts the rounds from the checkpoint."""
        resumed, n = self.resumed, self.incarnation
        here = {**determinism.versions(), "device": str(self.host.device)}
        moved = determinism.changed_since(reading.events(self.directory, "started"), here)
        release = __version__
        self.files.event(
            "started", incarnation=n, resumed=bool(resumed), release=release, versions=here
        )
        for remark in (*([moved] if moved else []), *remarks(self.experiment)):
            self.how.display.note(remark)
            self.files.event("remark", text=remark)
        if resumed is not None:
            self.files.append(resumed[1].records)
        if self.experiment.federation is not None:
            write_json(self.directory / "partition.json", self.experiment.federation.to_json())
        self.rounds.begin(resumed, self.added)

    def close(self, over: bool, why: str, crashed: bool) -> None:
        """Tells the clients how the run ended, and closes everything. over: nothing is left to do;
        why: what ended it early. crashed: a thread may still be using the files and connections,
        and may never return from a user's own part; they are left to the end of the process.
        """
        self.events.say = None  # that clients leave now is not shown
        endings: list[Callable[[], object]] = [
            lambda: self.files.event("stopped", reason=why),
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
                self.flight.close,
                self.tracker.close,
                lambda: logging.getLogger("fednet").removeHandler(self.logs),
                self.logs.close,
            ]
        for last in endings:
            with contextlib.suppress(OSError):  # a full disk must not hide what happened
                last()


def remarks(experiment: Experiment) -> Iterator[str]:
    """The remarks of the data, then those of the configuration."""
    config = experiment.config
    yield from experiment.remarks
    # Clients whose epochs end with a batch of a few samples that is not their only one.
    few, federation = 0, experiment.federation
    if federation is not None and any(own.batch_norm for own in experiment.settings):
        for client, part in enumerate(federation.parts):
            size = config.train_of(client).batch_size
            last = len(part) % size
            if len(part) > size and 0 < last <= FEW and experiment.setting_of(client).batch_norm:
                few += 1
    if few:
        yield (
            f"under BatchNorm the last batch of {few} of {config.clients} clients has only "
            f"{FEW} samples or 1; it is left out."
        )
    if config.schedule.mode == "async" and experiment.algorithm.own_schedule:
        yield (
            f"{config.algorithm.name} has no rounds: {config.cohort_size} clients train at a time "
            f"and every {config.buffer} replies are an update (schedule: async)."
        )
    if left_out := held_out(config):
        yield f"client(s) {as_text(left_out)} never train and only evaluate (evaluate.held_out)."
    evaluated = evaluated_clients(config)
    all_asked = len(evaluated) == config.clients
    if config.evaluate.every and config.evaluate.clients != "none" and not all_asked:
        yield (
            f"an evaluation of all asks {len(evaluated)} of {config.clients} clients, drawn from "
            f"the seed (evaluate.most)."
        )

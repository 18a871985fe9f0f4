"""The server's process: builds its parts in order, runs the rounds, and closes everything."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from fednet import __version__, loading
from fednet import config as configuration
from fednet.algorithms.state import State
from fednet.buffers import give_back_idle, seldom_collected
from fednet.capacity import give_back_freed
from fednet.config import Config
from fednet.data.site import class_names
from fednet.errors import CannotGoOn, ClientsJoin, ConfigError, FednetError
from fednet.experiment import build, determinism, lock, placement, privacy
from fednet.experiment.clock import VirtualClock
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
from fednet.models.start import pinned
from fednet.plain import JsonMapping
from fednet.protocol.server import ServerProtocol
from fednet.records import Round, Summary, reading
from fednet.records.manifest import RunProgress
from fednet.server.asynchronous import run_updates
from fednet.server.books import WriteAheadLog, recover
from fednet.server.checkpoint import Checkpoints, Residuals
from fednet.server.endpoint import Endpoint, text_for_clients
from fednet.server.evaluation import Evaluator, test_sets
from fednet.server.exchange import Exchanges
from fednet.server.growth import Joining, check_division, grown
from fednet.server.inbox import Inbox, Sent, declared, decoder
from fednet.server.io import Events, ServerIO
from fednet.server.remarks import remarks
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
from fednet.transport.framing import connection_bytes, framing
from fednet.wire import messages as m
from fednet.wire.ledger import Ledger
from fednet.wire.link import Link
from fednet.wire.messages import WHOLE

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
        rounds = session.rounds()
        rounds.attendance.alone = endpoint.alone
        handle_stop_signals(third_press_kills(functools.partial(remember_stop, session.watch)))
        over, why, crashed, join = False, "", False, False
        try:
            session.begin(rounds)
            if endpoint.pump is None:
                give_back_freed()  # what was built was tried too, and its gradients are gone
            with seldom_collected(endpoint.pump is None):
                rounds.run(drive)
            over = True
            give_back_idle()  # the models that are written take as much
            summary = finish(rounds, session.experiment, directory, how.command, switches)
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
    """The parts of one server process, built in the order in which they need one another."""

    def __init__(self, config: Config, directory: Path, endpoint: Endpoint, how: Hosting) -> None:
        self.config, self.directory, self.endpoint, self.how = config, directory, endpoint, how
        self.logs = log_to(directory / "log" / "server.log")
        self.experiment = build.build(config, how.data)
        privacy.check(self.experiment)
        self.device = placement.place(how.device)[0]
        self._open_directory()
        self.events = Events(self._event, how.display.note)
        endpoint.announce(self.events, self.incarnation)
        self.sent = Sent()
        decode = decoder(self.experiment, self.sent, self.samples, self.tested)
        on_gpu = endpoint.part == WHOLE and self.device.startswith("cuda")
        self.inbox = Inbox(directory / "checkpoint", decode, on_gpu)
        self.protocol = self._protocol()
        self.protocol.sites.recall(reading.events(directory, "declared"))
        self.link = self._link()

    def _open_directory(self) -> None:
        """Opens the run's directory. What earlier servers wrote is cut to the last checkpoint."""
        directory, fsync = self.directory, self.config.checkpoint.fsync
        clear_run(directory)
        own = functools.partial(lock.check, directory)
        self.checkpoints = Checkpoints(directory / "checkpoint", fsync, own)
        self._resume()
        if self.resumed is not None:
            progress = self.resumed[1]
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
            write_aside(directory / "config.yaml", configuration.to_yaml(self.config))
        self.incarnation = self.checkpoints.incarnation(directory)

    def _event(self, event: str, fields: JsonMapping) -> None:
        self.files.event(event, **fields)
        if self.how.on_event is not None:
            self.how.on_event(event, fields)

    def _resume(self) -> None:
        """Loads the checkpoint, if there is one. Raises ConfigError where the run has fewer clients
        until now and the others cannot join.
        """
        self.added = range(0)  # clients that join the run with this resume
        self.resumed: tuple[State, RunProgress, Residuals | None] | None = None
        self.run_id = secrets.token_hex(8)
        if self.checkpoints.exists:
            state, progress, more = self.checkpoints.load(
                self.experiment.algorithm.Server, Residuals
            )
            before = progress.clients or self.config.clients
            if before != self.config.clients:
                state = self._with_more_clients(state, before)
            progress.clients = self.config.clients
            self.resumed = state, progress, more
            self.run_id = progress.run

    def _with_more_clients(self, state: State, before: int) -> State:
        """Returns the server's state for more clients than `before`, and writes the configuration.
        Raises ConfigError where they cannot join.
        """
        exp = self.experiment
        state = grown(self.config, exp.algorithm, state, before)
        if exp.federation is not None:
            check_division(exp.federation, self.directory, before)
        write_configuration(self.config, self.directory)
        self.added = range(before, self.config.clients)
        return state

    def _config_of_clients(self) -> Config:
        """The configuration with the digest of the model. Raises ConfigError where `model.sha256`
        names another.
        """
        experiment = self.experiment
        if experiment.hollow:
            raise ConfigError(
                f"model.sha256: {experiment.sha256[:12]} is not the digest of the model that this "
                f"configuration gives; leave it out."
            )
        return pinned(experiment.config, experiment.sha256)

    def _protocol(self) -> ServerProtocol:
        config, endpoint = self._config_of_clients(), self.endpoint
        text = text_for_clients(config)
        keyring = endpoint.keyring
        refusal = (lambda user, client: "") if keyring is None else keyring.refusal
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
            layout=self.experiment.digest,
            part=endpoint.part,
            key_refusal=refusal,
            declared=declared(self.experiment),
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

    def rounds(self) -> Rounds:
        """Makes the rounds, which `begin` starts and `close` ends."""
        exp, config = self.experiment, self.config
        faults = Faults(
            config,
            struck(self.directory),
            lambda round, kind: self.files.event("fault", round, kind=kind),
            exp.algorithm.main_exchange if exp.algorithm.in_memory else 0,
            len(exp.algorithm.exchanges),
        )
        self.endpoint.listen(self.experiment)
        self.io = ServerIO(
            self.protocol,
            self.endpoint.transport,
            self.link,
            self.inbox,
            self.events,
            self.endpoint.pump,
            faults.at,
            self._write_down,
        )
        self.watch = Watch(self.files, self.io, self.how.display, config.rounds, self.how.until)
        self.tracker = Trackers(config, self.directory, self.how.display.note)
        after: list[Callable[[Round], None]] = [self.tracker.round]
        if self.how.callback is not None:
            after.append(self.how.callback)
        return self._rounds(faults, after)

    def _rounds(self, faults: Faults, after: list[Callable[[Round], None]]) -> Rounds:
        exp, config = self.experiment, self.config
        public = exp.federation.public_data() if exp.federation is not None else None
        host = ServerHost(
            exp.setting,
            lambda: exp.scratch(self.device),
            config.training_clients,
            public,
            self.device,
        )
        clock = VirtualClock(config) if config.link.clock == "virtual" else None
        self.resources = Resources(gpus=self.device.startswith("cuda"))
        exchanges = Exchanges(
            exp,
            self.files,
            self.io,
            run=self.run_id,
            host=host,
            faults=faults,
            clock=clock,
            samples=self.samples,
            sent=self.sent,
            check_stop=self.watch.check,
            alone=self.endpoint.alone,
        )
        evaluator = Evaluator(exp, self.files, host, exchanges, *test_sets(exp, self.device))
        return Rounds(
            self.run_id,
            experiment=exp,
            directory=self.files,
            io=self.io,
            checkpoints=self.checkpoints,
            inbox=self.inbox,
            host=host,
            faults=faults,
            clock=clock,
            watch=self.watch,
            exchanges=exchanges,
            evaluator=evaluator,
            resources=self.resources,
            joining=Joining(self.io, config),
            callbacks=after,
        )

    def _write_down(self) -> None:
        """Hands all rows to the operating system."""
        self.files.wire.flush()
        self.flight.note(self.link.ledger)

    def samples(self, client: int) -> int | None:
        """How many samples a client trains on; None while that is unknown."""
        if self.experiment.federation is not None:
            return self.experiment.samples(client)
        facts = self.protocol.sites.get(client)
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
            return federation.test_targets(client), data.n_test * data.targets_each
        facts = self.protocol.sites.get(client)
        return 0 if facts is None else facts.test, 0

    def begin(self, rounds: Rounds) -> None:
        """Records that this process started, and starts the rounds from the checkpoint."""
        resumed, n = self.resumed, self.incarnation
        here = {**determinism.versions(), "device": str(rounds.host.device)}
        moved = determinism.changed_since(reading.events(self.directory, "started"), here)
        release = __version__
        self.files.event(
            "started", incarnation=n, resumed=bool(resumed), release=release, versions=here
        )
        for remark in (*([moved] if moved else []), *remarks(self.experiment)):
            rounds.display.note(remark)
            self.files.event("remark", text=remark)
        if resumed is not None:
            self.files.append(resumed[1].records)
        if self.experiment.federation is not None:
            write_json(self.directory / "partition.json", self.experiment.federation.to_json())
        rounds.begin(resumed, self.added)

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

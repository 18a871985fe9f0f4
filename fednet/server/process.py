"""The server's process: what it is made of, built in order, run, and taken apart again."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednet import config as configuration
from fednet import loading
from fednet.config import Config
from fednet.errors import CannotGoOn, FednetError, Stopped
from fednet.experiment import determinism, lock, placement
from fednet.experiment.rundir import RunDirectory, check_records, cut
from fednet.files import clear_asides, read_lines, write_aside, write_json
from fednet.records import Summary
from fednet.server.admission import checker, declared, judges
from fednet.server.endpoint import Endpoint

if TYPE_CHECKING:
    from fednet.protocol.server import ServerProtocol
    from fednet.server.rounds import Rounds
    from fednet.wire.link import Link

log = logging.getLogger(__name__)


def host_rounds(
    config: Config,
    directory: Path,
    endpoint: Endpoint,
    *,
    device: str,
    data: Path | None,
    until: float | None,
    command: Sequence[str],
    display: Any,
    callback: Callable[[Any], None] | None = None,
) -> Summary:
    """Everything the server does in one process of its own; returns the summary.

    endpoint: how it reaches its clients; its transport is closed at the end. until: on the
    monotonic clock, when to stop. Nine arguments: what a run is, where, and who watches it.
    """
    from fednet.server.summary import finish, write

    before = on_stop(stop_early)
    switches = determinism.settle(config.train.threads, config.train.precision)
    session = Session(config, directory, endpoint, device, data)
    rounds = session.rounds(display, callback)
    rounds.until = until
    on_stop(insisting(functools.partial(stop_later, rounds)))
    over, why = False, ""
    try:
        session.begin(rounds)
        rounds.run()
        over = True
        summary = finish(rounds, session.experiment, directory, command, switches)
    except OSError as broken:
        why = f"{broken.strerror} ({broken.filename or directory})"
        raise CannotGoOn(
            f"the run stopped: {why}; the last checkpoint is whole, --resume goes on."
        ) from broken
    except FednetError as broken:
        over = isinstance(broken, CannotGoOn)
        why = str(broken)
        raise
    finally:
        session.close(rounds, over, why)
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        whole = write(directory, summary)
    except OSError as broken:
        raise CannotGoOn(
            f"the run is over, but its summary could not be written: {broken.strerror} "
            f"({broken.filename or directory}); --resume writes it."
        ) from broken
    session.flight.path.unlink(missing_ok=True)
    display.finished({**whole, "dir": str(directory)})
    return whole


class Session:
    """The parts of one server process, each built by its own room, in the order in which they need
    one another.
    """

    def __init__(
        self, config: Config, directory: Path, endpoint: Endpoint, device: str, data: Path | None
    ) -> None:
        from fednet.experiment import build as experiments
        from fednet.experiment import privacy
        from fednet.server.events import Events

        self.config, self.directory, self.endpoint = config, directory, endpoint
        self._books()
        self.events = Events(lambda event, fields: self.files.event(event, **fields))
        endpoint.announce(self.events, self.incarnation)
        self.experiment = experiments.build(config, data)
        privacy.check(self.experiment)
        self.device = placement.place(device)[0]
        self._resume()
        self.protocol = self._protocol()
        self.link = self._link()
        self.tracker: Any = None

    def _books(self) -> None:
        """What earlier server processes of this run left, cut to the last checkpoint."""
        from fednet.server.checkpoint import Checkpoints
        from fednet.server.spool import Spool

        directory = self.directory
        clear_asides(directory)
        self.checkpoints = Checkpoints(
            directory / "checkpoint", self.config.checkpoint.fsync, lambda: lock.check(directory)
        )
        self.spool = Spool(directory / "checkpoint")
        if self.checkpoints.exists:
            progress = self.checkpoints.progress()
            cut(directory, progress.lengths)
            check_records(directory, progress.round - len(progress.records.get("rounds", ())))
        self.files = RunDirectory(directory)
        # They would stand there twice.
        if not self.checkpoints.exists and any(read_lines(directory / "rounds.jsonl")):
            raise CannotGoOn(
                f"{directory} has rounds on record and no checkpoint to go on from; the run "
                f"directory was changed by hand."
            )
        if not (directory / "config.yaml").exists():  # a run is read back by its configuration
            write_aside(directory / "config.yaml", configuration.to_yaml(self.config))
        self.logs = log_to(directory / "log" / "server.log")
        self.incarnation = self.checkpoints.incarnation(directory / "events.jsonl")

    def _resume(self) -> None:
        from fednet.server.rounds import Residuals

        self.resumed: Any = None
        self.run_id = secrets.token_hex(8)
        if self.checkpoints.exists:
            self.resumed = self.checkpoints.load(self.experiment.algorithm.Server, Residuals)
            self.run_id = self.resumed[1].run

    def _protocol(self) -> ServerProtocol:
        from fednet.protocol.server import ServerProtocol
        from fednet.wire import messages as m

        config, endpoint = self.config, self.endpoint
        text = configuration.to_yaml(config)
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
            may_speak_for=endpoint.keyring.may_speak_for if endpoint.keyring is not None else None,
            declared=declared(self.experiment),
            versions=determinism.versions(),
            rules=endpoint.rules,
        )

    def _link(self) -> Link:
        from fednet.server.flight import Flight
        from fednet.transport.framing import connection_bytes, framing
        from fednet.wire.ledger import Ledger
        from fednet.wire.link import Link

        curve = self.config.security.curve
        ledger = Ledger(self.files.wire.append, self.incarnation, numbered=True)
        self.flight = Flight(
            self.directory / "checkpoint" / "flight.jsonl", self.config.checkpoint.fsync
        )
        for row in read_lines(self.directory / "wire.jsonl"):
            ledger.recall(row)
            self.flight.booked(row)
        self.undecided = self.flight.take_over(ledger, self.spool.sealed())
        self.files.wire.flush()
        self.flight.keep()
        return Link(
            "server",
            self.endpoint.transport.send,
            lambda n: framing(n, curve=curve),
            ledger,
            connection_bytes(curve, "server"),
        )

    def rounds(self, display: Any, callback: Callable[[Any], None] | None) -> Rounds:
        """The rounds over all of this, which `begin` starts and `close` ends."""
        from fednet.experiment.faults import Faults, struck
        from fednet.server.io_thread import ServerIO
        from fednet.server.rounds import Rounds
        from fednet.server.track import Tracker
        from fednet.training.hosts import ServerHost

        exp = self.experiment
        faults = Faults(
            self.config,
            struck(self.directory / "events.jsonl"),
            lambda round, kind: self.files.event("fault", round, kind=kind),
        )
        self.io = ServerIO(
            self.protocol,
            self.endpoint.transport,
            self.link,
            self.spool,
            checker(exp, lambda client: made.phases.sent.get(client), self.samples),
            self.events,
            self.endpoint.pump,
            faults.at,
            self._write_down,
            lambda key: made.accounts.replay(key),
        )
        public = exp.federation.public_data() if exp.federation is not None else None
        host = ServerHost(
            exp.setting,
            lambda: exp.scratch(self.device),
            self.config.clients,
            public,
            self.device,
        )
        test, validation = judges(exp, self.device)
        if "tensorboard" in self.config.track:
            self.tracker = Tracker(self.directory / "tensorboard")
        made = Rounds(
            exp,
            self.files,
            self.io,
            self.checkpoints,
            self.spool,
            run_id=self.run_id,
            host=host,
            display=display,
            faults=faults,
            test=test,
            validation=validation,
            told=[
                *([callback] if callback is not None else []),
                *([self.tracker.round] if self.tracker is not None else []),
            ],
        )
        made.accounts.undecided(self.undecided)
        return made

    def _write_down(self) -> None:
        """What is in the books is with the operating system."""
        self.files.wire.flush()
        self.flight.note(self.link.ledger)

    def samples(self, client: int) -> int | None:
        """How many samples a client trains on; None where nobody has said so yet."""
        if self.experiment.federation is not None:
            return self.experiment.samples(client)
        facts = self.protocol.sites.get(client)
        return None if facts is None else facts.train

    def begin(self, rounds: Rounds) -> None:
        """Records that this process started, and puts back what the checkpoint holds."""
        from fednet.experiment.remarks import remarks

        resumed = self.resumed
        self.files.event("started", incarnation=self.incarnation, resumed=resumed is not None)
        for remark in remarks(self.experiment):
            rounds.display.note(remark)
            self.files.event("remark", text=remark)
        if resumed is not None:
            for record in resumed[1].records.get("rounds", ()):
                self.files.rounds.append(record)
            for record in resumed[1].records.get("clients", ()):
                self.files.clients.append(record)
        if self.experiment.federation is not None:
            write_json(self.directory / "partition.json", self.experiment.federation.to_json())
        rounds.begin(resumed)

    def close(self, rounds: Rounds, over: bool, why: str) -> None:
        """Says to the clients how it ended, and closes all there is. over: nothing is left to do;
        why: what ended it early.
        """
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            self.files.event("stopped", reason=why)
            rounds.status("done" if over and not why else "stopped")
        self.io.call(lambda now: self.protocol.finish(over, why))
        # Where rounds are left, the workers stay and wait for a server.
        self.io.farewell(1.0 if over else 0.05)
        self.endpoint.leave()
        endings: list[Callable[[], object]] = [
            lambda: self.io.close(over),
            self.files.flush,
            self.files.close,
            self.flight.close,
        ]
        endings += [self.tracker.close] if self.tracker is not None else []
        for last in endings:
            with contextlib.suppress(OSError):
                last()
        logging.getLogger("fednet").removeHandler(self.logs)
        self.logs.close()


def stop_later(rounds: Rounds, number: int, _: Any) -> None:
    """Once there is something to be saved: the rounds look for this."""
    rounds.stop_requested = signal.Signals(number).name, number == signal.SIGINT


def on_stop(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """What SIGTERM, SIGUSR1 and Ctrl-C do from now on; returns what they did."""
    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        with contextlib.suppress(ValueError):  # in a thread of a caller's own, who has the signals
            before[number] = signal.signal(number, handler)
    return before


TOGETHER_S = 0.3
"""One press of Ctrl-C may come twice: from the terminal, and passed on by whoever started this
process.
"""


def insisting(handler: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """As `handler`, but the third Ctrl-C ends what is going on where it stands: a method's own part
    may never come to its end.
    """
    presses = list[float]()

    def on(number: int, frame: Any) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and (not presses or now - presses[-1] > TOGETHER_S):
            presses.append(now)
        if len(presses) >= 3:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        handler(number, frame)

    return on


def stop_early(number: int, _: Any) -> None:
    """Before there is anything to be saved."""
    raise Stopped(
        f"stopped: {signal.Signals(number).name}; go on with --resume.",
        by_keyboard=number == signal.SIGINT,
    )


def log_to(path: Path) -> logging.Handler:
    """Everything fednet logs in this process goes to `path` too, until the handler is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    root = logging.getLogger("fednet")
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    return handler

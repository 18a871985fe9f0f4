"""The server's process: everything it is made of, put together, run, and taken apart again."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednet import config as configuration
from fednet import ids, loading
from fednet.config import Config
from fednet.errors import CannotGoOn, FednetError, Stopped
from fednet.experiment import determinism, lock, placement
from fednet.experiment.rundir import RunDirectory, check_records, cut
from fednet.files import read_lines, write_json, write_record
from fednet.records import Summary
from fednet.server.admission import beat_seconds, check_bind, checker, declared, judges, keyring_of

if TYPE_CHECKING:
    from fednet.transport.zeromq.router import ZmqServer

log = logging.getLogger(__name__)
# In one process: neither side hears the other while it works, and neither can be gone.
SLOW_BEAT_S = 3600.0


def host_rounds(
    config: Config,
    directory: Path,
    *,
    bind: ZmqServer | None,
    device: str,
    data: Path | None,
    until: float | None,
    command: Sequence[str],
    display: Any,
    callback: Callable[[Any], None] | None = None,
    welcome_ids: bool = True,
) -> Summary:
    """Everything the server does in one process of its own; returns the summary. bind: what it
    listens at, see `listen`, which is closed at the end; None: clients live in this process.
    """
    from fednet.experiment import build as experiments
    from fednet.experiment import privacy
    from fednet.experiment.faults import Faults, struck
    from fednet.experiment.remarks import remarks
    from fednet.protocol.rules import Rules
    from fednet.protocol.server import ServerProtocol
    from fednet.server.checkpoint import Checkpoints
    from fednet.server.io_thread import Events, ServerIO
    from fednet.server.rounds import Residuals, Rounds
    from fednet.server.spool import Spool
    from fednet.server.summary import finish, write
    from fednet.server.track import Tracker
    from fednet.training.hosts import ServerHost
    from fednet.transport.framing import connection_bytes, framing
    from fednet.wire import messages as m
    from fednet.wire.ledger import Ledger
    from fednet.wire.link import Link

    rounds: Any = None

    def check_stop(number: int, _: Any) -> None:
        if rounds is None:
            stop_early(number, _)
        rounds.stop_requested = signal.Signals(number).name, number == signal.SIGINT

    before = on_stop(check_stop)
    switches = determinism.settle(config.train.threads, config.train.precision)
    checkpoints = Checkpoints(
        directory / "checkpoint", config.checkpoint.fsync, lambda: lock.check(directory)
    )
    spool = Spool(directory / "checkpoint")
    if checkpoints.exists:
        progress = checkpoints.progress()
        cut(directory, progress.lengths)
        check_records(directory, progress.round - len(progress.records.get("rounds", ())))
    files = RunDirectory(directory)
    # They would stand there twice.
    if not checkpoints.exists and any(read_lines(directory / "rounds.jsonl")):
        raise CannotGoOn(
            f"{directory} has rounds on record and no checkpoint to go on from; the run directory "
            f"was changed by hand."
        )
    logs = log_to(directory / "log" / "server.log")
    incarnation = checkpoints.incarnation(directory / "events.jsonl")
    keyring = bind.keyring if bind is not None else None
    # Within one process nothing is encrypted, and the bytes are counted as if it were.
    curve = config.security.curve
    events = Events(lambda event, fields: files.event(event, **fields))
    transport: Any
    pump, loop = None, None
    if bind is None:
        from fednet.transport.inproc import Inproc

        network = Inproc(config.seed)
        transport, client_end = network.server(), network.client()
    else:
        transport = bind
        transport.on_refused = lambda reason, address: events.tell(
            "refused", {"what": "connection", "reason": reason, "address": address}
        )
        write_record(
            directory / "server.json",
            {
                "address": transport.address,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "public_key": keyring.pair.public if keyring is not None else None,
                "incarnation": incarnation,
            },
            mode=0o600,
        )
        if not welcome_ids:
            display.note(
                f"{config.name}: listening at {transport.address}; clients join by: fednet-client "
                f"--id K --server {transport.address}"
            )
    exp = experiments.build(config, data)
    privacy.check(exp)
    chosen = placement.place(device)[0] if device != "auto" else placement.place("auto")[0]
    resumed = None
    if checkpoints.exists:
        resumed = checkpoints.load(exp.algorithm.Server, Residuals)
        run_id = resumed[1].run
    else:
        run_id = secrets.token_hex(8)
    text = configuration.to_yaml(config)
    # In one process loading the data may take longer than any silence.
    protocol = ServerProtocol(
        run_id,
        incarnation,
        config.clients,
        lambda hosted, session: m.Welcome(
            run=run_id,
            inc=incarnation,
            session=session,
            name=config.name,
            config=text,
            ids=hosted,
            beat_s=SLOW_BEAT_S if bind is None else beat_seconds(config),
        ),
        time.monotonic(),
        files=loading.loaded(),
        layout=exp.digest,
        may_speak_for=keyring.may_speak_for if keyring is not None else None,
        declared=declared(exp),
        rules=Rules(silent=None) if bind is None else None,
    )
    ledger = Ledger(files.wire.append, incarnation)
    for row in read_lines(directory / "wire.jsonl") if resumed is not None else ():
        ledger.recall(row)
    link = Link(
        "server",
        transport.send,
        lambda n: framing(n, curve=curve),
        ledger,
        connection_bytes(curve, "server"),
    )
    if bind is None:
        from fednet.client import join
        from fednet.client import loop as clients
        from fednet.client import prepare as preparing
        from fednet.client.policy import Policy
        from fednet.client.slots import Slots, card_of
        from fednet.protocol.client import ClientProtocol

        worker = ClientProtocol(
            "in-process",
            ids=list(range(config.clients)),
            host=socket.gethostname(),
            pid=os.getpid(),
            device=chosen,
            versions=join.versions(),
            files=loading.loaded(),
        )
        prepare = preparing.preparer(
            lambda: loop,  # type: ignore[arg-type,return-value]
            policy=Policy.of_run(data),
            asked=ids.parse(f"0-{config.clients - 1}"),
            state=directory / "state",
            devices=[chosen],
            state_lost=False,
            quiet=True,
            say=display.note,
        )
        loop = clients.ClientLoop(
            worker,
            client_end,
            lambda n: framing(n, curve=curve),
            prepare,
            greeting=connection_bytes(curve, "client"),
            inline=True,
            faults=True,
            slots=Slots([card_of(chosen)], 1),
        )

        def pump() -> bool:
            moved = loop.step(0.0)
            if loop.broken is not None:
                raise loop.broken
            return moved

    faults = Faults(
        config,
        struck(directory / "events.jsonl"),
        lambda round, kind: files.event("fault", round, kind=kind),
    )

    def samples(client: int) -> int | None:
        if exp.federation is not None:
            return exp.samples(client)
        facts = protocol.sites.get(client)
        return None if facts is None else facts.train

    io = ServerIO(
        protocol,
        transport,
        link,
        spool,
        checker(exp, lambda client: rounds.phases.sent.get(client), samples),
        events,
        pump,
        faults.at,
        files.wire.flush,
    )
    host = ServerHost(
        exp.setting,
        lambda: exp.scratch(chosen),
        config.clients,
        exp.federation.public_data() if exp.federation is not None else None,
        chosen,
    )
    test, validation = judges(exp, chosen)
    tracker = Tracker(directory / "tensorboard") if "tensorboard" in config.track else None
    told = [
        *([callback] if callback is not None else []),
        *([tracker.round] if tracker is not None else []),
    ]
    rounds = Rounds(
        exp,
        files,
        io,
        checkpoints,
        spool,
        run_id=run_id,
        host=host,
        display=display,
        faults=faults,
        test=test,
        validation=validation,
        told=told,
    )
    rounds.until = until
    files.event("started", incarnation=incarnation, resumed=resumed is not None)
    for remark in remarks(exp):
        display.note(remark)
        files.event("remark", text=remark)
    over, why = False, ""
    try:
        if resumed is not None:
            for record in resumed[1].records.get("rounds", ()):
                files.rounds.append(record)
            for record in resumed[1].records.get("clients", ()):
                files.clients.append(record)
        if exp.federation is not None:
            write_json(directory / "partition.json", exp.federation.to_json())
        rounds.begin(resumed)
        rounds.run()
        over = True
        summary = finish(rounds, exp, directory, command, switches)
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
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            files.event("stopped", reason=why)
            rounds.status("done" if over and not why else "stopped")
        io.call(lambda now: protocol.finish(over, why))
        if bind is None:
            io._step(0.0)
            assert loop is not None
            loop.step(0.0)
            loop.close()
        else:
            # Where rounds are left, the workers stay and wait for a server.
            io.farewell(1.0 if over else 0.05)
        endings: list[Callable[[], object]] = [
            io.close,
            files.flush,
            files.close,
            *([tracker.close] if tracker is not None else []),
        ]
        for last in endings:
            with contextlib.suppress(OSError):
                last()
        logging.getLogger("fednet").removeHandler(logs)
        logs.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    try:
        whole = write(directory, summary)
    except OSError as broken:
        raise CannotGoOn(
            f"the run is over, but its summary could not be written: {broken.strerror} "
            f"({broken.filename or directory}); --resume writes it."
        ) from broken
    display.finished({**whole, "dir": str(directory)})
    return whole


def listen(config: Config, bind: str, keys: Path | None, insecure: bool) -> ZmqServer:
    """Binds the server's address, before anything of the run is changed. Raises ConfigError where
    that cannot be.
    """
    from fednet.transport.kernel import descriptor_limit
    from fednet.transport.zeromq.router import ZmqServer

    descriptor_limit(raised=True)
    keyring = keyring_of(config, keys)
    check_bind(bind, config.security.curve, insecure)
    return ZmqServer(bind, keyring=keyring)


def on_stop(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """What SIGTERM, SIGUSR1 and Ctrl-C do from now on; returns what they did."""
    before: dict[int, Any] = {}
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        with contextlib.suppress(ValueError):  # in a thread of a caller's own, who has the signals
            before[number] = signal.signal(number, handler)
    return before


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

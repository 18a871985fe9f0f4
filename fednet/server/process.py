"""The server's process: builds its parts in order, runs the rounds, and closes everything."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from fednet.buffers import give_back_idle, seldom_collected
from fednet.capacity import give_back_freed
from fednet.config import Config
from fednet.errors import CannotGoOn, ClientsJoin, FednetError
from fednet.experiment import build, determinism, placement, privacy
from fednet.experiment.build import Experiment
from fednet.experiment.rundir import log_to, resume_hint
from fednet.files import write_json
from fednet.ids import as_text
from fednet.records import Summary, reading
from fednet.server.client_evaluation import evaluated_clients
from fednet.server.clients import connect_clients
from fednet.server.conditions import Conditions
from fednet.server.endpoint import Endpoint
from fednet.server.exchanges import Exchanges
from fednet.server.records import Records
from fednet.server.rounds import Rounds
from fednet.server.setup import Setup
from fednet.server.summary import finish, write
from fednet.server.watch import ServerOptions, handle_stop_signals, stop_raises
from fednet.training.samples import FEW
from fednet.world import held_out

log = logging.getLogger(__name__)


def run_server(config: Config, directory: Path, endpoint: Endpoint, how: ServerOptions) -> Summary:
    """Runs a server from its first step to its last; returns the summary. endpoint: how it reaches
    its clients; its transport is closed at the end. Raises ClientsJoin where it has to start again
    with more clients.
    """
    engine = Rounds
    if config.schedule.mode != "sync":
        from fednet.server.asynchronous import Updates

        engine = Updates
    with stop_raises():
        switches = determinism.set_switches(config.train)
        logs = log_to(directory / "log" / "server.log")
        exchanges = open_run(config, directory, endpoint, how)
        rounds = engine(exchanges, how)
        watch = exchanges.clients.watch
        handle_stop_signals(watch.on_signal)
        over = False
        why = ""
        crashed = False
        join = False
        try:
            begin(rounds)
            if endpoint.pump is None:
                give_back_freed()  # what was built was tried too, and its gradients are gone
            with exchanges.clients.io:  # else its other thread may be at the socket
                endpoint.listen(exchanges.setup.experiment)
            with seldom_collected(endpoint.pump is None):
                rounds.run()
            over = True
            give_back_idle()  # the models that are written take as much
            summary = finish(rounds, how.command, switches)
        except OSError as broken:
            why = f"{broken.strerror} ({broken.filename or directory})"
            raise CannotGoOn(f"the run stopped: {why}; {resume_hint(directory)}.") from broken
        except FednetError as broken:
            over = isinstance(broken, CannotGoOn)
            why = str(broken)
            join = isinstance(broken, ClientsJoin)
            raise
        except KeyboardInterrupt:  # the third Ctrl-C
            crashed = endpoint.pump is None
            raise
        finally:
            close(rounds, endpoint, logs, over, why, crashed)
            if join:  # a signal may have come since the round ended
                watch.check(show=False)
    try:
        whole = write(directory, summary)
    except OSError as broken:
        raise CannotGoOn(
            f"the run is over, but its summary could not be written: {broken.strerror} "
            f"({broken.filename or directory}); --resume writes it."
        ) from broken
    how.display.finished({**whole, "dir": str(directory)})
    return whole


def open_run(config: Config, directory: Path, endpoint: Endpoint, how: ServerOptions) -> Exchanges:
    """All that the rounds work on, built part by part. Nobody can connect yet."""
    experiment = build.build(config, how.data)
    privacy.check(experiment)
    device = placement.place(how.device)[0]
    records = Records(config, experiment, directory)
    key = records.checkpoints.folder / "noise.key"
    drawn = records.checkpoints.exists
    noise = privacy.noise_of(config, "server", key, drawn)
    setup = Setup.on(device, experiment, noise)
    conditions = Conditions(experiment, records.files)
    on_gpu = device.startswith("cuda")
    crash_at = conditions.faults.crash_server_at
    clients = connect_clients(experiment, records, endpoint, how, on_gpu, crash_at)
    return Exchanges(setup, conditions, clients, records)


def begin(rounds: Rounds) -> None:
    """Records that this process started, and starts the rounds from the checkpoint."""
    records = rounds.records
    resumed = rounds.records.resumed
    experiment = rounds.setup.experiment
    here = {**determinism.versions(), "device": str(rounds.setup.host.device)}
    moved = determinism.changed_since(reading.events(records.files.path, "started"), here)
    records.files.event(
        "started", incarnation=records.incarnation, resumed=bool(resumed), versions=here
    )
    for remark in (*([moved] if moved else []), *remarks(experiment)):
        rounds.display.note(remark)
        records.files.event("remark", text=remark)
    if resumed is not None:
        records.files.append(resumed.progress.records)
    if experiment.federation is not None:
        write_json(records.files.path / "partition.json", experiment.federation.to_json())
    rounds.begin()


def close(
    rounds: Rounds, endpoint: Endpoint, logs: logging.Handler, over: bool, why: str, crashed: bool
) -> None:
    """Tells the clients how the run ended, and closes everything. over: nothing is left to do; why:
    what ended it early. crashed: a thread may still be using the files and connections, and may
    never return from a user's own part; they are left to the end of the process.
    """
    io = rounds.clients.io
    watch = rounds.clients.watch
    records = rounds.records
    io.events.say = None  # that clients leave now is not shown
    status = "done" if over and not why else "stopped"
    attempt(io.events.close)
    attempt(records.files.event, "stopped", watch.completed, reason=why)
    attempt(watch.status, status)
    attempt(rounds.resources.close)
    if crashed:
        attempt(endpoint.leave)
        attempt(records.files.flush)
        return
    attempt(io.finish, over, why)
    attempt(endpoint.leave)
    attempt(io.close, over)
    attempt(records.files.flush)
    attempt(records.files.close)
    attempt(records.journal.close)
    attempt(rounds.tracker.close)
    attempt(logging.getLogger("fednet").removeHandler, logs)
    attempt(logs.close)


def attempt(step: Callable[..., object], *given: object, **fields: object) -> None:
    """Does a step of the end: a full disk must not hide what happened, nor keep the next step."""
    with contextlib.suppress(OSError):
        step(*given, **fields)


def remarks(experiment: Experiment) -> Iterator[str]:
    """The remarks of the data, then those of the configuration."""
    config = experiment.config
    yield from experiment.remarks
    # Clients whose epochs end with a batch of a few samples that is not their only one.
    few = 0
    federation = experiment.federation
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

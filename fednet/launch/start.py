"""`fednet run` and `fednet-server`: opens the run's directory, and starts the federation."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from fednet import capacity, loading
from fednet import config as configuration
from fednet.config import Config
from fednet.errors import ClientsJoin, ConfigError, FednetError
from fednet.experiment import lock, selection
from fednet.experiment.rundir import claim, forget, renew, write_configuration, write_status
from fednet.launch.in_process import run_in_process
from fednet.launch.supervisor import Supervisor
from fednet.records.manifest import read_manifest
from fednet.server.endpoint import listen, listening
from fednet.server.growth import with_clients
from fednet.server.process import run_server
from fednet.server.watch import ServerOptions, Watcher, stop_raises

Report = Callable[[Path, Watcher], None]  # (directory, display)

# On resume.
MAY_CHANGE = ("rounds", "clients", "stop", "round", "evaluate", "name", "load", "track", "report")


@contextlib.contextmanager
def open_directory(config: Config, out: Path, resume: bool) -> Iterator[tuple[Config, Path, bool]]:
    """Inside, the run's directory is locked and has its configuration. Gives (configuration,
    directory, already finished).
    """
    with own_directory(config, out, resume) as path:
        config, finished = fill(config, path)
        yield config, path, finished


@contextlib.contextmanager
def own_directory(config: Config, out: Path, resume: bool) -> Iterator[Path]:
    """Inside, the run's directory is locked. Only a run without a finished round was removed."""
    path = claim(out, config.name, resume)
    with lock.holding(path):
        if not resume:
            renew(path)
        yield path


def fill(config: Config, path: Path) -> tuple[Config, bool]:
    """Writes the run's configuration. Returns it, and whether the run is already finished."""
    known = path / "config.yaml"
    if known.exists():
        check_code(config, path / "code")
        old = configuration.load(known, [])
        if config.round.open is not None and config.clients < old.clients:
            config = with_clients(config, old.clients)  # which joined while it went on
        check_resumable(old, config)
        check_gone(old, config, path)
        if (
            (path / "summary.json").exists()
            and config.rounds <= old.rounds
            and config.stop == old.stop
        ):
            return old, True
        if config.clients != old.clients and (path / "checkpoint" / "manifest.json").exists():
            return config, False  # the server writes it, if clients can join: see `server.growth`
    write_status(path, state="starting", rounds=config.rounds)
    write_configuration(config, path)
    return config, False


def check_code(config: Config, code: Path) -> None:
    """Raises ConfigError if a user's own file differs from the run's copy of it."""
    for file, name in zip(config.load, loading.names(config.load)):
        kept = code / name
        if kept.exists() and kept.read_bytes() != Path(file).read_bytes():
            raise ConfigError(
                f"--resume: {file} was edited since this run started with {kept}; resume with that "
                f"version, or start a run under another name (--set name=...)."
            )


def check_gone(old: Config, new: Config, path: Path) -> None:
    """Raises ConfigError where `round.gone` differs for a round that is over."""
    before = selection.gone_from(old)
    after = selection.gone_from(new)
    if before == after or not (path / "checkpoint" / "manifest.json").exists():
        return
    over = read_manifest(path / "checkpoint")[0].round
    for client in sorted(before.keys() | after.keys()):
        firsts = {side.get(client) for side in (before, after)}
        wrong = [first for first in firsts if first is not None and first <= over]
        if len(firsts) > 1 and wrong:
            raise ConfigError(
                f"round.gone: client {client} cannot be taken out or brought back from round "
                f"{wrong[0]} on: {over} rounds are over; expected {over + 1} or later."
            )


def check_resumable(old: Config, new: Config) -> None:
    """Raises ConfigError that lists the keys which a resume may not change, or where the finished
    rounds would have had other learning rates.
    """
    both = [configuration.to_mapping(old), configuration.to_mapping(new)]
    changed = [*configuration.differing(both, (*MAY_CHANGE, *configuration.WHERE))]
    if old.evaluate.held_out != new.evaluate.held_out:
        # A client that trained would count as one that never did.
        changed = sorted([*changed, "evaluate.held_out"])
    if changed:
        free = ", ".join(k for k in MAY_CHANGE if k not in ("name", "load"))
        differ = "differs" if len(changed) == 1 else "differ"
        raise ConfigError(
            f"--resume: {', '.join(changed)} {differ} from the run's own "
            f"configuration; a resumed run may change only {free} and where it runs. For other "
            f"changes start a run under another name (--set name=NEW)."
        )
    # With `cosine` a round's rate depends on how many rounds the run has.
    if old.rounds != new.rounds and new.train.schedule == "cosine":
        raise ConfigError(
            f"--resume: train.schedule: cosine gives each round its rate by the "
            f"number of all rounds, so a run of {old.rounds} rounds cannot become one of "
            f"{new.rounds}. Keep rounds={old.rounds}; or start a run under another name, "
            f"perhaps from this one's model (--set model.weights=RUN/model.safetensors)."
        )


def note_finished(directory: Path, display: Watcher, report: Report) -> None:
    """Says that a run has no rounds left, and draws its page if it has none."""
    display.note(f"{directory} is finished.")
    if not (directory / "report.html").exists():
        report(directory, display)


@stop_raises()
def serve(
    config: Config,
    out: Path,
    how: ServerOptions,
    report: Report,
    *,
    resume: bool,
    bind: str,
    insecure: bool,
    keys: Path | None,
) -> int:
    """Runs `fednet-server`. report: draws the page of a finished run. Returns the exit status;
    raises FednetError with one.
    """
    capacity.require_linux()
    with contextlib.ExitStack() as ending:
        directory = ending.enter_context(own_directory(config, out, resume))
        # Errors of keys or address come before anything in the directory is changed.
        transport = listen(config, bind, keys, insecure)
        ending.callback(transport.close, 0.0)
        config, finished = fill(config, directory)
        if finished:
            note_finished(directory, how.display, report)
            return 0
        with refusable(directory), how.display:
            while True:
                end = listening(config, directory, transport, how.display.note)
                try:
                    run_server(config, directory, end, how)
                    break
                except ClientsJoin as join:
                    config = with_clients(config, join.clients)
                gc.collect()  # the parts of the last server refer to one another
                transport = listen(config, transport.address, keys, insecure)
                ending.callback(transport.close, 0.0)
        report(directory, how.display)
    return 0


@stop_raises()
def run_command(
    config: Config,
    out: Path,
    how: ServerOptions,
    report: Report,
    *,
    resume: bool = False,
    workers: int | None = None,
    in_process: bool = False,
    on: str | None = None,
) -> int:
    """Runs `fednet run`. report: draws the page of a finished run. on: "ray" for workers of a
    cluster. Returns the exit status; raises FednetError with one.
    """
    capacity.require_linux()
    with open_directory(config, out, resume) as (config, directory, finished):
        if finished:
            note_finished(directory, how.display, report)
            return 0
        with refusable(directory):
            if in_process:
                with how.display:
                    run_in_process(config, directory, how, workers)
                status = 0
            elif on == "ray":
                from fednet.launch.ray import run_on_ray

                status = run_on_ray(config, directory, how, workers)
            else:
                status = Supervisor(config, directory, how, workers=workers).run()
        if status == ConfigError.exit_status:  # a process of the run has printed why
            forget(directory)
        if status == 0:
            report(directory, how.display)
        return status


@contextlib.contextmanager
def refusable(directory: Path) -> Iterator[None]:
    """Inside, a run that is refused before its first round leaves no directory behind."""
    try:
        yield
    except FednetError as wrong:
        if wrong.exit_status == ConfigError.exit_status:
            forget(directory)
        raise


class Silent:
    """A display that shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, *_: object) -> None:
        pass

    round_started = progress = round_done = warn = finished = note

"""`fednet.run`: a federation from Python, and the report of a finished run."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet import config as configuration
from fednet import places, registry
from fednet.errors import CannotGoOn, ConfigError, FednetError, Stopped
from fednet.experiment.rundir import runs_of
from fednet.plain import JsonMapping, meeting
from fednet.server.watch import stop_signals_handled

if TYPE_CHECKING:
    from fednet.records import Round
    from fednet.report.read import Run
    from fednet.server.watch import Watcher

log = logging.getLogger(__name__)


def run(
    config: Path | str | JsonMapping | None = None,
    *,
    set: JsonMapping | None = None,
    in_process: bool = False,
    workers: int | None = None,
    out: Path | str | None = None,
    load: Sequence[Path | str] = (),
    device: str = "auto",
    resume: bool = False,
    quiet: bool = True,
    callback: Callable[[Round], None] | None = None,
) -> Run:
    """A whole federation; returns the finished run (`fednet.open_run` reads it back).

    config: a YAML file, a mapping, or None for all defaults; set: {"key.path": value}. In this
    process, or by `fednet run` in processes of its own, which a notebook's own parts do not reach:
    put these into a file and `load` it. callback(record): after each round, in this process only.
    A run in this process sets torch's threads and switches of determinism, and sets them back.
    The other arguments are the flags of `fednet run`: without `out`, FEDNET_OUT is asked too.
    """
    with meeting():
        from fednet.report import open_run

        if set and isinstance(config, Mapping):
            raise ConfigError("fednet.run: give either a mapping or set=..., not both.")
        where = "the mapping given to fednet.run"
        chosen = configuration.load(config, set or {}, load, where)
        if in_process:  # what a run's first moments import, and with it their Structs
            import fednet.client.preparing
            import fednet.launch.start
            import fednet.server.rounds  # noqa: F401
    folder = places.runs() if out is None else places.expand_home(out, "out")
    if not in_process:
        if callback is not None:
            raise ConfigError(
                "fednet.run: callback needs in_process=True; read runs of other processes by "
                "fednet.open_run."
            )
        return _run_in_processes(chosen, folder, workers, device, resume, quiet, load)

    from fednet.cli.display import Display
    from fednet.experiment.determinism import plain_mode
    from fednet.launch import start
    from fednet.server.watch import ServerOptions

    display = Display(quiet)
    data = Path(chosen.data.root) if chosen.data.root else None
    how = ServerOptions(display, ["fednet.run"], device, data, callback=callback)
    with plain_mode(), start.open_directory(chosen, folder, resume) as (own, directory, finished):
        if not finished:
            with start.refusable(directory), display:
                start.run_in_process(own, directory, how, workers)
        if not finished or not (directory / "report.html").exists():
            report(directory, display)
    return open_run(directory)


def _run_in_processes(
    config: configuration.Config,
    out: Path,
    workers: int | None,
    device: str,
    resume: bool,
    quiet: bool,
    load: Sequence[Path | str],
) -> Run:
    """`fednet run` as a command. Raises ConfigError for a part that was defined in a notebook's
    cell or a script, which other processes do not see.
    """
    from fednet.report import open_run

    for parts, name in (
        (registry.algorithm, config.algorithm.name),
        *((registry.model, own.model.name) for own in configuration.parts.each_model(config)),
        (registry.dataset, config.data.dataset),
        (registry.partitioner, config.data.partition.scheme),
        (registry.task, config.task),
        (registry.selection, config.selection.name or ""),
    ):
        part = parts.loaded(name)
        if part is not None and part.__module__ == "__main__":
            raise ConfigError(
                f"the {parts.kind} {name!r} was defined here, where the run's processes do not see "
                f"it: put it into a file and give load=['FILE.py'], or give in_process=True."
            )
    # A name of its own, so that two such calls at a time do not read each other's.
    text = out / f".{config.name}.{secrets.token_hex(6)}.yaml"
    words = [sys.executable, "-m", "fednet", "run", str(text), "--out", str(out)]
    words += ["--device", device]
    words += ["--quiet"] if quiet else []
    words += ["--workers", str(workers)] if workers else []
    words += ["--resume"] if resume else []
    words += [word for file in load for word in ("--load", str(file))]
    out.mkdir(parents=True, exist_ok=True)
    text.write_text(configuration.to_yaml(config), encoding="utf-8")
    try:
        status, said = _call(words)
    finally:
        text.unlink(missing_ok=True)
    if status:
        said = said.strip().removeprefix("fednet run: ")
        if status in (2, 3):
            raise ConfigError(said) if status == 2 else CannotGoOn(said)
        raise Stopped(said, by_keyboard=status == 130)
    # The run whose command had that word, since another process may have started a newer one of the
    # name; the newest if none had, since then there was nothing left to do.
    found = [open_run(path) for path in reversed(runs_of(out, config.name))]
    for run in found:
        if str(text) in (run.summary.provenance or {}).get("command", ()):
            return run
    return found[0]


def _call(words: Sequence[str]) -> tuple[int, str]:
    """The exit status of a command, and its stderr. A signal to stop, such as the interrupt of a
    notebook's kernel, is passed on to the command, which then saves what is done.
    """
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said,
        subprocess.Popen(words, stderr=said) as command,
        stop_signals_handled(lambda number, _: command.send_signal(number)),
    ):
        status = command.wait()
        said.seek(0)
        return status, said.read()


def report(directory: Path, display: Watcher) -> None:
    """Writes a finished run's page, unless `report: false`. If that fails, the run still counts:
    the reason is printed and logged.
    """
    from fednet import report as reports

    if not reports.open_run(directory).config.get("report", True):
        return
    display.note("writing report.html")
    try:
        reports.finish(directory)
    except (FednetError, OSError, ImportError) as broken:
        log.exception("report of %s", directory)
        display.note(
            f"the report could not be written: {broken}; fednet report {directory} tries again"
        )
    else:
        display.note(f"{directory / 'report.html'}")

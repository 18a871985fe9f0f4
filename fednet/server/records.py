"""The run's directory, as this server has opened it: its files, its checkpoints, its journal, and
what earlier servers left there.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from fednet import config as configuration
from fednet.algorithms.state import State
from fednet.config import Config
from fednet.errors import CannotGoOn, StateError
from fednet.experiment import lock
from fednet.experiment.build import Experiment
from fednet.experiment.rundir import (
    RunDirectory,
    check_records,
    clear_run,
    cut,
    write_configuration,
)
from fednet.files import read_lines, write_aside
from fednet.journal.events import Started
from fednet.journal.file import JournalFile
from fednet.journal.journal import Journal
from fednet.records.manifest import RESTORE, RunProgress
from fednet.server.checkpoint import Checkpoints
from fednet.server.growth import check_division, grow_state


@dataclass
class Resumed:
    """What the checkpoint of an earlier server held. residuals: see `RunState`."""

    server: State
    progress: RunProgress
    residuals: dict[str, torch.Tensor]


class Records:
    """The files that a run leaves, and that it goes on from."""

    def __init__(self, config: Config, experiment: Experiment, directory: Path) -> None:
        """Loads the checkpoint if there is one. What earlier servers wrote is cut to it. Raises
        ConfigError where the run has fewer clients until now and the others cannot join.
        """
        clear_run(directory)
        refuse_other_release(directory / "checkpoint")
        own = functools.partial(lock.check, directory)
        self._fsync = config.checkpoint.fsync
        self.checkpoints = Checkpoints(directory / "checkpoint", self._fsync, own)
        self.resumed: Resumed | None = None  # None where the run begins
        self.added = range(0)  # clients that join the run with this resume
        # By client, the version of its state in the last checkpoint.
        self.durable: dict[int, str] = {}
        self.run_id = secrets.token_hex(8)
        if self.checkpoints.exists:
            state, progress, residuals = self.checkpoints.load(experiment.algorithm.Server)
            before = progress.clients or config.clients
            if before != config.clients:
                state = grow_state(config, experiment.algorithm, state, before)
                if experiment.federation is not None:
                    check_division(experiment.federation, directory, before)
                self.added = range(before, config.clients)
            write_configuration(config, directory)
            progress.clients = config.clients
            self.resumed = Resumed(state, progress, residuals)
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
        # Which server of the run this is, from 1.
        self.incarnation = self.checkpoints.incarnation(directory)
        self.journal = self._journal()

    def _journal(self) -> Journal:
        """What earlier servers wrote, taken up; the rows that follow from it are written again.
        Raises StateError where it is not as they left it.
        """
        progress = None if self.resumed is None else self.resumed.progress
        path = self.files.path / "checkpoint" / "journal"
        rows = self.files.wire
        if progress is not None and not path.exists():
            raise StateError(f"{path} is missing, and no server continues without it; {RESTORE}.")
        file = JournalFile(path, self._fsync)
        journal = Journal(rows.append, file, lambda: rows.flush(self._fsync))
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


def refuse_other_release(checkpoint: Path) -> None:
    """Raises StateError for a run of a development version, whose logs no server reads any more."""
    found = [*checkpoint.glob("flight.jsonl"), *checkpoint.glob("round-*/replies.log")]
    if found:
        raise StateError(
            f"{found[0]}: written by an earlier development version of fednet; resume the run with "
            f"that version, or start it again under another name."
        )

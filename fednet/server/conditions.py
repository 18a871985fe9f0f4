"""What happens to the clients besides their tasks: faults, the time that passes, who is away, and
who is not asked any more.
"""

from __future__ import annotations

from fednet import world as worlds
from fednet.experiment.build import Experiment
from fednet.experiment.rundir import RunDirectory
from fednet.records import reading
from fednet.server.clock import VirtualClock
from fednet.server.faults import Faults, struck


class Conditions:
    """What happens to the clients of a run from outside: faults, time, and who is there."""

    def __init__(self, experiment: Experiment, files: RunDirectory) -> None:
        """Raises ConfigError where the run to be replayed is another one than this."""
        config = experiment.config
        exchanges = experiment.algorithm.exchanges
        # Planned, and those of a run that is replayed.
        self.faults = Faults(
            config,
            struck(files.path),
            lambda round, kind: files.event("fault", round, kind=kind),
            [each.summation.trains for each in exchanges].index(True),
            len(exchanges),
        )
        # None where time is this machine's.
        self.clock = VirtualClock(config) if config.link.clock == "virtual" else None
        # Which clients are there when, and how fast they are.
        self.world = worlds.of(config) if self.clock is None else self.clock.world
        # Whether any of it may disturb a client's task.
        self.may_disturb = bool(
            self.clock is not None
            or self.faults.any_planned
            or self.faults.replay is not None
            or self.world.presence is not None
            or self.world.step_s is not None
        )
        # Who broke a protocol of secure aggregation: by client, in which round, and how.
        self.blamed: dict[int, tuple[int, str]] = {}
        for event in reading.events(files.path, "blamed"):
            self.blamed.setdefault(event["client"], (event["round"], event["reason"]))

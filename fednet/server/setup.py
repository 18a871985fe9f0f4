"""What stays the same for as long as a server runs: what it computes with."""

from __future__ import annotations

from dataclasses import dataclass

from fednet.algorithms.base import Algorithm
from fednet.config import Config
from fednet.experiment import privacy
from fednet.experiment.build import Experiment
from fednet.training.hosts import ServerHost


@dataclass(frozen=True)
class Setup:
    """What does not change in a run."""

    experiment: Experiment
    """The configuration, and what is built from it."""
    host: ServerHost
    """What a method gets at the server."""
    noise: privacy.Noise | None = None
    """What the server adds to a sum of clipped updates."""

    @property
    def config(self) -> Config:
        return self.experiment.config

    @property
    def method(self) -> Algorithm:
        return self.experiment.algorithm

    @classmethod
    def on(cls, device: str, experiment: Experiment, noise: privacy.Noise | None) -> Setup:
        """device: on which the server trains and evaluates."""
        federation = experiment.federation
        public = None if federation is None else federation.only(federation.public)
        clients = experiment.config.training_clients
        host = ServerHost(
            experiment.setting, lambda: experiment.scratch(device), clients, public, device
        )
        return cls(experiment, host, noise)

"""Clients that join a run under way: a resumed run may have more `clients` than its checkpoint.

The new clients are like clients that never took part. All that a run decides by the number of
clients goes on with the new number from the next round on. It must leave the earlier clients as
they are: their data, settings and roles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from fednet import world
from fednet.algorithms.base import State
from fednet.config import Config, parts
from fednet.descriptors import named
from fednet.errors import ConfigError, StateError
from fednet.experiment import links
from fednet.experiment.build import Experiment
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.records.manifest import RESTORE
from fednet.robust import attacks

FACTS = ("samples", "sha256", "test_samples_by_class")  # of partition.json, by client


def check_growth(experiment: Experiment, server: State, before: int, directory: Path) -> None:
    """Raises ConfigError where no clients can join a run that had `before` clients. server: its
    state in the checkpoint.
    """
    for reason in refusals(experiment, before, directory):
        raise ConfigError(
            f"clients: {experiment.config.clients}, and the run has {before}: {reason} Nothing was "
            f"changed. Resume it with clients={before}, or start a run under another name."
        )
    grown(experiment, server, before)


def grown(experiment: Experiment, server: State, before: int) -> State:
    """Returns the server's state for the clients that the run has now. before: how many it had.
    Raises ConfigError where the method does not allow it.
    """
    config = experiment.config
    old = config.replace(clients=before)
    method = experiment.algorithm
    return method.with_more_clients(server, old.training_clients, config.training_clients)


def refusals(experiment: Experiment, before: int, directory: Path) -> Iterator[str]:
    """Yields a sentence for each reason for which no clients can join."""
    config = experiment.config
    if config.clients < before:
        yield "clients can be added, and not removed."
        return
    for key, given, reason in (
        (
            "privacy.noise",
            config.privacy.noise,
            "its guarantee is computed for one number of clients.",
        ),
        (
            "privacy.secagg",
            config.privacy.secagg.protocol != "none",
            "a round that had begun would be asked of other clients, and the difference of the "
            "two sums shows single updates.",
        ),
        ("faults.replay", config.faults.replay, "the recorded run had its own clients."),
        ("availability.trace", config.availability.trace, "it is of the clients at the start."),
        ("devices.trace", config.devices.trace, "it is of the clients at the start."),
        ("link.trace", config.link.trace, "it is of the clients at the start."),
        ("data.feature_noise", config.data.feature_noise, "its levels depend on their number."),
    ):
        if given:
            yield f"{key}: {reason}"
    old = config.replace(clients=before)
    for client in range(before):
        was = roles(old, client)
        for key, value in roles(config, client).items():
            if value != was[key]:
                yield f"{key}: it would be another for client {client}."
    if experiment.federation is None:
        return
    then, now = divided(directory), experiment.federation.to_json()
    changed = [c for c in range(before) if any(now[f][c] != then[f][c] for f in FACTS)]
    if changed:
        yield (
            f"data.partition: client(s) {as_text(changed)} would have other samples. Clients can "
            f"join where each has data of its own: data.dataset: site, or scheme: file with lists "
            f"of training and test samples."
        )


def divided(directory: Path) -> JsonDict:
    """Returns the contents of partition.json. Raises StateError where it cannot be read."""
    path = directory / "partition.json"
    try:
        found: JsonDict = json.loads(named(path).read_bytes())
    except (OSError, ValueError) as broken:
        raise StateError(f"{path}: cannot be read ({broken}); {RESTORE}.") from broken
    return found


def roles(config: Config, client: int) -> JsonDict:
    """Returns what a run decides for a client, by key."""
    return {
        "train.per_client": config.train_of(client),
        "link.per_client": links.of(config, client),
        "model.others": parts.model_of(config, client),
        "faults.malicious.clients": client in attacks.malicious(config),
        "evaluate.held_out": client in world.held_out(config),
    }

"""Clients that join a run under way: a resumed run may have more `clients` than its checkpoint.
While a run goes on (`round.open`), clients ask to join; then the server ends after a round and
resumes with them.

The new clients are like clients that never took part. All that a run decides by the number of
clients goes on with the new number from the next round on. It must leave the earlier clients as
they are: their data, settings and roles.
"""

from __future__ import annotations

import json
from pathlib import Path

from fednet import config as configuration
from fednet import world
from fednet.algorithms.base import Algorithm, State
from fednet.config import Config, parts
from fednet.config.rules import fixed_clients
from fednet.data.federation import Federation
from fednet.errors import ConfigError, StateError
from fednet.experiment import links
from fednet.ids import as_text
from fednet.plain import JsonDict
from fednet.records.manifest import RESTORE
from fednet.robust import attacks

FACTS = ("samples", "sha256", "test_samples_by_class")  # of partition.json, by client


def with_clients(config: Config, clients: int) -> Config:
    """Returns the configuration with another number of clients. Raises ConfigError if it does not
    fit the rest.
    """
    return configuration.from_mapping({**configuration.to_mapping(config), "clients": clients})


def grow_state(config: Config, method: Algorithm, server: State, before: int) -> State:
    """Returns the server's state for the clients that the run has now. before: how many it had.
    Raises ConfigError where the others cannot join.
    """
    old = config.replace(clients=before)
    refusals = [f"{key}: {reason}" for key, reason in fixed_clients(config)]
    if config.clients < before:
        refusals = ["clients can be added, and not removed."]
    for client in range(min(before, config.clients)):
        now = roles(config, client)
        for key, value in roles(old, client).items():
            if value != now[key]:
                refusals.append(f"{key}: it would be another for client {client}.")
    if refusals:
        raise ConfigError(
            f"clients: {config.clients}, and the run has {before}: {refusals[0]} It can continue "
            f"with clients={before}."
        )
    return method.with_more_clients(server, old.training_clients, config.training_clients)


def check_division(federation: Federation, directory: Path, before: int) -> None:
    """Raises ConfigError where one of the first `before` clients would have other samples than
    until now, and StateError where partition.json cannot be read.
    """
    path = directory / "partition.json"
    now = federation.to_json()
    try:
        then: JsonDict = json.loads(path.read_bytes())
    except (OSError, ValueError) as broken:
        raise StateError(f"{path}: cannot be read ({broken}); {RESTORE}.") from broken
    changed = [c for c in range(before) if any(now[f][c] != then[f][c] for f in FACTS)]
    if changed:
        raise ConfigError(
            f"data.partition: client(s) {as_text(changed)} would have other samples with "
            f"clients={federation.clients} than with {before}. Clients can join where each has "
            f"data of its own: data.dataset: site, or scheme: file with lists of training and test "
            f"samples."
        )


def roles(config: Config, client: int) -> JsonDict:
    """Returns what a run decides for a client, by key."""
    return {
        "train.per_client": config.train_of(client),
        "link.per_client": links.of(config, client),
        "model.others": parts.model_of(config, client),
        "faults.malicious.clients": client in attacks.malicious(config),
        "evaluate.held_out": client in world.held_out(config),
    }

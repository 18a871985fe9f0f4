"""Clients that never train and only evaluate (`evaluate.held_out`)."""

from __future__ import annotations

import functools

from fednet import seeds
from fednet.config import Config


@functools.cache
def _divided(seed: int, clients: int, training: int) -> tuple[frozenset[int], tuple[int, ...]]:
    drawn = seeds.rng(seed, "held_out").choice(clients, clients - training, replace=False)
    left_out = frozenset(int(client) for client in drawn)
    return left_out, tuple(client for client in range(clients) if client not in left_out)


def held_out(config: Config) -> frozenset[int]:
    """Returns the clients of a run that never train, drawn from its seed."""
    return _divided(config.seed, config.clients, config.training_clients)[0]


def training(config: Config) -> tuple[int, ...]:
    """Returns the clients that may train, ascending."""
    return _divided(config.seed, config.clients, config.training_clients)[1]

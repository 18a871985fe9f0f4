"""What malicious clients send: `faults.malicious`.

    y      what an honest client would send (its weights, or its update)
    x      what it started from, for weights; for updates zero
    u      y - x, its update

An attack that a client can make by itself (`sign_flip`, `gaussian`, and `label_flip`, which changes
its labels before it trains) is made in its own process. One that needs the others' replies (`alie`,
`ipm`) is made at the server, from the honest replies: the attackers know everything, which is the
worst case that the papers assume.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from fednet import seeds
from fednet.config import Config
from fednet.plain import part_of
from fednet.robust import rules
from fednet.tensors import Tensors, blockwise
from fednet.wire.payload import P, tensors_of
from fednet.world import training

BY_ITSELF = ("sign_flip", "gaussian", "label_flip")
STRENGTH = {"sign_flip": 1.0, "gaussian": 1.0, "alie": 1.5, "ipm": 2.0, "label_flip": 1.0}


@functools.cache
def _draw_malicious(seed: int, clients: tuple[int, ...], share: float) -> frozenset[int]:
    count = part_of(share, len(clients))
    chosen = seeds.rng(seed, "malicious").choice(clients, count, replace=False)
    return frozenset(int(c) for c in chosen)


def malicious(config: Config) -> frozenset[int]:
    """Returns the malicious clients of a run: floor(share * N) of the N that may train, drawn from
    the run's seed.
    """
    section = config.faults.malicious
    return _draw_malicious(config.seed, training(config), section.clients)


def strength(config: Config) -> float:
    """Returns the attack's factor: the configuration's, or the attack's default."""
    section = config.faults.malicious
    return STRENGTH[section.attack] if section.strength is None else section.strength


def flipped_labels(y: torch.Tensor, classes: int) -> torch.Tensor:
    """label_flip: class c becomes C - 1 - c. A target without a label stays so."""
    return torch.where(y < 0, y, classes - 1 - y)


def attacked_vector(
    y: Tensors, x: Tensors | None, config: Config, round: int, client: int
) -> Tensors:
    """Returns what a malicious client sends instead of y (float32, as y). x: None for an update.

    sign_flip: x - strength * u. gaussian: x + N(0, strength^2) in every coordinate. Any other
    attack leaves y as it is. Buffers stay.
    """
    attack = config.faults.malicious.attack
    factor = strength(config)
    if attack == "sign_flip":
        if x is None:
            return y.with_vector(-factor * y.vector)
        return y.with_vector(blockwise(lambda y, x: x - factor * (y - x), y, x))
    if attack == "gaussian":
        draws = seeds.torch_rng(config.seed, "malicious/gaussian", round, client)
        noise = factor * torch.randn(len(y.vector), generator=draws).to(y.vector.device)
        return y.with_vector(noise if x is None else x.vector.to(noise.device) + noise)
    return y


def attacked_reply(up: P, x: Tensors, config: Config, round: int, client: int) -> P:
    """Returns a reply as a malicious client sends it. An attack that the server makes leaves it
    unchanged. x: what its weights started from.
    """
    changed = {
        name: attacked_vector(
            value, x if up.fields[name].kind == "state" else None, config, round, client
        )
        for name, value in tensors_of(up).items()
    }
    return dataclasses.replace(up, **changed) if changed else up


def colluding(honest: torch.Tensor, attack: str, factor: float) -> torch.Tensor:
    """Returns the (P,) float64 update that each malicious client sends if it knows the honest
    ones (m, P).

    alie: mean + z std (of m - 1), Baruch et al., NeurIPS 2019 (arXiv:1902.06156), Algorithm 1 (the
    sign does not matter for a symmetric defence). ipm: -epsilon mean, Xie et al., UAI 2019
    (arXiv:1903.03936), section 4.
    """
    mean = rules.mean(honest)
    if attack == "ipm":
        return -factor * mean
    square = torch.zeros_like(mean)
    for row in honest:
        square += (row - mean) ** 2
    return mean + factor * (square / max(1, len(honest) - 1)).sqrt()

"""Client-level DP-FedAvg: McMahan et al., "Learning Differentially Private Recurrent Language
Models", ICLR 2018 (arXiv:1710.06963), and the bound of an update's norm.

C  privacy.clip    z  privacy.noise    m of N  clients drawn a round

An update (y_i - x where a method sends weights y_i) is clipped to norm C by its client, and by the
server again, which so need not trust it. Every update counts the same: weights by sample counts
would be data-dependent. `where: server` adds N(0, (zC)^2) once to the sum; `where: client` adds it
to each update before it is compressed and leaves its site.

What is private is the update: sample counts, losses and counts of correct answers travel as they
are. Buffers would leave unclipped, so a model whose buffers cross is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednet.config import PrivacySection
from fednet.errors import ConfigError, StateError
from fednet.experiment import selection
from fednet.files import digest
from fednet.tensors import Sum, Tensors
from fednet.wire.payload import run_of

SLACK = 1.0001
"""The server takes an update for clipped up to this factor: float32 rounds x + (y - x)."""


# -- an update's norm ------------------------------------------------------------------------------
def updates(up: Any, x: Tensors | None) -> Iterable[tuple[str, Tensors, float]]:
    """(field, value, norm of its update) of a reply's tensors. x: what the client was sent."""
    for name, field in up.fields.items():
        value = getattr(up, name)
        if isinstance(value, Tensors):
            yield name, value, _update(value, field.kind, x).norm()


def _update(value: Tensors, kind: str, x: Tensors | None) -> Tensors:
    return value - x.to(value.device) if kind == "state" and x is not None else value


def clipped(up: Any, x: Tensors | None, bound: float, slack: float = 1.0) -> Any:
    """The reply with each update scaled to norm `bound` where it is above `slack * bound`; else the
    same bits.
    """
    changed = {}
    for name, value, norm in updates(up, x):
        if norm > slack * bound:
            kind, factor = up.fields[name].kind, bound / norm
            short = _update(value, kind, x).vector * factor
            changed[name] = value.with_vector(
                x.vector.to(value.device) + short if kind == "state" and x is not None else short
            )
    return dataclasses.replace(up, **changed) if changed else up


# -- noise -----------------------------------------------------------------------------------------
class Noise:
    """Gaussian noise from a secret of its own, kept in `file` (mode 0600): from the run's seed,
    which every client knows, anyone could compute the noise and take it off. The same (round,
    client) gives the same noise again, so that a round repeated after a crash shows nothing new.
    """

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            # Linked, not renamed: of two processes that share the directory the first stays.
            aside = file.with_name(f".{file.name}.{os.getpid()}")
            with os.fdopen(
                os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as out:
                secret = secrets.token_bytes(32)
                out.write(secret + digest([secret]))
            with contextlib.suppress(FileExistsError):
                os.link(aside, file)
            aside.unlink()
        found = file.read_bytes()
        self._secret = found[:32]
        if digest([self._secret]) != found[32:]:
            raise StateError(
                f"{file}: not the secret that was written there, and other noise would show what "
                f"the first has hidden; put it back, or begin the run anew under another name."
            )

    def draw(self, n: int, scale: float, round: int, client: int = -1) -> torch.Tensor:
        """(n,) float64 of N(0, scale^2)."""
        key = hashlib.sha256(self._secret + f"/{round}/{client}".encode()).digest()
        rng = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        return torch.from_numpy(rng.normal(0.0, scale, n))


def protect(
    up: Any,
    x: Tensors | None,
    section: PrivacySection,
    noise: Noise | None,
    round: int,
    client: int,
) -> Any:
    """The client's part: clip, then, with `where: client`, noise."""
    assert section.clip is not None
    up = clipped(up, x, section.clip)
    if section.where != "client" or not section.noise or noise is None:
        return up
    changed = {}
    for name, value, _ in updates(up, x):
        drawn = noise.draw(value.vector.numel(), section.noise * section.clip, round, client)
        changed[name] = value.with_vector((value.vector.double() + drawn.to(value.device)).float())
    return dataclasses.replace(up, **changed)


def received(up: Any, x: Tensors | None, section: PrivacySection) -> Any:
    """The server's part of one reply: clipped whoever sent it, and of weight 1."""
    assert section.clip is not None
    if section.where == "server":
        up = clipped(up, x, section.clip, SLACK)
    run = run_of(up)
    if run is None:
        return up
    return dataclasses.replace(up, **{up.roles.run: dataclasses.replace(run, n=1)})


def noised(fold: Any, section: PrivacySection, noise: Noise | None, round: int) -> Any:
    """The fold with noise on its sum, where it is the server that adds it."""
    assert section.clip is not None
    if section.where != "server" or not section.noise or noise is None:
        return fold
    changed = {}
    for f in dataclasses.fields(fold):
        total = getattr(fold, f.name)
        if isinstance(total, Sum) and total.layout is not None:
            drawn = noise.draw(total.vector.numel(), section.noise * section.clip, round).to(
                total.vector.device
            )
            changed[f.name] = dataclasses.replace(total, vector=total.vector + drawn)
    return fold.replace(**changed)


# -- what it amounts to ----------------------------------------------------------------------------
class Accountant:
    """What has been spent at `privacy.delta`, by Rényi DP, from Google's dp-accounting.
    Neighbouring federations differ in one client's whole data, replaced by other data: a sum then
    changes by up to 2C.

    epsilon: against whoever knows the cohorts; they follow from the run's seed, which all clients
    know, so this is the promise. A client's budget is spent by each round it is drawn in.
    epsilon_sampled, with `where: server`: had the cohorts been secret, which is what papers report
    (m of N drawn without replacement: Wang et al., AISTATS 2019, arXiv:1808.00087); none where an
    availability model draws clients unevenly.
    """

    def __init__(self, config: Any) -> None:
        self._config, section = config, config.privacy
        try:
            import dp_accounting
            from dp_accounting import rdp
        except ImportError:
            raise ConfigError(
                "privacy.noise: its accountant is the package dp-accounting; `pip install "
                "'fednet[privacy]'` brings it."
            ) from None
        gaussian = dp_accounting.GaussianDpEvent(section.noise / 2)
        self._events = {"epsilon": gaussian}
        if section.where == "server" and config.availability.model == "always":
            drawn = min(config.clients, config.cohort_size + config.round.select_extra)
            self._events["epsilon_sampled"] = dp_accounting.SampledWithoutReplacementDpEvent(
                config.clients, drawn, gaussian
            )
        self._accountants = {
            name: rdp.RdpAccountant(
                neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
            )
            for name in self._events
        }
        self._spent = dict.fromkeys(self._events, 0)
        self._round = 0
        self._taken: dict[int, int] = {}

    def spent(self, round: int) -> dict[str, float]:
        """After `round` rounds; to be asked in ascending order."""
        for r in range(self._round + 1, round + 1):
            for client in selection.cohort(self._config, r):
                self._taken[client] = self._taken.get(client, 0) + 1
        self._round = round
        times = {"epsilon": max(self._taken.values(), default=0), "epsilon_sampled": round}
        for name, event in self._events.items():
            if times[name] > self._spent[name]:
                self._accountants[name].compose(event, times[name] - self._spent[name])
                self._spent[name] = times[name]
        return {
            name: float(a.get_epsilon(self._config.privacy.delta))
            for name, a in self._accountants.items()
        }


def check(experiment: Any) -> None:
    """Raises ConfigError where DP-FedAvg cannot be had. Called before anything starts."""
    config, method = experiment.config, experiment.algorithm
    if config.privacy.clip is None:
        return
    if not method.sums_updates:
        raise ConfigError(
            f"privacy.clip: {config.algorithm.name} does not aggregate a sum of updates; "
            f"DP-FedAvg needs one that does."
        )
    if experiment.up.buffers and experiment.shared.sizes[1] + experiment.shared.sizes[2]:
        raise ConfigError(
            "privacy.clip: this model's BatchNorm statistics would leave their clients unclipped; "
            "set model.buffers: local."
        )
    if config.privacy.noise:
        Accountant(config)

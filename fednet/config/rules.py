"""Combinations that cannot work, refused before anything starts."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fednet import ids, registry
from fednet.config.conditions import FaultKind
from fednet.config.parts import at
from fednet.config.sections import Config
from fednet.config.tree import Node
from fednet.config.types import drawn
from fednet.errors import ConfigError
from fednet.options import call

NEEDS = {"crash": "rounds", "delay": "seconds", "slow": "factor", "server_crash": "at"}
AVAILABILITY = {"always": (), "bernoulli": ("p",), "markov": ("up", "down"), "trace": ("path",)}


def check(config: Config, tree: Node) -> None:
    """All rules that need no part. Raises ConfigError for the first that is broken."""
    c = config

    def refuse(key: str, sentence: str) -> ConfigError:
        node = at(tree, key)
        return ConfigError(f"{node.key_at or node.at}: {key}: {sentence}")

    if c.participation is not None and c.clients_per_round is not None:
        raise refuse("clients_per_round", "participation is given too; keep one of them.")
    if c.participation is None and c.clients_per_round is None:
        raise refuse(
            "participation", "is null and clients_per_round is not given; give one of them."
        )
    if c.clients_per_round is not None and c.clients_per_round > c.clients:
        raise refuse(
            "clients_per_round",
            f"{c.clients_per_round} is more than the {c.clients} clients there are.",
        )
    asked = min(c.clients, c.cohort_size + c.round.select_extra)
    if c.cohort_size + c.round.select_extra > c.clients:
        raise refuse(
            "round.select_extra",
            f"{c.cohort_size} + {c.round.select_extra} clients a round are more than the "
            f"{c.clients} there are.",
        )
    if c.round.min_results > asked:
        raise refuse(
            "round.min_results",
            f"{c.round.min_results} is more than the {asked} clients asked in a round.",
        )
    if c.round.first is not None and not c.round.min_results <= c.round.first <= asked:
        raise refuse(
            "round.first",
            f"expected a whole number from min_results, {c.round.min_results}, to the {asked} "
            f"clients asked in a round, "
            f"got {c.round.first}.",
        )
    if c.round.start != "all" and c.round.start > c.clients:
        raise refuse(
            "round.start", f"{c.round.start} is more than the {c.clients} clients there are."
        )
    if c.data.public.samples and c.data.public.fraction:
        raise refuse("data.public", "both samples and fraction are given; keep one of them.")
    if c.data.validation + c.data.public.fraction >= 1:
        raise refuse(
            "data.validation",
            "validation and public.fraction together leave no sample for the clients.",
        )
    if c.link.clock == "virtual" and c.link.step_ms is None:
        raise refuse(
            "link.clock", "virtual needs link.step_ms, the milliseconds of one training step."
        )
    if c.security.keys is not None and not c.security.curve:
        raise refuse(
            "security.keys", "is given while security.curve is false; set security.curve: true."
        )
    if c.privacy.noise and c.privacy.clip is None:
        raise refuse("privacy.noise", "needs privacy.clip, the norm that it is a multiple of.")
    if c.stop.accuracy is not None and not c.evaluate.every:
        raise refuse(
            "stop.accuracy", "needs evaluate.every of at least 1: nothing would measure it."
        )
    if c.stop.accuracy is not None and not c.evaluate.global_ and c.evaluate.clients == "none":
        raise refuse(
            "stop.accuracy", "needs evaluate.global or evaluate.clients: nothing would measure it."
        )
    if c.train.optimizer != "sgd" and c.train.momentum:
        raise refuse("train.momentum", f"belongs to sgd; the optimizer is {c.train.optimizer}.")
    _schedule(c, refuse)
    _pack(c, refuse)
    for pattern in c.link.per_client:
        try:
            beyond = max(ids.parse(pattern, "the clients"), default=0)
        except ConfigError as wrong:
            raise refuse(f"link.per_client.{pattern}", str(wrong)) from None
        if beyond >= c.clients:
            raise refuse(
                f"link.per_client.{pattern}",
                f"there is no client {beyond}; ids go from 0 to {c.clients - 1}.",
            )
    for where, link in (
        ("link", c.link),
        *((f"link.per_client.{k}", v) for k, v in c.link.per_client.items()),
    ):
        for key in ("up_mbps", "down_mbps", "latency_ms", "jitter_ms", "step_ms"):
            figure = getattr(link, key)
            if isinstance(figure, str):
                name, first, second = drawn(figure)
                unbounded = not 0 < first < math.inf or not second < math.inf
                if unbounded or (name == "uniform" and second < first):
                    raise refuse(
                        f"{where}.{key}",
                        f"{figure}: expected a finite median above 0, or two finite figures above "
                        f"0 in ascending order.",
                    )
    _availability(c, refuse)
    _faults(c, refuse)


def _schedule(c: Config, refuse: Any) -> None:
    """Each round has a learning rate: what only a task would find out ends a client's run there."""
    try:
        numbers = call(c.train.schedule)[1]
        sound = all(0 < x < math.inf for x in numbers)
        sound = sound and c.train.lr_at(c.rounds, c.rounds) < math.inf
    except (ConfigError, OverflowError):
        sound = False
    if not sound:
        raise refuse(
            "train.schedule",
            f"{c.train.schedule} has no learning rate for each of {c.rounds} rounds; expected "
            f"numbers above 0.",
        )


def _pack(c: Config, refuse: Any) -> None:
    if c.train.pack > 1:
        for key, found, can in (
            ("train.optimizer", c.train.optimizer, ("sgd",)),
            ("train.precision", c.train.precision, ("fp32", "tf32")),
            ("data.augment", c.data.augment, ("none",)),
        ):
            if found not in can:
                raise refuse(
                    "train.pack",
                    f"packed clients are trained with {key} {' or '.join(can)}, not {found}; "
                    f"leave train.pack out.",
                )


def _availability(c: Config, refuse: Any) -> None:
    needs = AVAILABILITY[c.availability.model]
    for key in ("p", "up", "down", "path"):
        given = getattr(c.availability, key) is not None
        if given and key not in needs:
            raise refuse(
                f"availability.{key}",
                f"does not belong to {c.availability.model}, which has "
                f"{', '.join(needs) or 'no options'}.",
            )
        if not given and key in needs:
            raise refuse("availability", f"{c.availability.model} needs {' and '.join(needs)}.")


def _faults(c: Config, refuse: Any) -> None:
    from typing import get_args

    from fednet.errors import unknown

    kinds = get_args(FaultKind)
    for kind in c.faults.random:
        if kind not in kinds:
            raise refuse(f"faults.random.{kind}", unknown("kind of fault", kind, kinds))
    for i, fault in enumerate(c.faults.schedule):
        here = "faults.schedule"
        if fault.kind != "server_crash" and fault.client is None:
            raise refuse(here, f"number {i + 1}, {fault.kind}, needs a client.")
        if fault.kind == "server_crash" and fault.client is not None:
            raise refuse(here, f"number {i + 1}, server_crash, has no client.")
        if fault.client is not None and fault.client >= c.clients:
            raise refuse(
                here,
                f"number {i + 1}: there is no client {fault.client}; ids go from 0 to "
                f"{c.clients - 1}.",
            )
        needed = NEEDS.get(fault.kind)
        if needed and getattr(fault, needed) is None:
            raise refuse(here, f"number {i + 1}, {fault.kind}, needs {needed}.")


def check_method(config: Config, tree: Node) -> set[str]:
    """The rules that a method's class declares. Returns the kinds that can cross."""
    method = registry.algorithm.get(config.algorithm.name)
    made = method(msgspec.convert(config.algorithm.options, method.Config), config.clients)
    name = config.algorithm.name

    def refuse(key: str, sentence: str) -> ConfigError:
        node = at(tree, key)
        return ConfigError(f"{node.key_at or node.at}: {key}: {sentence}")

    if found := made.refusal(config):
        raise refuse(*found)
    if method.classes_only and config.task != "classification":
        raise refuse(
            "task",
            f"{name} trains with a loss of its own about classes; expected classification, got "
            f"{config.task!r}.",
        )
    if method.sgd_only and config.train.optimizer != "sgd":
        raise refuse(
            "train.optimizer",
            f"{name} assumes plain SGD steps; expected sgd, got {config.train.optimizer!r}.",
        )
    if method.momentum_free and config.train.momentum:
        raise refuse(
            "train.momentum",
            f"{name} assumes local steps without momentum; expected 0, got "
            f"{config.train.momentum}.",
        )
    if method.needs_public and not (config.data.public.samples or config.data.public.fraction):
        raise refuse(
            "data.public",
            f"{name} needs samples held out for the server; set data.public.samples or "
            f"data.public.fraction.",
        )
    if method.personalised and config.evaluate.keep_local == "never":
        raise refuse(
            "evaluate.keep_local",
            f"{name} is judged by its clients' own models; expected auto or always, got 'never'.",
        )
    if config.privacy.clip is not None and not method.sums_updates:
        raise refuse(
            "privacy.clip",
            f"{name} does not fold its replies as a sum of updates, so clipping and noise cannot "
            f"be applied to it.",
        )
    kinds = {"state", "delta", "control", "condensed", "accuracy", "shared", "statistics"}
    for exchange in made.exchanges:
        kinds |= exchange.down.kinds() | exchange.up.kinds()
    return kinds

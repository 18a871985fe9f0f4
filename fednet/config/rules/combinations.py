"""Combinations that cannot work, refused before anything starts."""

from __future__ import annotations

import math

import msgspec

from fednet import registry
from fednet.config import parts
from fednet.config.parts import Method
from fednet.config.rules import schedules, surroundings
from fednet.config.schema import (
    DIVIDES,
    SITE,
    Config,
    DataSection,
)
from fednet.config.tree import Node, Refuse, refuser
from fednet.errors import ConfigError, lacking
from fednet.options import call


def check(config: Config, tree: Node) -> None:
    """All rules that need no part. Raises ConfigError for the first that is broken."""
    c, refuse = config, refuser(tree)
    _cohort(c, refuse)
    _lost(c, refuse)
    _sites(c, refuse)
    _apart(c, refuse)
    _measured(c, refuse)
    _training(c, refuse)
    schedules.check(c, refuse)
    parts.check_models(c, refuse)
    surroundings.check(c, refuse)


def _cohort(c: Config, refuse: Refuse) -> None:
    """Who is asked in a round, and who must answer."""
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
    asked = c.asked
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
    if c.round.ask is not None and (c.round.select_extra or c.round.first is not None):
        raise refuse("round.ask", "select_extra or first is given too; keep one of them.")


def _sites(c: Config, refuse: Refuse) -> None:
    """Where sites bring their own data, nothing is divided."""
    if c.data.dataset != SITE:
        return
    plain = DataSection()
    for key in DIVIDES:
        if getattr(c.data, key) != getattr(plain, key):
            raise refuse(
                f"data.{key}",
                "says how a run divides its data; with dataset: site each site brings its own, "
                "which are left as they are. Leave it out.",
            )


def _apart(c: Config, refuse: Refuse) -> None:
    """Keys that need, or rule out, another."""
    if c.data.public.samples and c.data.public.fraction:
        raise refuse("data.public", "both samples and fraction are given; keep one of them.")
    if c.data.validation + c.data.public.fraction >= 1:
        raise refuse(
            "data.validation",
            "validation and public.fraction together leave no sample for the clients.",
        )
    if c.link.clock == "virtual" and c.link.step_ms is None and c.devices.trace is None:
        raise refuse(
            "link.clock",
            "virtual needs link.step_ms, the milliseconds of one training step, or devices.trace.",
        )
    if c.security.keys is not None and not c.security.curve:
        raise refuse(
            "security.keys", "is given while security.curve is false; set security.curve: true."
        )
    if c.privacy.noise and c.privacy.clip is None:
        raise refuse("privacy.noise", "needs privacy.clip, the norm that it is a multiple of.")


def _measured(c: Config, refuse: Refuse) -> None:
    """What ends a run is measured."""
    if c.stop.accuracy is not None and not c.evaluate.every:
        raise refuse(
            "stop.accuracy", "needs evaluate.every of at least 1: nothing would measure it."
        )
    if c.stop.accuracy is not None and not c.evaluate.global_ and c.evaluate.clients == "none":
        raise refuse(
            "stop.accuracy", "needs evaluate.global or evaluate.clients: nothing would measure it."
        )


def _lost(c: Config, refuse: Refuse) -> None:
    lost = c.round.lost
    for key in ("closed", "silent"):
        patience = getattr(lost, key)
        if lost.beat is not None and patience is not None and patience < 2 * lost.beat:
            raise refuse(
                "round.lost.beat",
                f"{lost.beat:g} s: round.lost.{key} of {patience:g} s must be at least twice as "
                f"long, else a client that is alive counts as lost.",
            )


def _training(c: Config, refuse: Refuse) -> None:
    if c.train.optimizer != "sgd" and c.train.momentum:
        raise refuse("train.momentum", f"belongs to sgd; set it to 0 with {c.train.optimizer}.")
    _lr_schedule(c, refuse)
    _pack(c, refuse)


def _lr_schedule(c: Config, refuse: Refuse) -> None:
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


def _pack(c: Config, refuse: Refuse) -> None:
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


def _aggregation(c: Config, name: str, sums_updates: bool, refuse: Refuse) -> None:
    """A rule for liars wants a sum that it can stand in for, without noise reckoned for a sum."""
    attack = c.faults.malicious.attack if c.faults.malicious.clients else ""
    for key, asked in (
        ("aggregation.rule", c.aggregation.rule != "mean" and c.aggregation.rule),
        ("faults.malicious.attack", attack in ("alie", "ipm") and attack),
    ):
        if asked and not sums_updates:
            raise refuse(
                key,
                f"{name} does not fold its replies as a sum of updates, so that {asked} cannot "
                f"stand in its place.",
            )
        if asked and c.privacy.noise:
            raise refuse(key, f"privacy.noise is reckoned for a mean; {asked} is none.")
    if attack == "label_flip" and c.task != "classification":
        raise refuse("faults.malicious.attack", f"label_flip wants classes; task is {c.task}.")


def _exchanges(c: Config, name: str, plain: int, refuse: Refuse) -> None:
    """A fault is planned for an exchange that there is."""
    protocol = c.privacy.secagg.protocol
    if protocol != "none":
        from fednet.secagg.terms import steps_of

        plain = len(steps_of(protocol))
    for i, fault in enumerate(c.faults.schedule):
        if fault.exchange is not None and fault.exchange >= plain:
            raise refuse(
                "faults.schedule",
                f"number {i + 1}: exchange {fault.exchange}; a round of {name} has {plain} here, "
                f"from 0.",
            )


def _secagg(c: Config, name: str, method: Method, refuse: Refuse) -> None:
    """A sum of which the server sees no term: nothing may ask it to look at one."""
    section = c.privacy.secagg
    if section.protocol == "none":
        return
    from fednet.secagg import primitives

    if primitives.missing():
        raise refuse(
            "privacy.secagg.protocol",
            lacking("secure aggregation", "cryptography"),
        )
    key = "privacy.secagg.protocol"
    if not method.summed or len(method.exchanges) != 1 or method.Enrolment is not None:
        raise refuse(
            key, f"the server of {name} needs more of each reply than a weighted sum of its fields."
        )
    asked = c.privacy.noise and c.privacy.where == "server"
    lossy = sorted(k for k, chain in c.wire.down.items() if k == "state" and chain)
    attack = c.faults.malicious.attack if c.faults.malicious.clients else ""
    for where, wrong, sentence in (
        ("aggregation.rule", c.aggregation.rule != "mean", "a rule looks at single replies"),
        ("faults.malicious.attack", attack in ("alie", "ipm"), "it is made of single replies"),
        ("wire.up", any(c.wire.up.values()), "a masked vector has no smaller form; set bits"),
        ("wire.down", bool(lossy), "updates are summed as differences to what the server has"),
        ("privacy.where", asked, "the server would see the sum without its noise; set client"),
        (
            "availability.model",
            c.privacy.noise and (c.availability.model != "always" or c.availability.trace),
            "fewer clients than are drawn would add too little noise",
        ),
        ("checkpoint.every", c.checkpoint.every != 1, "no round can be summed twice; set 1"),
        ("round.first", c.first is not None, "each step would have other clients"),
        ("train.pack", c.train.pack > 1, "steps of one client wait for other clients' training"),
    ):
        if wrong:
            raise refuse(where, f"{sentence}, with privacy.secagg.")


def check_method(config: Config, tree: Node) -> set[str]:
    """The rules that a method's class declares. Returns the kinds that can cross."""
    method = registry.algorithm.get(config.algorithm.name)
    name, refuse = config.algorithm.name, refuser(tree)
    try:
        options = msgspec.convert(config.algorithm.options, method.Config)
    except msgspec.ValidationError as wrong:  # what was given has been read: it is a default
        raise refuse("algorithm", f"a default of {name} is not what it may be: {wrong}.") from None
    try:
        made = method(options, config.clients)
    except TypeError as wrong:  # an __init__ of the user's
        raise refuse(
            "algorithm",
            f"{name} cannot be made of its Config and the number of clients ({wrong}); what it "
            f"takes from the configuration belongs in its Config, and __init__ is left out.",
        ) from None
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
    _public(config, method, refuse)
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
    for found in (schedules.objection(config, method), parts.model_objection(config, method)):
        if found:
            raise refuse(*found)
    _aggregation(config, name, method.sums_updates, refuse)
    _secagg(config, name, made, refuse)
    _exchanges(config, name, len(made.exchanges), refuse)
    kinds = {"state", "delta", "control", "condensed", "accuracy", "shared", "statistics"}
    for exchange in made.exchanges:
        kinds |= exchange.down.kinds() | exchange.up.kinds()
    return kinds


def _public(c: Config, method: Method, refuse: Refuse) -> None:
    """A method that needs public samples has them."""
    name = c.algorithm.name
    if method.needs_public and c.data.dataset == SITE:
        raise refuse(
            "data.dataset",
            f"{name} needs samples held out for the server; with site the sites have them all.",
        )
    if method.needs_public and not (c.data.public.samples or c.data.public.fraction):
        raise refuse(
            "data.public",
            f"{name} needs samples held out for the server; set data.public.samples or "
            f"data.public.fraction.",
        )

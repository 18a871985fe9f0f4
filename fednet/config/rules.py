"""Combinations of keys that cannot work, refused before anything starts.

A rule is a row of a table: the key that is wrong, when it is wrong, and the sentence that says so.
Rows are tried in order, and the first that is broken is the error. So a row may rely on those above
it. What concerns each entry of a list or mapping is a function below the tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, get_args

import msgspec

from fednet import ids, registry
from fednet.config.parts import Method
from fednet.config.schema import DIVIDES, SITE, Config, DataSection, FaultKind, drawn
from fednet.config.tree import Node, Refuse, refuser
from fednet.errors import ConfigError, lacking, unknown
from fednet.options import call

Broken = tuple[str, str]  # a key and the sentence that is said about it


class Rule(NamedTuple):
    """A row of `RULES`. sentence: with {c...} for values of the configuration."""

    key: str
    broken: Callable[[Config], object]
    sentence: str


class MethodRule(NamedTuple):
    """A row of `METHOD_RULES`. sentence: also with {name} and {exchanges} of the method."""

    key: str
    broken: Callable[[Config, Method], object]
    sentence: str


def _has_rates(c: Config) -> bool:
    """Whether `train.schedule` has a learning rate for each round."""
    try:
        numbers = call(c.train.schedule)[1]
        return all(0 < x < math.inf for x in numbers) and (
            c.train.lr_at(c.rounds, c.rounds) < math.inf
        )
    except (ConfigError, OverflowError):
        return False


def _shortest(key: str) -> Rule:
    """A client that is alive sends at least two heartbeats before it counts as lost."""

    def broken(c: Config) -> bool:
        patience, beat = getattr(c.round.lost, key), c.round.lost.beat
        return patience is not None and beat is not None and patience < 2 * beat

    return Rule(
        "round.lost.beat",
        broken,
        f"{{c.round.lost.beat:g}} s: round.lost.{key} of {{c.round.lost.{key}:g}} s must be at "
        f"least twice as long, else a client that is alive counts as lost.",
    )


def _divides(key: str) -> Rule:
    plain = getattr(DataSection(), key)
    return Rule(
        f"data.{key}",
        lambda c: c.data.dataset == SITE and getattr(c.data, key) != plain,
        "says how a run divides its data; with dataset: site each site brings its own, which are "
        "left as they are. Leave it out.",
    )


def _packs(key: str, value: Callable[[Config], str], allowed: tuple[str, ...]) -> Rule:
    return Rule(
        "train.pack",
        lambda c: c.train.pack > 1 and value(c) not in allowed,
        f"packed clients are trained with {key} {' or '.join(allowed)}, not {{c.{key}}}; leave "
        f"train.pack out.",
    )


def _plans(c: Config, kind: str) -> bool:
    return kind in c.faults.random or any(f.kind == kind for f in c.faults.schedule)


RULES = (
    # who is selected in a round, and who must reply
    Rule(
        "clients_per_round",
        lambda c: c.participation is not None and c.clients_per_round is not None,
        "participation is given too; keep one of them.",
    ),
    Rule(
        "participation",
        lambda c: c.participation is None and c.clients_per_round is None,
        "is null and clients_per_round is not given; give one of them.",
    ),
    Rule(
        "clients_per_round",
        lambda c: (c.clients_per_round or 0) > c.clients,
        "{c.clients_per_round} is more than the {c.clients} clients there are.",
    ),
    Rule(
        "round.select_extra",
        lambda c: c.cohort_size + c.round.select_extra > c.clients,
        "{c.cohort_size} + {c.round.select_extra} clients a round are more than the {c.clients} "
        "there are.",
    ),
    Rule(
        "round.min_results",
        lambda c: c.round.min_results > c.asked,
        "{c.round.min_results} is more than the {c.asked} clients asked in a round.",
    ),
    Rule(
        "round.first",
        lambda c: c.round.first is not None and not c.round.min_results <= c.round.first <= c.asked,
        "expected a whole number from min_results, {c.round.min_results}, to the {c.asked} clients "
        "asked in a round, got {c.round.first}.",
    ),
    Rule(
        "round.start",
        lambda c: c.round.start != "all" and c.round.start > c.clients,
        "{c.round.start} is more than the {c.clients} clients there are.",
    ),
    Rule(
        "round.ask",
        lambda c: c.round.ask is not None and (c.round.select_extra or c.round.first is not None),
        "select_extra or first is given too; keep one of them.",
    ),
    _shortest("closed"),
    _shortest("silent"),
    # data
    *map(_divides, DIVIDES),
    Rule(
        "data.public",
        lambda c: c.data.public.samples and c.data.public.fraction,
        "both samples and fraction are given; keep one of them.",
    ),
    Rule(
        "data.validation",
        lambda c: c.data.validation + c.data.public.fraction >= 1,
        "validation and public.fraction together leave no sample for the clients.",
    ),
    # keys that need another
    Rule(
        "link.clock",
        lambda c: c.link.clock == "virtual" and c.link.step_ms is None and c.devices.trace is None,
        "virtual needs link.step_ms, the milliseconds of one training step, or devices.trace.",
    ),
    Rule(
        "security.keys",
        lambda c: c.security.keys is not None and not c.security.curve,
        "is given while security.curve is false; set security.curve: true.",
    ),
    Rule(
        "privacy.noise",
        lambda c: c.privacy.noise and c.privacy.clip is None,
        "needs privacy.clip, the norm that it is a multiple of.",
    ),
    Rule(
        "stop.accuracy",
        lambda c: c.stop.accuracy is not None and not c.evaluate.every,
        "needs evaluate.every of at least 1: nothing would measure it.",
    ),
    Rule(
        "stop.accuracy",
        lambda c: (
            c.stop.accuracy is not None and not c.evaluate.global_ and c.evaluate.clients == "none"
        ),
        "needs evaluate.global or evaluate.clients: nothing would measure it.",
    ),
    # local training
    Rule(
        "train.momentum",
        lambda c: c.train.optimizer != "sgd" and c.train.momentum,
        "belongs to sgd; set it to 0 with {c.train.optimizer}.",
    ),
    Rule(
        "train.schedule",
        lambda c: not _has_rates(c),
        "{c.train.schedule} has no learning rate for each of {c.rounds} rounds; expected numbers "
        "above 0.",
    ),
    _packs("train.optimizer", lambda c: c.train.optimizer, ("sgd",)),
    _packs("train.precision", lambda c: c.train.precision, ("fp32", "tf32")),
    _packs("data.augment", lambda c: c.data.augment, ("none",)),
    # the schedule
    Rule(
        "schedule.buffer",
        lambda c: c.schedule.buffer is not None and c.schedule.mode != "async",
        "belongs to async; the mode is {c.schedule.mode}.",
    ),
    Rule(
        "schedule.every",
        lambda c: c.schedule.every is not None and c.schedule.mode != "semi-sync",
        "belongs to semi-sync; the mode is {c.schedule.mode}.",
    ),
    Rule(
        "schedule",
        lambda c: c.schedule.every is None and c.schedule.mode == "semi-sync",
        "semi-sync needs every, the seconds between two updates.",
    ),
    Rule(
        "schedule.buffer",
        lambda c: (c.schedule.buffer or 0) > c.clients,
        "{c.schedule.buffer} is more than the {c.clients} clients there are.",
    ),
    # the model
    Rule(
        "model.clients",
        lambda c: not c.model.others and c.model.clients is not None,
        "there is one model, which all clients have; leave it out.",
    ),
    # traces
    Rule(
        "availability.start",
        lambda c: c.availability.trace is None and c.availability.start,
        "belongs to availability.trace, which is not given.",
    ),
    Rule(
        "availability.repeat",
        lambda c: c.availability.trace is None and c.availability.repeat,
        "belongs to availability.trace, which is not given.",
    ),
    Rule(
        "availability.trace",
        lambda c: c.availability.trace is not None and c.availability.model != "always",
        "the model {c.availability.model} is given too; keep one of them.",
    ),
    Rule(
        "faults",
        lambda c: c.availability.trace is not None and _plans(c, "crash"),
        "a crash counts the rounds that a client stays away, and availability.trace the seconds; "
        "keep one of them.",
    ),
)

ASYNCHRONOUS = tuple(
    Rule(key, broken, f"cannot be combined with schedule: {{c.schedule.mode}}: {reason}.")
    for key, broken, reason in (
        Rule(
            "round.first",
            lambda c: c.round.first is not None,
            "no round waits for its first replies",
        ),
        Rule(
            "round.ask",
            lambda c: c.round.ask is not None,
            "no client is selected in place of another",
        ),
        Rule(
            "round.select_extra",
            lambda c: c.round.select_extra > 0,
            "no client is selected in place of another",
        ),
        Rule(
            "evaluate.clients",
            lambda c: c.evaluate.clients == "all",
            "clients do not stop training to evaluate",
        ),
        Rule("train.pack", lambda c: c.train.pack > 1, "clients do not start together"),
        Rule(
            "privacy.noise", lambda c: c.privacy.noise > 0, "its guarantee is computed from rounds"
        ),
        Rule(
            "privacy.secagg",
            lambda c: c.privacy.secagg.protocol != "none",
            "there is no cohort to sum over",
        ),
        Rule(
            "faults.replay",
            lambda c: c.faults.replay is not None and c.link.clock == "virtual",
            "a run on the virtual clock repeats without it",
        ),
        Rule(
            "round.min_results",
            lambda c: c.buffer is not None and c.round.min_results > c.buffer,
            "{c.buffer} replies make an update",
        ),
        Rule(
            "faults",
            lambda c: _plans(c, "crash"),
            "a crash keeps its client away for whole rounds; use drop_before_training, which "
            "loses its task",
        ),
    )
)

SEVERAL_MODELS = tuple(
    Rule(key, broken, f"cannot be combined with several models: {reason}.")
    for key, broken, reason in (
        Rule("train.pack", lambda c: c.train.pack > 1, "packed clients have one model"),
        Rule(
            "model.buffers",
            lambda c: c.model.buffers != "average",
            "each client's model is its own already",
        ),
        Rule(
            "model.adapters",
            lambda c: c.model.adapters is not None,
            "they name layers of one model",
        ),
        Rule(
            "model.weights", lambda c: c.model.weights is not None, "a file has one model's weights"
        ),
        Rule("model.base", lambda c: c.model.base == "server", "the server sends one model to all"),
        Rule("model.sha256", lambda c: c.model.sha256 is not None, "it is that of one model"),
        Rule("train.only", lambda c: c.train.only, "it names tensors of one model"),
    )
)


# -- rules of a method -----------------------------------------------------------------------------
def _attack(c: Config) -> str:
    return c.faults.malicious.attack if c.faults.malicious.clients else ""


def _from_all_replies(c: Config) -> bool:
    return _attack(c) in ("alie", "ipm")


def _asynchronous(c: Config) -> bool:
    return c.schedule.mode != "sync"


NOT_SUMMED = "{name} does not fold its replies as a sum of updates"

METHOD_RULES = (
    MethodRule(
        "task",
        lambda c, m: m.classes_only and c.task != "classification",
        "{name} trains with a loss of its own about classes; expected classification, got "
        "{c.task!r}.",
    ),
    MethodRule(
        "train.optimizer",
        lambda c, m: m.sgd_only and c.train.optimizer != "sgd",
        "{name} assumes plain SGD steps; expected sgd, got {c.train.optimizer!r}.",
    ),
    MethodRule(
        "train.momentum",
        lambda c, m: m.momentum_free and c.train.momentum,
        "{name} assumes local steps without momentum; expected 0, got {c.train.momentum}.",
    ),
    MethodRule(
        "data.dataset",
        lambda c, m: m.needs_public and c.data.dataset == SITE,
        "{name} needs samples held out for the server; with site the sites have them all.",
    ),
    MethodRule(
        "data.public",
        lambda c, m: m.needs_public and not (c.data.public.samples or c.data.public.fraction),
        "{name} needs samples held out for the server; set data.public.samples or "
        "data.public.fraction.",
    ),
    MethodRule(
        "evaluate.keep_local",
        lambda c, m: m.personalised and c.evaluate.keep_local == "never",
        "{name} is judged by its clients' own models; expected auto or always, got 'never'.",
    ),
    MethodRule(
        "privacy.clip",
        lambda c, m: c.privacy.clip is not None and not m.sums_updates,
        NOT_SUMMED + ", so clipping and noise cannot be applied to it.",
    ),
    MethodRule(
        "schedule.mode",
        lambda c, m: not _asynchronous(c) and m.own_schedule,
        "{name} makes an update of replies as they come, and has no rounds that wait for all; "
        "expected async or semi-sync, got sync (without a mode it is async).",
    ),
    MethodRule(
        "schedule",
        lambda c, m: _asynchronous(c) and len(m.exchanges) > 1,
        "{name} has {exchanges} exchanges a round; expected sync, got {c.schedule.mode}.",
    ),
    MethodRule(
        "schedule",
        lambda c, m: _asynchronous(c) and not m.asynchronous,
        "{name} does not support asynchronous training (it does not declare "
        "`asynchronous = True`); expected sync, got {c.schedule.mode}.",
    ),
    MethodRule(
        "model",
        lambda c, m: c.model.others and not m.architecture_free,
        "{name} sends weights, or what has their shape, and needs one model for all clients; "
        "methods whose messages do not depend on it, such as fedproto and fedmd, take a list.",
    ),
    MethodRule(
        "aggregation.rule",
        lambda c, m: c.aggregation.rule != "mean" and not m.sums_updates,
        NOT_SUMMED + ", so that {c.aggregation.rule} cannot replace it.",
    ),
    MethodRule(
        "aggregation.rule",
        lambda c, m: c.aggregation.rule != "mean" and c.privacy.noise,
        "the guarantee of privacy.noise is computed for a mean; {c.aggregation.rule} is none.",
    ),
    MethodRule(
        "faults.malicious.attack",
        lambda c, m: _from_all_replies(c) and not m.sums_updates,
        NOT_SUMMED + ", so that {c.faults.malicious.attack} cannot be made of them.",
    ),
    MethodRule(
        "faults.malicious.attack",
        lambda c, m: _from_all_replies(c) and c.privacy.noise,
        "the guarantee of privacy.noise is computed for a mean; {c.faults.malicious.attack} "
        "changes single replies.",
    ),
    MethodRule(
        "faults.malicious.attack",
        lambda c, m: _attack(c) == "label_flip" and c.task != "classification",
        "label_flip needs classes; the task is {c.task}.",
    ),
)

# With secure aggregation the server sees no single reply: nothing may need one.
SECAGG = (
    MethodRule(
        "privacy.secagg.protocol",
        lambda c, m: not m.summed or len(m.exchanges) != 1 or m.Enrolment is not None,
        "the server of {name} needs more of each reply than a weighted sum of its fields.",
    ),
    *(
        MethodRule(key, broken, f"{reason}, with privacy.secagg.")
        for key, broken, reason in (
            MethodRule(
                "aggregation.rule",
                lambda c, m: c.aggregation.rule != "mean",
                "a rule looks at single replies",
            ),
            MethodRule(
                "faults.malicious.attack",
                lambda c, m: _from_all_replies(c),
                "it is made of single replies",
            ),
            MethodRule(
                "wire.up",
                lambda c, m: any(c.wire.up.values()),
                "a masked vector has no smaller form; set bits",
            ),
            MethodRule(
                "wire.down",
                lambda c, m: c.wire.down.get("state"),
                "updates are summed as differences to what the server has",
            ),
            MethodRule(
                "privacy.where",
                lambda c, m: c.privacy.noise and c.privacy.where == "server",
                "the server would see the sum without its noise; set client",
            ),
            MethodRule(
                "availability.model",
                lambda c, m: (
                    c.privacy.noise and (c.availability.model != "always" or c.availability.trace)
                ),
                "fewer clients than are drawn would add too little noise",
            ),
            MethodRule(
                "checkpoint.every",
                lambda c, m: c.checkpoint.every != 1,
                "no round can be summed twice; set 1",
            ),
            MethodRule(
                "round.first",
                lambda c, m: c.first is not None,
                "each step would have other clients",
            ),
            MethodRule(
                "train.pack",
                lambda c, m: c.train.pack > 1,
                "steps of one client wait for other clients' training",
            ),
        )
    ),
)


# -- rules of each entry of a list or mapping ------------------------------------------------------
def _models(c: Config) -> Iterator[Broken]:
    """Each client has one model."""
    seen: set[int] = set()
    for place, entry in enumerate(c.model.others):
        if "clients" not in entry or not isinstance(entry.get("name"), str):
            yield (
                f"model.others[{place}]",
                "expected a model's name and clients, such as {name: mlp, clients: 5-9}.",
            )
        key = f"model.others[{place}].clients"
        mine = set(ids.parse(str(entry["clients"]), key).resolve(c.clients))
        if both := mine & seen:
            yield "model", f"client {min(both)} has two models; expected one for each."
        seen |= mine
    left = set(range(c.clients)) - seen
    if not left:
        yield "model", f"no client is left for the first model, {c.model.name}."
    if c.model.clients is None:
        return
    given = set(ids.parse(c.model.clients, "model.clients").resolve(c.clients))
    if both := given & seen:
        yield "model", f"client {min(both)} has two models; expected one for each."
    if left - given:
        yield "model", f"client {min(left - given)} has no model; expected one for each."


def _links(c: Config) -> Iterator[Broken]:
    links = {"link": c.link, **{f"link.per_client.{k}": v for k, v in c.link.per_client.items()}}
    for where, link in links.items():
        for key in ("up_mbps", "down_mbps", "profile"):
            if c.link.trace is not None and getattr(link, key) is not None:
                yield f"{where}.{key}", "link.trace gives the rates; keep one of them."
    for pattern in c.link.per_client:
        try:
            ids.parse(pattern, "the clients").resolve(c.clients)
        except ConfigError as wrong:
            said = str(wrong).removeprefix(f"the clients {pattern}: ")
            yield f"link.per_client.{pattern}", said
    for where, link in links.items():
        for key in ("up_mbps", "down_mbps", "latency_ms", "jitter_ms", "step_ms"):
            figure = getattr(link, key)
            if not isinstance(figure, str):
                continue
            name, first, second = drawn(figure)
            finite = 0 < first < math.inf and second < math.inf
            if not finite or (name == "uniform" and second < first):
                yield (
                    f"{where}.{key}",
                    f"{figure}: expected a finite median above 0, or two finite figures above 0 in "
                    f"ascending order.",
                )


AVAILABILITY = {"always": (), "bernoulli": ("p",), "markov": ("up", "down"), "trace": ("path",)}


def _availability(c: Config) -> Iterator[Broken]:
    """Each model of availability has its own keys, all of them, and no other's."""
    model = c.availability.model
    needs = AVAILABILITY[model]
    for key in ("p", "up", "down", "path"):
        given = getattr(c.availability, key) is not None
        if given and key not in needs:
            has = ", ".join(needs) or "no options"
            yield f"availability.{key}", f"does not belong to {model}, which has {has}."
        if not given and key in needs:
            yield "availability", f"{model} needs {' and '.join(needs)}."


NEEDS = {"crash": "rounds", "delay": "seconds", "slow": "factor", "server_crash": "at"}


def _faults(c: Config) -> Iterator[Broken]:
    kinds = get_args(FaultKind)
    for kind in c.faults.random:
        if kind not in kinds:
            yield f"faults.random.{kind}", unknown("kind of fault", kind, kinds)
    here = "faults.schedule"
    for i, fault in enumerate(c.faults.schedule, 1):
        if fault.kind != "server_crash" and fault.client is None:
            yield here, f"number {i}, {fault.kind}, needs a client."
        if fault.kind == "server_crash" and fault.client is not None:
            yield here, f"number {i}, server_crash, has no client."
        if fault.client is not None and fault.client >= c.clients:
            yield (
                here,
                f"number {i}: there is no client {fault.client}; ids go from 0 to {c.clients - 1}.",
            )
        needed = NEEDS.get(fault.kind)
        if needed and getattr(fault, needed) is None:
            yield here, f"number {i}, {fault.kind}, needs {needed}."


def _exchanges(c: Config, exchanges: int) -> Iterator[Broken]:
    """A planned fault names an exchange that a round has. exchanges: the method's own."""
    protocol = c.privacy.secagg.protocol
    if protocol != "none":
        from fednet.secagg.terms import steps_of

        exchanges = len(steps_of(protocol))
    for i, fault in enumerate(c.faults.schedule, 1):
        if fault.exchange is not None and fault.exchange >= exchanges:
            yield (
                "faults.schedule",
                f"number {i}: exchange {fault.exchange}; a round of {c.algorithm.name} has "
                f"{exchanges} here, from 0.",
            )


# -- checking --------------------------------------------------------------------------------------
def _broken(c: Config) -> Iterator[Broken]:
    tables = [RULES]
    if _asynchronous(c):
        tables.append(ASYNCHRONOUS)
    for rule in (rule for table in tables for rule in table):
        if rule.broken(c):
            yield rule.key, rule.sentence.format(c=c)
    if c.model.others:
        yield from _models(c)
        for rule in SEVERAL_MODELS:
            if rule.broken(c):
                yield rule.key, rule.sentence.format(c=c)
    yield from _links(c)
    yield from _availability(c)
    yield from _faults(c)


def check(config: Config, tree: Node) -> None:
    """All rules that need no part. Raises ConfigError for the first that is broken."""
    for key, sentence in _broken(config):
        raise refuser(tree)(key, sentence)


def check_method(config: Config, tree: Node) -> set[str]:
    """The rules that a method's class declares. Returns the kinds of payload that can be sent."""
    method, refuse = _made(config, refuser(tree)), refuser(tree)
    if found := method.refusal(config):
        raise refuse(*found)
    masked = config.privacy.secagg.protocol != "none"
    if masked:
        from fednet.secagg import primitives

        if primitives.missing():
            sentence = lacking("secure aggregation", "cryptography")
            raise refuse("privacy.secagg.protocol", sentence)
    for rule in (*METHOD_RULES, *(SECAGG if masked else ())):
        if rule.broken(config, method):
            name, exchanges = config.algorithm.name, len(method.exchanges)
            raise refuse(rule.key, rule.sentence.format(c=config, name=name, exchanges=exchanges))
    for broken in _exchanges(config, len(method.exchanges)):
        raise refuse(*broken)
    kinds = {"state", "delta", "control", "condensed", "accuracy", "shared", "statistics"}
    for exchange in method.exchanges:
        kinds |= exchange.down.kinds() | exchange.up.kinds()
    return kinds


def _made(config: Config, refuse: Refuse) -> Method:
    """The method, with its options."""
    name = config.algorithm.name
    part = registry.algorithm.get(name)
    try:
        options = msgspec.convert(config.algorithm.options, part.Config)
    except msgspec.ValidationError as wrong:  # what was given has been read: it is a default
        raise refuse("algorithm", f"a default of {name} is not what it may be: {wrong}.") from None
    try:
        made: Method = part(options, config.clients)
    except TypeError as wrong:  # an __init__ of the user's
        raise refuse(
            "algorithm",
            f"{name} cannot be made of its Config and the number of clients ({wrong}); what it "
            f"takes from the configuration belongs in its Config, and __init__ is left out.",
        ) from None
    return made

"""Combinations of keys that cannot work, refused before anything starts.

A rule is an `if` and what it yields: the key that is wrong, and the sentence about it. Rules are
tried in order, and the first that is broken is the error, so a rule may rely on those above it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import get_args

import msgspec

from fednet import ids, registry
from fednet.config.schema import (
    DIVIDES,
    SITE,
    ClientTrainSection,
    Config,
    FaultKind,
    TrainSection,
    parse_distribution,
)
from fednet.config.tree import Node, follow, refuse
from fednet.errors import ConfigError, FednetError, lacking, unknown
from fednet.options import call, instance
from fednet.registry import Part

Broken = tuple[str, str]  # a key and the sentence about it

KEEP_ONE = "keep one of them."
DEFAULTS = Config()
LEAST_NOISE = 1e-6  # privacy.noise


def check(config: Config, tree: Node) -> None:
    """Checks all rules that need no part. Raises ConfigError for the first that is broken."""
    for rule in (_clients, _data, _needs, _training, _schedule, _models, _links, _absent, _faults):
        for key, sentence in rule(config):
            raise refuse(tree, key, sentence)


def check_method(config: Config, tree: Node) -> None:
    """Checks the rules that a method's class declares, and that every compressor of `wire` exists,
    takes its arguments, and is for a kind of payload that can be sent. Raises ConfigError.
    """
    name = config.algorithm.name
    part = registry.algorithm.get(name)
    try:
        options = msgspec.convert(config.algorithm.options, part.Config)
    except msgspec.ValidationError as wrong:  # the given options were checked: it is a default
        sentence = f"a default of {name} is not what it may be: {wrong}."
        raise refuse(tree, "algorithm", sentence) from None
    try:
        method: Part = part(options, config.clients)
    except TypeError as wrong:  # an __init__ of the user's
        raise refuse(
            tree,
            "algorithm",
            f"{name} cannot be made from its Config and the number of clients ({wrong}); put its "
            f"options in its Config, and leave out __init__.",
        ) from None
    for train in (config.train, *map(config.train.changed, config.train.per_client.values())):
        if found := method.refusal(config.replace(train=train)):
            raise refuse(tree, *found)
    for rule in (_method, _secagg, _exchanges):
        for key, sentence in rule(config, method):
            raise refuse(tree, key, sentence)
    kinds = {"state", "delta", "control", "condensed", "accuracy", "shared", "statistics"}
    for exchange in method.exchanges:
        kinds |= exchange.down.kinds() | exchange.up.kinds()
    for direction in ("up", "down"):
        for kind, chain in getattr(config.wire, direction).items():
            key = f"wire.{direction}.{kind}"
            if kind not in kinds:
                raise refuse(tree, key, unknown("kind", kind, kinds))
            for i, text in enumerate(chain):
                try:
                    instance(registry.compressor, text)
                except FednetError as wrong:
                    place = follow(tree, key)[0].at
                    raise ConfigError(f"{place}: {key}[{i}]: {wrong}") from None


def _changed_keys(c: Config, reasons: Mapping[str, str]) -> Iterator[Broken]:
    """Yields those keys that have another value than their default, and the reasons."""
    for key, reason in reasons.items():
        value = attrgetter(key)
        if value(c) != value(DEFAULTS):
            yield key, reason


# -- rules of the configuration alone --------------------------------------------------------------
def _clients(c: Config) -> Iterator[Broken]:
    """Checks how many clients are selected in a round, how many must reply, and that clients can
    join the run while it goes on, if it is open to them.
    """
    wanted = c.clients_per_round
    there = c.training_clients
    round = c.round
    if there < 1:
        yield "evaluate.held_out", f"no client would be left to train; there are {c.clients}."
        return
    if c.participation is not None and wanted is not None:
        yield "clients_per_round", f"participation is given too; {KEEP_ONE}"
    if c.participation is None and wanted is None:
        yield "participation", "is null and clients_per_round is not given; give one of them."
    if wanted is not None and wanted > there:
        yield "clients_per_round", f"{wanted} is more than the {there} clients that may train."
    most = c.first or c.asked
    if round.min_results > most:
        rest = f"is more than the {most} replies that a round waits for."
        yield "round.min_results", f"{round.min_results} {rest}"
    if round.start != "all" and round.start > c.clients:
        yield "round.start", f"{round.start} is more than the {c.clients} clients there are."
    # A client that is alive sends at least two heartbeats before it counts as lost.
    beat = round.lost.beat
    for key, patience in (("closed", round.lost.closed_s()), ("silent", round.lost.silent_s())):
        if patience is not None and beat is not None and patience < 2 * beat:
            yield (
                "round.lost.beat",
                f"{beat:g} s: round.lost.{key} of {patience:g} s must be at least twice as long, "
                f"else a client that is alive counts as lost.",
            )
    if round.open is None:
        return
    if round.open < c.clients:
        yield "round.open", f"{round.open} is less than the {c.clients} clients there are."
    if c.data.dataset != SITE:
        yield "round.open", "needs data.dataset: site: a client that joins brings its own data."
    for key, reason in fixed_clients(c):
        yield key, f"no client can join the run (round.open): {reason}"


def fixed_clients(c: Config) -> Iterator[Broken]:
    """Yields the keys that are given and for which a run keeps its number of clients."""
    start = "it is of the clients at the start."
    return _changed_keys(
        c,
        {
            "privacy.noise": "its guarantee is for one number of clients.",
            "privacy.secagg.protocol": "a round that had begun would be asked of other clients, "
            "and the difference of the two sums shows single updates.",
            "faults.replay": "the recorded run had its own clients.",
            "availability.trace": start,
            "devices.trace": start,
            "link.trace": start,
            "data.feature_noise": "its levels depend on their number.",
        },
    )


def _data(c: Config) -> Iterator[Broken]:
    if c.data.dataset == SITE:
        divides = (
            "says how a run divides its data; with dataset: site each site brings its own, which "
            "are not divided. Leave it out."
        )
        yield from _changed_keys(c, {f"data.{key}": divides for key in DIVIDES})
    if c.data.public.samples and c.data.public.fraction:
        yield "data.public", f"both samples and fraction are given; {KEEP_ONE}"
    if c.data.validation + c.data.public.fraction >= 1:
        sentence = "validation and public.fraction together leave no sample for the clients."
        yield "data.validation", sentence


def _needs(c: Config) -> Iterator[Broken]:
    if c.link.clock == "virtual" and c.link.step_ms is None and c.devices.trace is None:
        rest = "the milliseconds of one training step, or devices.trace."
        yield "link.clock", f"virtual needs link.step_ms, {rest}"
    if c.security.keys is not None and not c.security.curve:
        yield "security.keys", "is given while security.curve is false; set security.curve: true."
    if c.privacy.noise and c.privacy.clip is None:
        yield "privacy.noise", "needs privacy.clip, the norm that it is a multiple of."
    # With less, the accountant's numbers overflow: of clients that are drawn it has said epsilon 0.
    if 0 < c.privacy.noise < LEAST_NOISE:
        expected = f"expected 0, which adds none, or at least {LEAST_NOISE:g}"
        yield "privacy.noise", f"{expected}; less hides nothing."
    name = c.stop.metric
    patience = c.stop.patience
    every = c.evaluate.every
    if c.stop.accuracy is not None and not every:
        yield "stop.accuracy", "needs evaluate.every of at least 1: nothing would measure it."
    if c.stop.accuracy is not None and not c.evaluate.global_ and c.evaluate.clients == "none":
        sentence = "needs evaluate.global or evaluate.clients: nothing would measure it."
        yield "stop.accuracy", sentence
    if c.evaluate.held_out and (not every or c.evaluate.clients == "none"):
        rest = "these clients do nothing but evaluate."
        yield "evaluate.held_out", f"needs evaluate.every and evaluate.clients: {rest}"
    # Whether `stop.metric` is measured, and often enough for `stop.patience`.
    known = ("accuracy", "validation_accuracy", "test_loss", *c.evaluate.metrics)
    if name not in known:
        yield "stop.metric", f"{unknown('metric', name, known)} Others need evaluate.metrics."
    if name == "validation_accuracy" and not c.data.validation:
        yield "stop.metric", "validation_accuracy needs data.validation, the share held out for it."
    if name in ("validation_accuracy", "test_loss") and not c.evaluate.global_:
        yield "stop.metric", f"{name} needs evaluate.global: it is of the global model."
    if c.stop.accuracy is not None and name != "accuracy":
        yield "stop.accuracy", f"needs stop.metric: accuracy; it is {name}."
    if patience is not None and not every:
        yield "stop.patience", "needs evaluate.every of at least 1: nothing would be measured."
    if patience is not None and patience < every:
        yield (
            "stop.patience",
            f"{patience} rounds are less than the {every} between two evaluations "
            f"(evaluate.every); expected at least as many.",
        )


def _ids(key: str, pattern: str, clients: int) -> Iterator[Broken]:
    """Checks that a pattern names clients that the run has."""
    try:
        ids.parse(pattern, "the clients").resolve(clients)
    except ConfigError as wrong:
        yield key, str(wrong).removeprefix(f"the clients {pattern}: ")


def _trainings(c: Config) -> Iterator[tuple[str, TrainSection | ClientTrainSection]]:
    """Yields each place where settings of local training are given, and the settings."""
    yield "train", c.train
    for pattern, own in c.train.per_client.items():
        yield f"train.per_client.{pattern}", own


def _training(c: Config) -> Iterator[Broken]:
    train = c.train
    for pattern in train.per_client:
        yield from _ids(f"train.per_client.{pattern}", pattern, c.clients)
    for where, section in _trainings(c):
        if section.class_weights and c.task != "classification":
            expected = f"expected task: classification, got {c.task!r}."
            yield f"{where}.class_weights", f"weighs the classes in the loss; {expected}"
        if section.class_weights and train.pack > 1:
            sentence = "packed clients have one loss; leave out train.pack, or class_weights."
            yield f"{where}.class_weights", sentence
    if train.optimizer != "sgd" and train.momentum:
        yield "train.momentum", f"only applies to sgd; set it to 0 with {train.optimizer}."
    numbers = call(train.schedule)[1]
    try:
        has_rates = min(numbers, default=1) > 0 and train.lr_at(c.rounds, c.rounds) < math.inf
    except OverflowError:
        has_rates = False
    if not has_rates:
        rest = f"has no learning rate for each of {c.rounds} rounds; expected numbers above 0."
        yield "train.schedule", f"{train.schedule} {rest}"
    numbers = call(train.local_schedule)[1]
    if min(numbers, default=1) <= 0 or max(numbers[-1:], default=1) > 1:
        rest = "expected numbers above 0, and a factor of at most 1."
        yield "train.local_schedule", f"{train.local_schedule}: {rest}"
    if train.keep_optimizer and train.optimizer == "sgd" and not train.momentum:
        yield (
            "train.keep_optimizer",
            "sgd without momentum has no state to keep; set train.momentum or another optimizer.",
        )
    if train.pack == 1:
        return
    if train.keep_optimizer:
        sentence = "packed clients begin with an empty optimizer; leave out one of the two."
        yield "train.pack", sentence
    for key, allowed in (
        ("train.optimizer", ("sgd",)),
        ("train.local_schedule", ("constant",)),
        ("train.precision", ("fp32", "tf32")),
        ("data.augment", ("none",)),
    ):
        value = attrgetter(key)(c)
        if value not in allowed:
            yield (
                "train.pack",
                f"packed clients are trained with {key} {' or '.join(allowed)}, not {value}; leave "
                f"train.pack out.",
            )
    if train.graphs:
        yield (
            "train.graphs",
            "replays the steps of clients that are trained one by one; leave out train.graphs, or "
            "train.pack.",
        )


def _crashes(c: Config) -> bool:
    return "crash" in c.faults.random or any(f.kind == "crash" for f in c.faults.schedule)


def _schedule(c: Config) -> Iterator[Broken]:
    mode = c.schedule.mode
    buffer = c.schedule.buffer
    every = c.schedule.every
    if buffer is not None and mode != "async":
        yield "schedule.buffer", f"only applies to async; the mode is {mode}."
    if every is not None and mode != "semi-sync":
        yield "schedule.every", f"only applies to semi-sync; the mode is {mode}."
    if every is None and mode == "semi-sync":
        yield "schedule", "semi-sync needs every, the seconds between two updates."
    if buffer is not None and buffer > c.training_clients:
        sentence = f"{buffer} is more than the {c.training_clients} clients that may train."
        yield "schedule.buffer", sentence
    if mode == "sync":
        return
    without = {
        "round.ask": "no client is selected in place of another",
        "train.pack": "clients do not start together",
        "privacy.noise": "its guarantee is computed from rounds",
        "privacy.secagg.protocol": "there is no cohort to sum over",
    }
    if c.evaluate.clients == "all":
        without["evaluate.clients"] = "clients do not stop training to evaluate"
    if c.link.clock == "virtual":
        without["faults.replay"] = "a run in simulated time is repeatable without it"
    if c.buffer is not None and c.round.min_results > c.buffer:
        without["round.min_results"] = f"{c.buffer} replies make an update"
    if _crashes(c):
        without["faults"] = (
            "a crash keeps its client away for whole rounds; use drop_before_training, which "
            "loses its task"
        )
    for key, reason in _changed_keys(c, without):
        yield key, f"cannot be combined with schedule: {mode}: {reason}."


def _models(c: Config) -> Iterator[Broken]:
    """Checks that each client has one model, and that no key needs one model for all clients."""
    if not c.model.others:
        if c.model.clients is not None:
            yield "model.clients", "there is one model, which all clients have; leave it out."
        return
    patterns = {} if c.model.clients is None else {"model.clients": c.model.clients}
    for place, entry in enumerate(c.model.others):
        if "clients" not in entry or not isinstance(entry.get("name"), str):
            yield (
                f"model.others[{place}]",
                "expected a model's name and clients, such as {name: mlp, clients: 5-9}.",
            )
        patterns[f"model.others[{place}].clients"] = str(entry["clients"])
    left = set(range(c.clients))
    for key, pattern in patterns.items():
        yield from _ids(key, pattern, c.clients)
        mine = set(ids.parse(pattern).resolve(c.clients))
        if twice := mine - left:
            yield "model", f"client {min(twice)} has two models; expected one for each."
        left -= mine
    if c.model.clients is None and not left:
        yield "model", f"no client is left for the first model, {c.model.name}."
    if c.model.clients is not None and left:
        yield "model", f"client {min(left)} has no model; expected one for each."
    one_model = {
        "train.pack": "packed clients have one model",
        "model.buffers": "each client's model is its own already",
        "model.adapters": "they name layers of one model",
        "model.weights": "a file has one model's weights",
        "model.base": "the server sends one model to all",
        "model.sha256": "it is that of one model",
        "train.only": "it names tensors of one model",
    }
    for key, reason in _changed_keys(c, one_model):
        yield key, f"cannot be combined with several models: {reason}."


def _links(c: Config) -> Iterator[Broken]:
    links = {"link": c.link, **{f"link.per_client.{k}": v for k, v in c.link.per_client.items()}}
    for where, link in links.items():
        for key in ("up_mbps", "down_mbps", "profile"):
            if c.link.trace is not None and getattr(link, key) is not None:
                yield f"{where}.{key}", f"link.trace gives the rates; {KEEP_ONE}"
    for pattern in c.link.per_client:
        yield from _ids(f"link.per_client.{pattern}", pattern, c.clients)
    for key in ("up_mbps", "down_mbps", "latency_ms", "step_ms"):
        figure = getattr(c.link, key)
        if not isinstance(figure, str):
            continue
        name, first, second = parse_distribution(figure)
        finite = 0 < first < math.inf and second < math.inf
        if not finite or (name == "uniform" and second < first):
            yield (
                f"link.{key}",
                f"{figure}: expected a finite median above 0, or two finite figures above 0 in "
                f"ascending order.",
            )


AVAILABILITY = {"always": (), "bernoulli": ("p",), "markov": ("up", "down")}


def _enough_left(c: Config) -> Iterator[Broken]:
    """Checks that no round has so few clients left that it would be discarded."""
    left = set(range(c.clients))
    for pattern, first in sorted(c.round.gone.items(), key=lambda item: item[1]):
        left -= set(ids.parse(pattern, "round.gone").resolve(c.clients))
        if first <= c.rounds and len(left) < c.round.min_results:
            yield (
                "round.gone",
                f"leaves {len(left)} of {c.clients} clients from round {first} on, and a round "
                f"needs {c.round.min_results} (round.min_results).",
            )
            return


def _absent(c: Config) -> Iterator[Broken]:
    """Checks that a model of availability has all of its keys, and no other model's or a trace."""
    model = c.availability.model
    trace = c.availability.trace
    if trace is not None and model != "always":
        yield "availability.trace", f"the model {model} is given too; {KEEP_ONE}"
    if trace is not None and _crashes(c):
        yield (
            "faults",
            "a crash counts the rounds that a client stays away, and availability.trace the "
            f"seconds; {KEEP_ONE}",
        )
    wrong = [b for p in c.round.gone for b in _ids(f"round.gone.{p}", p, c.clients)]
    yield from wrong
    if c.round.gone and not wrong:
        yield from _enough_left(c)
    if c.round.gone:
        without = {
            "availability.trace": "the trace says when a client is there",
            "privacy.noise": "its guarantee is for one number of clients",
        }
        for key, reason in _changed_keys(c, without):
            yield key, f"cannot be combined with round.gone: {reason}."
    needs = AVAILABILITY[model]
    for key in ("p", "up", "down"):
        given = getattr(c.availability, key) is not None
        if given and key not in needs:
            options = ", ".join(needs) or "no options"
            yield f"availability.{key}", f"does not belong to {model}, which has {options}."
        if not given and key in needs:
            yield "availability", f"{model} needs {' and '.join(needs)}."


FAULT_NEEDS = {"crash": "rounds", "delay": "seconds", "slow": "factor", "server_crash": "at"}


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
            rest = f"ids go from 0 to {c.clients - 1}."
            yield here, f"number {i}: there is no client {fault.client}; {rest}"
        needed = FAULT_NEEDS.get(fault.kind)
        if needed and getattr(fault, needed) is None:
            yield here, f"number {i}, {fault.kind}, needs {needed}."


# -- rules of the method ---------------------------------------------------------------------------
def _method(c: Config, m: Part) -> Iterator[Broken]:
    name = c.algorithm.name
    mode = c.schedule.mode
    if m.classes_only and c.task != "classification":
        loss = f"{name} trains with a loss of its own about classes"
        yield "task", f"{loss}; expected classification, got {c.task!r}."
    if m.sgd_only and c.train.optimizer != "sgd":
        sentence = f"{name} assumes plain SGD steps; expected sgd, got {c.train.optimizer!r}."
        yield "train.optimizer", sentence
    if m.momentum_free and c.train.momentum:
        rest = f"expected 0, got {c.train.momentum}."
        yield "train.momentum", f"{name} assumes local steps without momentum; {rest}"
    for key, why in m.forbids.items():
        if key in ClientTrainSection.__struct_fields__:
            for pattern, own in c.train.per_client.items():
                if getattr(own, key) is not None:
                    sentence = f"{name} needs the same for all clients: {why}."
                    yield f"train.per_client.{pattern}.{key}", sentence
        elif getattr(c.train, key, None) != getattr(TrainSection(), key, None):
            yield f"train.{key}", f"{name} does not allow it: {why}."
    for where, section in _trainings(c):
        if m.classes_only and section.class_weights:
            sentence = f"{name} has a loss of its own about classes, which takes no class weights."
            yield f"{where}.class_weights", sentence
    held = f"{name} needs samples held out for the server"
    if m.needs_public and c.data.dataset == SITE:
        yield "data.dataset", f"{held}; with site the sites have them all."
    if m.needs_public and not (c.data.public.samples or c.data.public.fraction):
        yield "data.public", f"{held}; set data.public.samples or data.public.fraction."
    not_summed = f"{name} does not aggregate its replies as a sum of updates"
    if c.privacy.clip is not None and not m.sums_updates:
        yield "privacy.clip", f"{not_summed}, so clipping and noise cannot be applied to it."
    if mode == "sync" and m.own_schedule:
        yield (
            "schedule.mode",
            f"{name} makes an update from replies as they come, and has no rounds that wait for "
            f"all; expected async or semi-sync, got sync (without a mode it is async).",
        )
    if mode != "sync" and len(m.exchanges) > 1:
        sentence = f"{name} has {len(m.exchanges)} exchanges a round; expected sync, got {mode}."
        yield "schedule", sentence
    if mode != "sync" and not m.asynchronous:
        yield (
            "schedule",
            f"{name} does not support asynchronous training (it does not declare "
            f"`asynchronous = True`); expected sync, got {mode}. Methods such as fedbuff do.",
        )
    if c.model.others and not m.architecture_free:
        yield (
            "model",
            f"{name} sends weights, or what has their shape, and needs one model for all clients; "
            f"methods whose messages do not depend on it, such as fedproto and fedmd, take a list.",
        )
    if c.selection.name is not None or m.selects:
        whose = "algorithm" if c.selection.name is None else "selection"
        without = {
            "schedule.mode": "without rounds a task goes to any client that is free",
            "privacy.noise": "its guarantee does not cover that replies decide who is selected",
            "privacy.secagg.protocol": "the server learns no single reply, by which to select",
        }
        if _crashes(c):
            without["faults"] = "a crash keeps its client away from the rounds that the seed gives"
        for key, reason in _changed_keys(c, without):
            yield key, f"cannot be combined with a selection of your own ({whose}): {reason}."
    rule = c.aggregation.rule
    guarantee = "the guarantee of privacy.noise is computed for a mean"
    if rule != "mean" and not m.sums_updates:
        yield "aggregation.rule", f"{not_summed}, so {rule} cannot replace it; expected mean."
    if rule != "mean" and c.privacy.noise:
        yield "aggregation.rule", f"{guarantee}; {rule} is none."
    attack = c.faults.malicious.attack if c.faults.malicious.clients else ""
    here = "faults.malicious.attack"
    if attack in FROM_ALL_REPLIES and not m.sums_updates:
        yield here, f"{not_summed}, so {attack} cannot be made of them."
    if attack in FROM_ALL_REPLIES and c.privacy.noise:
        yield here, f"{guarantee}; {attack} changes single replies."
    if attack == "label_flip" and c.task != "classification":
        yield here, f"label_flip needs classes; the task is {c.task}."


FROM_ALL_REPLIES = ("alie", "ipm")  # attacks that are made at the server from all replies


def _secagg(c: Config, m: Part) -> Iterator[Broken]:
    """Checks that nothing needs a single reply, which secure aggregation hides."""
    if c.privacy.secagg.protocol == "none":
        return
    from fednet.secagg import primitives

    if primitives.missing():
        yield "privacy.secagg.protocol", lacking("secure aggregation", "cryptography")
    if not m.summed or len(m.exchanges) != 1 or m.Enrolment is not None:
        rest = "more of each reply than a weighted sum of its fields."
        yield "privacy.secagg.protocol", f"the server of {c.algorithm.name} needs {rest}"
    without = {
        "aggregation.rule": "a rule looks at single replies",
        "checkpoint.every": "no round can be summed twice; set 1",
        "round.ask": "each step would have other clients",
        "train.pack": "steps of one client wait for other clients' training",
    }
    if c.faults.malicious.clients and c.faults.malicious.attack in FROM_ALL_REPLIES:
        without["faults.malicious.attack"] = "it is made of single replies"
    if any(c.wire.up.values()):
        without["wire.up"] = "a masked vector has no smaller form; set bits"
    if c.wire.down.get("state"):
        without["wire.down"] = "updates are summed as differences to what the server has"
    for key, reason in _changed_keys(c, without):
        yield key, f"{reason}, with privacy.secagg."
    if c.privacy.noise and c.privacy.where == "server":
        noiseless = "the server would see the sum without its noise; set client"
        yield "privacy.where", f"{noiseless}, with privacy.secagg."
    if c.privacy.noise and (c.availability.model != "always" or c.availability.trace):
        fewer = "fewer clients than are drawn would add too little noise"
        yield "availability.model", f"{fewer}, with privacy.secagg."


def _exchanges(c: Config, m: Part) -> Iterator[Broken]:
    """Checks that each planned fault names an exchange that a round has."""
    exchanges = len(m.exchanges)
    if c.privacy.secagg.protocol != "none":
        from fednet.secagg.terms import STEPS

        exchanges = len(STEPS)
    for i, fault in enumerate(c.faults.schedule, 1):
        if fault.exchange is not None and fault.exchange >= exchanges:
            rest = f"a round of {c.algorithm.name} has {exchanges} here, from 0."
            yield "faults.schedule", f"number {i}: exchange {fault.exchange}; {rest}"

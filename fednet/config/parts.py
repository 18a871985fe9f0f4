"""The options of parts, checked against their declarations; and which client has which model."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from typing import Protocol, TypeVar

import msgspec

from fednet import ids, registry
from fednet.config import fit
from fednet.config.schema import (
    SITE,
    Config,
    DataSection,
    ModelSection,
)
from fednet.config.tree import Node, at, below
from fednet.errors import ConfigError, FednetError, unknown
from fednet.options import instance, options_of
from fednet.plain import JsonDict, JsonMapping

OWN = ("name", "clients")  # keys of an entry of `model.others`; the others are its model's options

# The sections that name parts: the kind, and the key that names one. Options are written beside
# that key; those of a compressor are the numbers in its parentheses.
SECTIONS = {
    "algorithm": ("algorithm", "name"),
    "model": ("model", "name"),
    "data": ("dataset", "dataset"),
    "data.partition": ("partitioner", "scheme"),
    "wire": ("compressor", ""),
}
SELECTOR = dict(SECTIONS.values())


class NoOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The options of a part that has none."""


# Datasets that read a site's data if the configuration names none.
READERS = ("folder", "arrays")
# Arguments that fednet fills in itself, by kind of part: the configuration cannot give them.
GIVEN = {
    "dataset": {"root", "seed", *DataSection.__struct_encode_fields__},
    "partitioner": {"y", "groups", "clients", "rng", "pool", "seed", "scheme"},
    "model": {"input_shape", "classes"},
}


@functools.cache
def declared_options(part: registry.Part, kind: str) -> type[msgspec.Struct] | None:
    """Returns the declared options of a part: an algorithm's Config, else see `options.options_of`.
    None: it takes any.
    """
    if kind == "algorithm":
        return typing.cast("type[msgspec.Struct]", getattr(part, "Config", NoOptions))
    return options_of(part, GIVEN.get(kind, ()))


S = TypeVar("S", bound=msgspec.Struct)


class Optioned(Protocol):
    """A section that takes a part's own options."""

    @property
    def options(self) -> JsonDict: ...


def fill(section: Optioned, kind: str, name: str, tree: Node | None, path: str) -> JsonDict:
    """Returns the options of one section, checked, with every default, as plain values."""
    part = get(getattr(registry, kind), name, tree, path, SELECTOR[kind])
    declared = declared_options(part, kind)
    if declared is None:
        return dict(section.options)
    inside = tree.value if tree is not None and isinstance(tree.value, dict) else {}
    own = {k: n for k, n in inside.items() if k in section.options}
    at = tree.at if tree is not None else "the configuration"
    own_tree = Node(own, at, tree.key_at if tree is not None else at)
    if elsewhere := kind == "dataset" and name == SITE:
        declared = _with_readers(declared, section.options)
    made = fit.fit(own_tree, declared, path, fit.keys(type(section)))
    if elsewhere:
        return dict(section.options)
    return {
        f.encode_name: msgspec.to_builtins(getattr(made, f.name))
        for f in msgspec.structs.fields(made)
    }


def _with_readers(own: type[msgspec.Struct], options: JsonDict) -> type[msgspec.Struct]:
    """Returns the options of `dataset: site`, and of the dataset that reads the data at the sites;
    any options if only the sites have that dataset.
    """
    name = options.get("format")
    names = {name} - {SITE} if isinstance(name, str) else {*READERS}
    inner = [
        declared_options(registry.dataset.get(n), "dataset")
        for n in sorted(names.intersection(registry.dataset.names()))
    ]
    types = dict.fromkeys(options, object) if not inner or None in inner else {}
    fields = [f for i in inner if i for f in msgspec.structs.fields(i)]
    types |= {f.encode_name: f.type for f in fields}
    beside = [(n, t, None) for n, t in types.items() if n not in fit.keys(own)]
    return msgspec.defstruct(own.__name__, beside, bases=(own,), kw_only=True)


def get(
    parts: registry.Registry, name: str, tree: Node | None, path: str, selector: str
) -> registry.Part:
    """Returns the part of that name, or an error with the place of the name."""
    try:
        return parts.get(name)
    except FednetError as wrong:
        node = (
            tree.value.get(selector) if tree is not None and isinstance(tree.value, dict) else tree
        )
        raise ConfigError(
            f"{node.at if node is not None else 'the configuration'}: {path}: {wrong}"
        ) from None


def scheduled(config: Config, tree: Node) -> Config:
    """Returns the configuration with an asynchronous method's own schedule, if none is given."""
    given = tree.value["schedule"].value if "schedule" in tree.value else {}
    if "mode" in given or config.algorithm.name not in registry.algorithm.names():
        return config
    own = dict(registry.algorithm.get(config.algorithm.name).own_schedule)
    chosen = {key: value for key, value in own.items() if key not in given}
    return config.replace(schedule=msgspec.structs.replace(config.schedule, **chosen))


def complete(config: Config, tree: Node) -> Config:
    """Returns the configuration with all parts' options checked and filled in."""

    def filled(section: S, kind: str, name: str, path: str) -> S:
        options = fill(section, kind, name, below(tree, path), path)  # type: ignore[arg-type]
        return msgspec.structs.replace(section, options=options)

    algorithm = filled(config.algorithm, "algorithm", config.algorithm.name, "algorithm")
    model = filled(config.model, "model", config.model.name, "model")
    model = msgspec.structs.replace(model, others=_others(config, below(tree, "model")))
    data = filled(config.data, "dataset", config.data.dataset, "data")
    if data.dataset != SITE:  # else nothing is divided
        name = data.partition.scheme
        partition = filled(data.partition, "partitioner", name, "data.partition")
        data = msgspec.structs.replace(data, partition=partition)
    get(registry.task, config.task, below(tree, "task"), "task", "")
    for name in config.evaluate.metrics:
        get(registry.metric, name, below(tree, "evaluate"), "evaluate.metrics", "metrics")
    return config.replace(algorithm=algorithm, model=model, data=data)


def _others(config: Config, tree: Node | None) -> tuple[JsonDict, ...]:
    """Returns the entries of `model.others`, each with all of its model's options."""
    made = []
    nodes = tree.value["others"].value if config.model.others and tree is not None else ()
    for place, (entry, node) in enumerate(zip(config.model.others, nodes)):
        own = {k: v for k, v in entry.items() if k not in OWN}
        section = ModelSection(name=str(entry.get("name")), options=own)
        options = fill(section, "model", section.name, node, f"model.others[{place}]")
        made.append({**{k: str(entry[k]) for k in OWN if k in entry}, **options})
    return tuple(made)


def check_chains(config: Config, tree: Node, kinds: set[str]) -> None:
    """Raises ConfigError unless every compressor of `wire` exists and takes its arguments, and
    every kind can be sent.
    """
    for direction in ("up", "down"):
        for kind, chain in getattr(config.wire, direction).items():
            here = f"wire.{direction}.{kind}"
            node = at(tree, here)
            if kind not in kinds:
                raise ConfigError(
                    f"{node.key_at or node.at}: {here}: {unknown('kind', kind, kinds)}"
                )
            for i, text in enumerate(chain):
                try:
                    instance(registry.compressor, text)
                except FednetError as wrong:
                    raise ConfigError(f"{node.at}: {here}[{i}]: {wrong}") from None


# -- unlike models at clients: `model: [{name: lenet5, clients: 0-4}, {name: mlp, clients: 5-9}]`
def model_owners(config: Config) -> dict[int, int]:
    """Returns the place in `model.others` by client, but for clients with the first model."""
    found: dict[int, int] = {}
    for place, entry in enumerate(config.model.others):
        key = f"model.others[{place}].clients"
        for client in ids.parse(str(entry.get("clients", "")), key).resolve(config.clients):
            found[client] = place
    return found


def model_of(config: Config, client: int | None) -> JsonDict:
    """Returns the name and options of a client's model; None: of the first."""
    place = None if client is None else model_owners(config).get(client)
    if place is None:
        return {"name": config.model.name, **config.model.options}
    return bare(config.model.others[place])


def each_model(config: Config) -> Iterator[Config]:
    """Yields the configuration with each of its models as its only one, the first model first."""
    first = {"clients": None, "others": ()}
    if not config.model.others:
        yield config
        return
    yield config.replace(model=msgspec.structs.replace(config.model, **first))
    for entry in config.model.others:
        options = {k: v for k, v in entry.items() if k not in OWN}
        model = msgspec.structs.replace(config.model, name=entry["name"], options=options, **first)
        yield config.replace(model=model)


def bare(entry: JsonMapping) -> JsonDict:
    """Returns an entry of `model.others` without its clients."""
    return {k: v for k, v in entry.items() if k != "clients"}

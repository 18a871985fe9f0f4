"""The options of parts, checked against their declarations; and which client has which model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from fednet import ids, registry
from fednet.config import fit
from fednet.config.schema import (
    SITE,
    AlgorithmSection,
    Config,
    DataSection,
    ModelSection,
    PartitionSection,
    SelectionSection,
)
from fednet.config.tree import Node, follow, refuse, wrap
from fednet.errors import ConfigError, FednetError
from fednet.options import options_of
from fednet.plain import JsonDict

OWN = ("name", "clients")  # keys of an entry of `model.others`; the others are its model's options

# The sections that name parts, and the key that names one. Options are written beside that key;
# those of a compressor are the numbers in its parentheses.
SECTIONS = {
    "algorithm": (registry.algorithm, "name"),
    "model": (registry.model, "name"),
    "data": (registry.dataset, "dataset"),
    "data.partition": (registry.partitioner, "scheme"),
    "selection": (registry.selection, "name"),
    "wire": (registry.compressor, ""),
}
# Datasets that read a site's data if the configuration names none.
READERS = ("folder", "arrays")
# Arguments that fednet fills in itself, by kind of part: the configuration cannot give them.
GIVEN = {
    "dataset": {"root", "seed", "with_test", *DataSection.__struct_encode_fields__},
    "partitioner": {"y", "groups", "clients", "rng", "pool", "seed", "scheme"},
    "model": {"input_shape", "classes"},
    "selection": {"round", "available", "asked", "rng", "name"},
}


@functools.cache
def declared_options(part: registry.Part, kind: str) -> type[msgspec.Struct] | None:
    """Returns the declared options of a part: an algorithm's Config, else see `options.options_of`.
    None: it takes any.
    """
    if kind == "algorithm":
        config: type[msgspec.Struct] = part.Config
        return config
    return options_of(part, GIVEN.get(kind, ()))


S = TypeVar("S", AlgorithmSection, ModelSection, DataSection, PartitionSection, SelectionSection)


def _fill_in_defaults(section: S, node: Node | None, path: str) -> S:
    """Returns a section with its part's options checked, and every default filled in, as plain
    values. node: of the section; None if it was not written.
    """
    if node is None:
        node = Node({}, "the configuration", "the configuration")
    parts, key = SECTIONS[path.partition(".others")[0]]
    name = getattr(section, key)
    declared = declared_options(_get(parts, name, node.value.get(key), path), parts.kind)
    if declared is None:
        return section
    at_sites = parts is registry.dataset and name == SITE
    if at_sites:
        # Also the options of the dataset that reads the data at the sites; any, if only they have
        # that dataset.
        reader = section.options.get("format")
        readers = {reader} - {SITE} if isinstance(reader, str) else {*READERS}
        inner = [
            declared_options(parts.get(n), "dataset")
            for n in sorted(readers.intersection(parts.names()))
        ]
        types = dict.fromkeys(section.options, object) if not inner or None in inner else {}
        for options in filter(None, inner):
            types |= {f.encode_name: f.type for f in msgspec.structs.fields(options)}
        beside = [(n, t, None) for n, t in types.items() if n not in fit.keys(declared)]
        declared = msgspec.defstruct(declared.__name__, beside, bases=(declared,), kw_only=True)
    own = Node({k: node.value[k] for k in section.options}, node.at, node.key_at)
    made = fit.fit(own, declared, path, fit.keys(type(section)))
    if at_sites:
        return section
    return msgspec.structs.replace(section, options=msgspec.to_builtins(made))


def _get(parts: registry.Registry, name: str, node: Node | None, path: str) -> registry.Part:
    """Returns the part of that name, or an error with the place of the name, which is `node`."""
    try:
        return parts.get(name)
    except FednetError as wrong:
        place = node.at if node is not None else "the configuration"
        raise ConfigError(f"{place}: {path}: {wrong}") from None


def complete(config: Config, tree: Node) -> Config:
    """Returns the configuration with all parts' options checked and filled in."""

    def written(path: str) -> Node | None:
        node, found = follow(tree, path)
        return node if found else None

    algorithm = _fill_in_defaults(config.algorithm, written("algorithm"), "algorithm")
    model = _fill_in_defaults(config.model, written("model"), "model")
    others = []
    entries = written("model.others")
    for place, entry in enumerate(config.model.others):
        own = {k: v for k, v in entry.items() if k not in OWN}
        other = ModelSection(name=str(entry["name"]), options=own)
        assert entries is not None
        other = _fill_in_defaults(other, entries.value[place], f"model.others[{place}]")
        others.append({**{k: str(entry[k]) for k in OWN}, **other.options})
    model = msgspec.structs.replace(model, others=tuple(others))
    data = _fill_in_defaults(config.data, written("data"), "data")
    if data.dataset != SITE:  # else nothing is divided
        partition = _fill_in_defaults(data.partition, written("data.partition"), "data.partition")
        data = msgspec.structs.replace(data, partition=partition)
    selection = config.selection
    if selection.name is not None:
        selection = _fill_in_defaults(selection, written("selection"), "selection")
    elif selection.options:
        given = ", ".join(selection.options)
        raise refuse(tree, "selection", f"{given}: options of a selection; expected its name too.")
    _get(registry.task, config.task, written("task"), "task")
    for metric in config.evaluate.metrics:
        _get(registry.metric, metric, written("evaluate.metrics"), "evaluate.metrics")
    return config.replace(algorithm=algorithm, model=model, data=data, selection=selection)


def complete_data(section: DataSection) -> DataSection:
    """Returns the section with its dataset's options checked and filled in, as `complete` does.
    Imports that dataset alone.
    """
    written = wrap({"dataset": section.dataset, **section.options}, "data")
    return _fill_in_defaults(section, written, "data")


# -- unlike models at clients: `model: [{name: lenet5, clients: 0-4}, {name: mlp, clients: 5-9}]`
def model_owners(config: Config) -> dict[int, int]:
    """Returns the place in `model.others` by client, but for clients with the first model."""
    found: dict[int, int] = {}
    for place, entry in enumerate(config.model.others):
        own = ids.parse(str(entry["clients"]), f"model.others[{place}].clients")
        found |= dict.fromkeys(own.resolve(config.clients), place)
    return found


def model_of(config: Config, client: int) -> JsonDict:
    """Returns the name and options of a client's model."""
    place = model_owners(config).get(client)
    if place is None:
        return {"name": config.model.name, **config.model.options}
    return {k: v for k, v in config.model.others[place].items() if k != "clients"}


def each_model(config: Config) -> Iterator[Config]:
    """Yields the configuration with each of its models as its only one, the first model first."""
    first = msgspec.structs.replace(config.model, clients=None, others=())
    yield config.replace(model=first)
    for entry in config.model.others:
        options = {k: v for k, v in entry.items() if k not in OWN}
        model = msgspec.structs.replace(first, name=entry["name"], options=options)
        yield config.replace(model=model)

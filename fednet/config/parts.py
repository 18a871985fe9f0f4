"""Parts' own mappings, checked against the type that the registry returns for their name."""

from __future__ import annotations

import inspect
import re
import typing
from typing import Any

import msgspec

from fednet import registry
from fednet.config import fit
from fednet.config.sections import Config, DataSection
from fednet.config.tree import Node
from fednet.errors import ConfigError, FednetError, unknown


class NoOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Of a part that has none."""


# Arguments that fednet fills in itself, by kind of part: the configuration cannot give them.
_GIVEN = {
    "dataset": {"root", "seed", *DataSection.__struct_encode_fields__},
    "partitioner": {"y", "groups", "clients", "rng", "pool", "seed", "scheme"},
    "model": {"self", "input_shape", "classes"},
}


def options_of(part: Any, kind: str) -> type[msgspec.Struct] | None:
    """The declared options of a part: an algorithm's Config, another's `Options`, else what its
    signature takes. None: any.
    """
    declared = getattr(part, "Config" if kind == "algorithm" else "Options", None)
    if declared is not None:
        return typing.cast("type[msgspec.Struct]", declared)
    if kind == "algorithm":
        return NoOptions
    try:
        hints = typing.get_type_hints(
            vars(part).get("__init__", part) if isinstance(part, type) else part,
            include_extras=True,
        )
    except (NameError, TypeError):
        # An annotation of the user's that cannot be resolved says nothing.
        hints = {}
    fields: list[Any] = []
    for name, parameter in inspect.signature(part).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return None
        if name in _GIVEN[kind] or parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        hint = hints.get(name, Any)
        fields.append(
            (name, hint)
            if parameter.default is inspect.Parameter.empty
            else (name, hint, _default(parameter.default))
        )
    return msgspec.defstruct(
        f"{getattr(part, '__name__', 'Part')}Options",
        fields,
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
    )


def _default(value: Any) -> Any:
    return (
        msgspec.field(default_factory=lambda: value)
        if isinstance(value, (list, dict, set))
        else value
    )


def fill(section: Any, kind: str, name: str, tree: Node | None, path: str) -> dict[str, Any]:
    """The options of one section, checked, with every default, as plain values."""
    selector = {
        "model": "name",
        "algorithm": "name",
        "dataset": "dataset",
        "partitioner": "scheme",
    }[kind]
    part = get(getattr(registry, kind), name, tree, path, selector)
    declared = options_of(part, kind)
    if declared is None:
        return dict(section.options)
    inside = tree.value if tree is not None and isinstance(tree.value, dict) else {}
    own = {k: n for k, n in inside.items() if k in section.options}
    known = fit.keys(declared)
    for key, node in own.items():
        if key not in known:
            raise fit.unknown_key(node, key, path, [*known, *(k for k in fit.keys(type(section)))])
    at = tree.at if tree is not None else "the configuration"
    made = fit.struct(Node(own, at, tree.key_at if tree is not None else at), declared, path)
    return {
        f.encode_name: msgspec.to_builtins(getattr(made, f.name))
        for f in msgspec.structs.fields(made)
    }


def get(parts: registry.Registry, name: str, tree: Node | None, path: str, selector: str) -> Any:
    """The part of that name, or an error that says where the name stands."""
    try:
        return parts.get(name)
    except FednetError as wrong:
        node = (
            tree.value.get(selector) if tree is not None and isinstance(tree.value, dict) else tree
        )
        raise ConfigError(
            f"{node.at if node is not None else 'the configuration'}: {path}: {wrong}"
        ) from None


def complete(config: Config, tree: Node) -> Config:
    """The configuration with all parts' options checked and filled in."""
    top = tree.value if isinstance(tree.value, dict) else {}
    data_tree = top.get("data")
    partition_tree = (
        data_tree.value.get("partition")
        if data_tree is not None and isinstance(data_tree.value, dict)
        else None
    )
    algorithm = _with(
        config.algorithm,
        fill(
            config.algorithm, "algorithm", config.algorithm.name, top.get("algorithm"), "algorithm"
        ),
    )
    model = _with(
        config.model, fill(config.model, "model", config.model.name, top.get("model"), "model")
    )
    data, partition = config.data, config.data.partition
    options = fill(data, "dataset", data.dataset, data_tree, "data")
    partition = _with(
        partition,
        fill(partition, "partitioner", partition.scheme, partition_tree, "data.partition"),
    )
    get(registry.task, config.task, top.get("task"), "task", "")
    return config.replace(
        algorithm=algorithm,
        model=model,
        data=msgspec.structs.replace(data, partition=partition, options=options),
    )


def _with(section: Any, options: dict[str, Any]) -> Any:
    return msgspec.structs.replace(section, options=options)


# -- compressors -----------------------------------------------------------------------------------
_CALL = re.compile(r"([a-z0-9][a-z0-9_-]*)\s*(?:\((.*)\))?")


def call(text: str) -> tuple[str, tuple[float | int, ...]]:
    """`topk(0.01)` as ('topk', (0.01,)). Raises ConfigError for anything but a name with
    numbers.
    """
    found = _CALL.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"expected a compressor such as fp16 or topk(0.01), got {text!r}.")
    inside = [a.strip() for a in (found[2] or "").split(",") if a.strip()]
    try:
        return found[1], tuple(int(a) if re.fullmatch(r"[+-]?\d+", a) else float(a) for a in inside)
    except ValueError:
        raise ConfigError(f"expected numbers between the brackets of {text!r}.") from None


def check_chains(config: Config, tree: Node, kinds: set[str]) -> None:
    """Every compressor of `wire` exists and takes its arguments; every kind is one that can
    cross.
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
                    name, arguments = call(text)
                    part = registry.compressor.get(name)
                    takes = inspect.signature(part)
                    try:
                        takes.bind(*arguments)
                    except TypeError:
                        inside = (
                            f"{name}({', '.join(takes.parameters)})" if takes.parameters else name
                        )
                        raise ConfigError(f"expected {inside}, got {text!r}.") from None
                    part(*arguments)
                except FednetError as wrong:
                    raise ConfigError(f"{node.at}: {here}[{i}]: {wrong}") from None


def at(tree: Node, dotted: str) -> Node:
    """The node at a dotted path, or the nearest one above it that was written."""
    node = tree
    for step in dotted.split("."):
        if not isinstance(node.value, dict) or step not in node.value:
            return node
        node = node.value[step]
    return node


__all__ = ["NoOptions", "at", "call", "check_chains", "complete", "fill", "options_of"]

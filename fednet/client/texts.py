"""Text that a server gives to parts of a site's own.

What fednet's own parts do with their options is known: a path among them is named `path`, and the
policy looks after it. A dataset, model or method that the site has loaded may read a file that any
of its options names. So text for one comes only from the site: its file gives it (as the option's
default, or in a `Literal`), or its policy lets the server choose (`text: [data.label]`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, get_args, get_origin

import msgspec

from fednet import registry
from fednet.config import Config, parts
from fednet.config.parts import declared_options
from fednet.errors import ConfigError, unknown
from fednet.plain import JsonDict

SECTIONS = {
    "data": "dataset",
    "data.partition": "partitioner",
    "model": "model",
    "algorithm": "algorithm",
}


def check(config: Config, allowed: Collection[str]) -> None:
    """Raises ConfigError for text that the server may not choose. allowed: keys for which it
    may.
    """
    for key, kind, name, options in _sections(config):
        part = getattr(registry, kind).get(name)
        if part.__module__.partition(".")[0] == "fednet":
            continue
        declared = declared_options(part, kind)
        fields = {} if declared is None else {f.encode_name: f for f in _fields(declared)}
        for option, value in options.items():
            known = set[str]() if option not in fields else _known(fields[option])
            text = next((t for t in _texts(value) if t not in known), None)
            if text is not None and f"{key}.{option}" not in allowed:
                raise ConfigError(
                    f"{key}.{option}: the server gives {text!r} to the {kind} {name!r}, a part of "
                    f"this site's own; refused, since it may name a file here. A policy with "
                    f"text: [{key}.{option}] lets the server choose it."
                )


def check_keys(keys: Collection[str], where: str) -> None:
    """Raises ConfigError for a key of a policy's `text` that is no option of a part of the site's
    own. where: the list, for the error.
    """
    known, free = set[str](), set[str]()
    for section, kind in SECTIONS.items():
        for part in getattr(registry, kind).own().values():
            declared = declared_options(part, kind)
            if declared is None:  # it takes any option
                free.add(section)
            else:
                known |= {f"{section}.{field.encode_name}" for field in _fields(declared)}
    for key in keys:
        if key not in known and key.rpartition(".")[0] not in free:
            if not known:
                raise ConfigError(
                    f"{where}: {key!r} is no option of a part of this site's own; load its file "
                    f"with --load, or leave the key out."
                )
            raise ConfigError(f"{where}: {unknown('option', key, known)}")


def _sections(config: Config) -> Iterator[tuple[str, str, str, JsonDict]]:
    """(key, kind of part, its name, its options)."""
    data, model, algorithm = config.data, config.model, config.algorithm
    scheme = data.partition.scheme
    yield "data", "dataset", data.dataset, _but_path(data.options)
    yield "data.partition", "partitioner", scheme, _but_path(data.partition.options)
    for own in (parts.model_of(config, None), *map(parts.bare, model.others)):
        yield "model", "model", own.pop("name"), own
    yield "algorithm", "algorithm", algorithm.name, algorithm.options
    inner = data.options.get("format") if data.dataset == "site" else None
    if inner in registry.dataset.names():  # what reads the site's data there
        from fednet.data.site import DECLARED

        own = {k: v for k, v in data.options.items() if k not in DECLARED}
        yield "data", "dataset", inner, own


def _but_path(options: JsonDict) -> JsonDict:
    """Without the one that the policy has looked at."""
    return {k: v for k, v in options.items() if k != "path"}


def _fields(declared: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(declared)


def _known(field: msgspec.structs.FieldInfo) -> set[str]:
    """The texts that the part's own file gives an option."""
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return {*_literals(field.type), *_texts(msgspec.to_builtins(default, enc_hook=str))}


def _literals(hint: object) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from (v for v in get_args(hint) if isinstance(v, str))
    else:
        for inner in get_args(hint):
            yield from _literals(inner)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (*_texts(key), *_texts(inner))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)

"""Fits a tree to a declared type; an error is one sentence with the place."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from fednet.config.schema import homes, is_struct
from fednet.config.tree import Node, compose
from fednet.errors import ConfigError, nearest
from fednet.plain import fields

T = TypeVar("T")
# A type as in an annotation: a class, a union, Annotated, Literal or Any.
Hint = Any

LARGEST = 2**63 - 1  # torch, NumPy and the files have 64 bits for a whole number


def wrong(node: Node, path: str, expected: str) -> ConfigError:
    """Returns the error for a value that does not fit: place, key, what is allowed, what came."""
    value = node.value
    if isinstance(value, dict):
        got = "a mapping"
    elif isinstance(value, list):
        got = "a list"
    elif value is None or isinstance(value, bool):
        got = "null" if value is None else str(value).lower()
    else:
        got = repr(value)
    return ConfigError(f"{node.at}: {path or 'the configuration'}: expected {expected}, got {got}.")


def fit(node: Node, kind: type[T], path: str = "", beside: Sequence[str] = ()) -> T:
    """Returns `node` as a value of the declared type, checked by msgspec. Raises ConfigError for
    the first value that does not fit, with its place.

    A Struct with a field `options` takes unknown keys into it; `parts` checks these. beside: keys
    of the same mapping that belong to another type, for the error.
    """
    return msgspec.convert(_plain(node, kind, path, beside), kind)


def _plain(node: Node, kind: Hint, path: str, beside: Sequence[str] = ()) -> object:
    """Returns the value without places, checked; keys that an open Struct does not know are under
    `options`. Raises ConfigError for an unknown or missing key, and for a value that does not fit.
    """
    value = node.value
    made: object
    if isinstance(value, dict):
        made = _mapping(node, kind, path, beside)
    elif isinstance(value, list):
        sequence = next((m for m in _members(kind) if _origin(m) in SEQUENCES), None)
        items = _item_types(get_args(sequence), len(value))
        made = [_plain(n, items[i], f"{path}[{i}]") for i, n in enumerate(value)]
    else:
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong(node, path, "a finite number")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise wrong(node, path, "a whole number that 64 bits hold")
        made = value
    try:
        msgspec.convert(made, kind)
    except msgspec.ValidationError:
        if is_struct(kind):
            raise wrong(node, path, f"a mapping with the keys {', '.join(keys(kind))}") from None
        error = wrong(node, path, describe(kind))
        literals = (m for m in _members(kind) if _origin(m) is Literal)
        choices = [str(choice) for literal in literals for choice in get_args(literal)]
        if way := foreign()["values"].get(f"{path}: {value}"):
            raise ConfigError(f"{error} {way}") from None
        if isinstance(value, str) and (guess := nearest(value, choices)):
            raise ConfigError(f"{error} Did you mean {guess}?") from None
        raise error from None
    return made


def _item_types(declared: tuple[Hint, ...], n: int) -> list[Hint]:
    """Returns the types of the n items of a list whose type has these arguments."""
    if not declared:
        return [Any] * n
    if declared[1:] in ((), (...,)):  # all are of the same type
        return [declared[0]] * n
    left = n - len(declared)  # too many are told from the type of the whole
    return [*declared, *[Any] * left]


def _mapping(node: Node, kind: Hint, path: str, beside: Sequence[str]) -> dict[str, object]:
    """Does what `_plain` does, for a mapping."""
    members = _members(kind)
    before = f"{path}." if path else ""
    struct = next((m for m in members if is_struct(m)), None)
    if struct is None:
        of = next((get_args(m) for m in members if _origin(m) is dict), ())
        inner = of[1] if of else Any
        return {k: _plain(n, inner, before + k) for k, n in node.value.items()}
    declared = {f.encode_name: f for f in fields(struct)}
    is_open = declared.pop("options", None) is not None
    made: dict[str, object] = {}
    options: dict[str, object] = {}
    for key, child in node.value.items():
        if key in declared:
            made[key] = _plain(child, declared[key].type, before + key)
        elif is_open:
            options[key] = _plain(child, Any, before + key)
        else:
            raise unknown_key(child, key, path, [*declared, *beside])
    for key, field in declared.items():
        if field.required and key not in made:
            place = node.key_at or node.at
            expected = describe(field.type)
            raise ConfigError(f"{place}: {before}{key} is missing; expected {expected}.")
    return {**made, "options": options} if is_open else made


def keys(kind: Hint) -> list[str]:
    return [f.encode_name for f in fields(kind) if f.name != "options"]


def unknown_key(node: Node, key: str, path: str, known: list[str]) -> ConfigError:
    """Returns the error for an unknown key: with the key that was probably meant, or all keys."""
    before = f"{path}." if path else ""
    low = key.lower().replace("-", "_")
    others = foreign()["keys"]
    named = others.get(before + low, others.get(low))
    close = nearest(low, known)
    full = meant = before + key
    if low in known:
        meant = before + low
    elif named and named != full:
        meant = named
    elif close:
        meant = before + close
    else:  # a known key in the wrong section
        meant = next((home for home in homes().get(low, []) if home != full), full)
    ways = foreign()["ways"]
    if way := ways.get(before + low, ways.get(low)):
        hint = f". {way}"
    elif meant != full:
        hint = f". Did you mean {meant}?"
    elif known:
        hint = f"; {path or 'the top level'} has {', '.join(known)}."
    else:
        hint = f"; {path} has no options."
    return ConfigError(f"{node.key_at or node.at}: unknown key {full}{hint}")


@functools.cache
def foreign() -> dict[str, dict[str, str]]:
    """Reads foreign.yaml: other frameworks' names of keys. keys: ours; ways: a sentence; values:
    a sentence for a value that is not ours.
    """
    file = resources.files("fednet.config") / "foreign.yaml"
    made: dict[str, dict[str, str]] = compose(file.read_text(encoding="utf-8"), file.name).plain()
    return made


# -- types -----------------------------------------------------------------------------------------
SEQUENCES = (list, tuple, Sequence)


def _origin(kind: Hint) -> Hint:
    return get_origin(kind) or kind


def _members(kind: Hint) -> list[Hint]:
    """Returns the types of a union, such as `X | None`, else the type alone; none is Annotated."""
    bare = get_args(kind)[0] if _origin(kind) is Annotated else kind
    if _origin(bare) in (Union, types.UnionType):
        return [member for option in get_args(bare) for member in _members(option)]
    return [bare]


def describe(kind: Hint) -> str:
    """Returns a type in words: `a float >= 0 or null`."""
    bare = kind
    limits = []
    if _origin(kind) is Annotated:
        bare, *marks = get_args(kind)
        for mark in marks:
            for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
                bound = getattr(mark, name, None)
                if bound is not None:
                    limits.append(f"{sign} {bound}")
            if getattr(mark, "description", None):
                return str(mark.description)
    origin = _origin(bare)
    inside = get_args(bare)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option) for option in inside)
    if origin is Literal:
        choices = ", ".join(map(str, inside))
        return f"one of {choices}" if len(inside) > 1 else choices
    if is_struct(bare) or origin is dict:
        return "a mapping"
    if origin in SEQUENCES:
        many = f" of {len(inside)}" if origin is tuple and inside and inside[-1] is not ... else ""
        each = "" if not inside or inside[0] is Any else f", each item {describe(inside[0])}"
        return f"a list{many}{each}"
    words: dict[object, str] = {
        int: "a whole number",
        float: "a float",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "a value",
    }
    word = words.get(bare, getattr(bare, "__name__", str(bare)))
    return f"{word} {' and '.join(limits)}".strip()

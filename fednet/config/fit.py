"""Fits a tree to a declared type; an error is one sentence with the place."""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from fednet.config.tree import Node, compose, walk
from fednet.errors import ConfigError, nearest
from fednet.plain import fields

T = TypeVar("T")
# A type as in an annotation: a class, a union, Annotated, Literal or Any.
Hint = Any

LARGEST = 2**63 - 1  # torch, NumPy and the files have 64 bits for a whole number


def wrong(node: Node, path: str, expected: str, got: object = ...) -> ConfigError:
    """Returns the error for a value that does not fit: place, key, what is allowed, what came."""
    return ConfigError(
        f"{node.at}: {path or 'the configuration'}: expected {expected}, got "
        f"{_show(node.value if got is ... else got)}."
    )


def _show(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def fit(node: Node, kind: type[T], path: str = "", beside: Sequence[str] = ()) -> T:
    """Returns `node` as a value of the declared type, checked by msgspec. Raises ConfigError for
    the first value that does not fit, with its place.

    A Struct with a field `options` takes unknown keys into it; `parts` checks these. beside: keys
    of the same mapping that belong to another type, for the error.
    """
    for steps, leaf in walk(node):
        if isinstance(leaf.value, float) and not math.isfinite(leaf.value):
            raise wrong(leaf, dotted(path, steps), "a finite number")
        if isinstance(leaf.value, int) and abs(leaf.value) > LARGEST:
            raise wrong(leaf, dotted(path, steps), "a whole number that 64 bits hold")
    try:
        return msgspec.convert(_plain(node, kind), kind)
    except msgspec.ValidationError as broken:
        raise _placed(str(broken), node, kind, path, beside) from None


def _plain(node: Node, kind: Hint) -> object:
    """Returns the values without places; keys that an open Struct does not know are put under
    `options`.
    """
    if _shape(kind) != "struct" or not isinstance(node.value, dict):
        return node.plain()
    declared = {f.encode_name: f.type for f in fields(kind)}
    is_open = declared.pop("options", None) is not None
    # A key that no field declares may have any value.
    made = {k: _plain(n, declared.get(k, Any)) for k, n in node.value.items()}
    if not is_open:
        return made
    known = {k: v for k, v in made.items() if k in declared}
    return {**known, "options": {k: v for k, v in made.items() if k not in declared}}


_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|\[(\.\.\.)\]")


def _placed(said: str, node: Node, kind: object, path: str, beside: Sequence[str]) -> ConfigError:
    """Returns the error for a message of msgspec: its `$.path` leads to the value and its type."""
    what, _, where = said.partition(" - at `$")
    for name, index, any_key in _STEP.findall(where.rstrip("`")):
        if name:
            shape = "struct"
        elif index:
            shape = "list"
        else:
            shape = "dict"
        outer = _of(kind, shape)
        if outer is None:  # a user's own annotation, of a kind that is not known here
            return _misfit(node, kind, path)
        if name:
            kind = {f.encode_name: f.type for f in fields(outer)}[name]
        else:
            kind = get_args(outer)[0 if index else 1]
        step: str | int = int(index) if index else name
        if any_key:  # msgspec does not name the key
            step = next(k for k, n in node.value.items() if not _fits(n, kind))
        node, path = node.value[step], dotted(path, (step,))
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        known = [*keys(_of(kind, "struct")), *beside]
        return unknown_key(node.value[found[1]], found[1], path, known)
    if found := re.fullmatch(r"Object missing required field `(.*)`", what):
        field = next(f for f in fields(_of(kind, "struct")) if f.encode_name == found[1])
        return ConfigError(
            f"{node.key_at or node.at}: {dotted(path, (found[1],))} is missing; expected "
            f"{describe(field.type)}."
        )
    return _misfit(node, kind, path)


def _fits(node: Node, kind: object) -> bool:
    try:
        msgspec.convert(node.plain(), kind)
    except msgspec.ValidationError:
        return False
    return True


def _of(kind: object, shape: str) -> Hint:
    """Returns the member of a union type (`X | None`) with that shape; None if there is none."""
    bare = _bare(kind)
    options = get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,)
    return next((_bare(o) for o in options if _shape(o) == shape), None)


def dotted(path: str, steps: Iterable[str | int]) -> str:
    """Returns the path with these steps, such as `faults.schedule[1].round`."""
    for step in steps:
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return path.removeprefix(".")


def keys(kind: Hint) -> list[str]:
    return [f.encode_name for f in fields(kind) if f.name != "options"]


def unknown_key(node: Node, key: str, path: str, known: list[str]) -> ConfigError:
    """Returns the error for an unknown key: with the key that was probably meant, else with all
    keys.
    """
    full = f"{path}.{key}" if path else key
    if way := foreign()["ways"].get(_normalised(key)):
        hint = f". {way}"
    elif guess := _guess(key, path, known):
        hint = f". Did you mean {guess}?"
    elif known:
        hint = f"; {path or 'the top level'} has {', '.join(known)}."
    else:
        hint = f"; {path} has no options."
    return ConfigError(f"{node.key_at or node.at}: unknown key {full}{hint}")


@functools.cache
def foreign() -> dict[str, dict[str, str]]:
    """Reads foreign.yaml: other frameworks' names of keys. keys: ours; ways: a sentence."""
    file = resources.files("fednet.config") / "foreign.yaml"
    made: dict[str, dict[str, str]] = compose(file.read_text(encoding="utf-8"), file.name).plain()
    return made


def _normalised(key: str) -> str:
    return key.lower().replace("-", "_")


def _guess(key: str, path: str, known: list[str]) -> str | None:
    """Returns the full path of the key that was probably meant."""
    from fednet.config.schema import homes

    full, low = dotted(path, (key,)), _normalised(key)
    others = foreign()["keys"]
    named = others.get(dotted(path, (low,)), others.get(low))
    if low in known:
        found = dotted(path, (low,))
    elif named and named != full:
        found = named
    elif close := nearest(low, known):
        found = dotted(path, (close,))
    else:  # a known key in the wrong section
        found = next((home for home in homes().get(low, []) if home != full), full)
    return found if found != full else None


# -- words for types -------------------------------------------------------------------------------
def _bare(kind: object) -> object:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _shape(kind: object) -> str:
    kind = _bare(kind)
    origin = get_origin(kind) or kind
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return "struct"
    if origin in (list, tuple, Sequence):
        return "list"
    return "dict" if origin is dict else "leaf"


def _misfit(node: Node, kind: object, path: str) -> ConfigError:
    value = node.plain()
    if _shape(kind) == "struct":
        return wrong(node, path, f"a mapping with the keys {', '.join(keys(kind))}")
    error = wrong(node, path, describe(kind))
    choices = [str(c) for c in _choices(kind)]
    guess = nearest(value, choices) if isinstance(value, str) and choices else None
    if guess:
        return ConfigError(f"{error} Did you mean {guess}?")
    return error


def _choices(kind: object) -> list[object]:
    kind = _bare(kind)
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return (
        [c for option in get_args(kind) for c in _choices(option)]
        if get_origin(kind) in (Union, types.UnionType)
        else []
    )


def describe(kind: object) -> str:
    """Returns a type in words: `a float >= 0 or null`."""
    bare, limits = _bare(kind), []
    for mark in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            bound = getattr(mark, name, None)
            if bound is not None:
                limits.append(f"{sign} {bound}")
        if getattr(mark, "description", None):
            return str(mark.description)
    origin = get_origin(bare)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(o) for o in get_args(bare))
    if origin is Literal:
        return (
            "one of " + ", ".join(str(c) for c in get_args(bare))
            if len(get_args(bare)) > 1
            else str(get_args(bare)[0])
        )
    shape = _shape(bare)
    if shape == "struct":
        return "a mapping"
    if shape == "list":
        items = get_args(bare)
        many = f" of {len(items)}" if origin is tuple and items and items[-1] is not ... else ""
        if not items or items[0] is Any:  # the type of that name
            return f"a list{many}"
        return f"a list{many}, each item {describe(items[0])}"
    if shape == "dict":
        return "a mapping"
    words: dict[object, str] = {
        int: "a whole number",
        float: "a float",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "a value",  # the type of that name, here and above
    }
    return " ".join(
        [words.get(bare, getattr(bare, "__name__", str(bare))), " and ".join(limits)]
    ).strip()

"""Strict YAML, with the place of every value kept.

YAML's traps are mended: `1e-3` is a number, only `true` and `false` are booleans (`no`, `on`, `yes`
stay text), a doubled key is an error that names both lines, there are no dates, no base-60 numbers,
no tags, no aliases and no merge keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from fednet.errors import ConfigError
from fednet.plain import JsonMapping


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place."""

    value: Any  # one of these three
    """A scalar, dict[str, Node] or list[Node]."""
    at: str
    """`file:line` or `--set a.b=c`."""
    key_at: str = ""
    """The place of its key."""
    fresh: bool = False
    """It replaces a mapping instead of merging into it."""

    def plain(self) -> Any:
        """Returns the value without places."""
        if isinstance(self.value, dict):
            return {k: n.plain() for k, n in self.value.items()}
        if isinstance(self.value, list):
            return [n.plain() for n in self.value]
        return self.value


LONGEST = 100  # digits of a whole number; what is longer stays text

# -- reading ---------------------------------------------------------------------------------------
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$",
    re.I,
)
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")


class _Loader(yaml.composer.Composer, yaml.CSafeLoader):
    """Has libyaml's parser, which is eight times as fast as PyYAML's own. Refuses aliases: a few of
    them can stand for any number of values.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        yaml.composer.Composer.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias: Any = self.peek_event()
            problem = f"the alias *{alias.anchor} is not allowed; write the value again"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.CSafeDumper):
    """Quotes what this loader or any YAML 1.1 reader would take for something else than text."""

    yaml_implicit_resolvers = {
        k: list(v) for k, v in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: object) -> bool:
        return True


for _kind, _pattern, _first in (
    ("bool", re.compile(r"true$|false$", re.I), list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("null", re.compile(r"~$|null$|$", re.I), ["~", "n", "N", ""]),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, _first)


def compose(text: str, source: str, *, one_place: bool = False) -> Node:
    """Returns the tree of a YAML text. source: the file's name; one_place: `source` is the whole
    place (`--set ...`), without lines.
    """

    def place(mark: yaml.Mark) -> str:
        return source if one_place else f"{source}:{mark.line + 1}"

    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        # libyaml does not say which character it found, and nobody sees a tab.
        lines = text.splitlines()[mark.line :] if mark else []
        found = f"in {lines[0][:80]!r}" if lines else "at the end"
        raise ConfigError(
            f"{place(mark) if mark else source}: not valid YAML: {wrong.problem or wrong.context} "
            f"{found}."
        ) from None
    except (yaml.YAMLError, UnicodeError) as wrong:  # a character that YAML does not allow
        raise ConfigError(f"{source}: not valid YAML: {str(wrong).splitlines()[0]}.") from None
    except RecursionError:
        raise ConfigError(f"{source}: lists or mappings are nested too deep.") from None
    if root is None:
        return Node(None, source)

    def build(node: yaml.Node, key_at: str) -> Node:
        at = place(node.start_mark)
        text = node.value
        value: Any
        match node, node.tag.removeprefix("tag:yaml.org,2002:"):
            case yaml.MappingNode(), "map":
                value = {}
                for key_node, child in text:
                    here = place(key_node.start_mark)
                    if not isinstance(key_node, yaml.ScalarNode):
                        raise ConfigError(
                            f"{here}: a key must be plain text, found a {key_node.id}."
                        )
                    key = key_node.value
                    if key in value:
                        raise ConfigError(
                            f"{here}: the key {key!r} is given twice, first at "
                            f"{value[key].key_at}; remove one."
                        )
                    value[key] = build(child, here)
            case yaml.SequenceNode(), "seq":
                value = [build(child, at) for child in text]
            case yaml.ScalarNode(), "str":
                value = text
            case yaml.ScalarNode(), "null":
                value = None
            case yaml.ScalarNode(), "bool":
                value = text.lower() == "true"
            case yaml.ScalarNode(), "int" if _INT.match(text):
                value = int(text.replace("_", "")) if len(text) <= LONGEST else text
            case yaml.ScalarNode(), "float" if _FLOAT.match(text) or _INT.match(text):
                plain = text.lower().replace("_", "")
                value = float(plain.replace(".inf", "inf").replace(".nan", "nan"))
            case _:
                raise ConfigError(
                    f"{at}: the tag {node.tag!r} is not allowed; write the value without a tag."
                )
        return Node(value, at, key_at)

    return build(root, place(root.start_mark))


def _check_characters(text: str, at: str) -> str:
    """Returns the text. Raises ConfigError for half a character, which no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{at}: {text!a} holds half a character; write it whole.") from None
    return text


def wrap(value: object, at: str, key: str = "") -> Node:
    """Returns the tree of Python values that came without a file; paths and NumPy's numbers are
    plain ones. key: the value's, in dots. Raises ConfigError for what no file could say, such as a
    class.
    """
    if isinstance(value, Mapping):
        inside = {
            _check_characters(str(k), at): wrap(v, at, f"{key}.{k}" if key else str(k))
            for k, v in value.items()
        }
        return Node(inside, at, at)
    if isinstance(value, (list, tuple)):
        return Node([wrap(v, at, key) for v in value], at, at)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif getattr(value, "shape", None) == ():
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, (str, int, float, type(None))):
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        raise ConfigError(
            f"{at}: {key or 'it'}: a configuration holds text, numbers, lists and mappings, and no "
            f'{kind}; a part of your own is registered, as by @fednet.model("mine"), and named.'
        )
    return Node(_check_characters(value, at) if isinstance(value, str) else value, at, at)


def follow(tree: Node, dotted: str) -> tuple[Node, bool]:
    """Returns the last node on a dotted path that was written, and whether the path ends there."""
    node = tree
    for step in dotted.split("."):
        if not isinstance(node.value, dict) or step not in node.value:
            return node, False
        node = node.value[step]
    return node, True


def refuse(tree: Node, key: str, sentence: str) -> ConfigError:
    """Returns the error about a key of the configuration that `tree` was read from, with the place
    of the key there, or of the nearest one above it that was written.
    """
    node, _ = follow(tree, key)
    return ConfigError(f"{node.key_at or node.at}: {key}: {sentence}")


def dump(mapping: JsonMapping) -> str:
    """Returns YAML of a plain mapping, in its own order, that `compose` reads back exactly."""
    return yaml.dump(
        dict(mapping),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=110,
        allow_unicode=True,
    )

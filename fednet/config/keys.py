"""Every configuration key and every option of a part, from their declarations: type, default, unit,
and what it does.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import get_args, get_origin

import msgspec

from fednet import registry
from fednet.config.fit import describe
from fednet.config.parts import SECTIONS, declared_options
from fednet.config.schema import Config

# How the text of a key that has a unit ends.
_UNIT = re.compile(r"\[([^\[\]]+)\]$")


@dataclass(frozen=True, slots=True)
class DocumentedKey:
    """One key.

    path: dotted, with `IDS` and `[i]` for a mapping's and a list's any number of entries. unit: "-"
    if it has none.
    """

    path: str
    type: str
    default: str
    unit: str
    about: str


def keys(prefix: str = "") -> list[DocumentedKey]:
    """Returns the keys at and below a dotted prefix, in the order of the sections."""
    found = _below(Config, "")
    return [k for k in found if not prefix or k.path == prefix or k.path.startswith(f"{prefix}.")]


def options(section: str) -> dict[str, list[DocumentedKey]]:
    """Returns the options of each part that a section of `SECTIONS` may name."""
    kind, _ = SECTIONS[section]
    parts: registry.Registry = getattr(registry, kind)
    found: dict[str, list[DocumentedKey]] = {}
    for name in parts.names():
        declared = declared_options(parts.get(name), kind)
        fields = msgspec.structs.fields(declared) if declared is not None else ()
        texts = _described(declared) if declared is not None else {}
        found[name] = [_documented(f.encode_name, f, texts.get(f.name, "")) for f in fields]
    return found


def _described(kind: type) -> dict[str, str]:
    """Returns the texts of a part's options: the string in an annotation, or below the field of a
    class or of one that it extends.
    """
    found: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        marks = getattr(field.type, "__metadata__", ())
        found[field.name] = next((mark for mark in marks if isinstance(mark, str)), "")
    for owner in reversed(kind.__mro__):
        if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
            try:
                found |= _texts(owner)
            except (OSError, TypeError):  # a class whose source is not in a file has none
                continue
    return found


def sections() -> dict[str, str]:
    """Returns the description of each section, by its path; "" is the whole."""
    found = {"": _first(Config)}
    for field in msgspec.structs.fields(Config):
        if inner := _struct(field.type):
            found[field.encode_name] = _first(inner)
    return found


def _below(kind: type[msgspec.Struct], path: str) -> list[DocumentedKey]:
    said = _texts(kind)
    found: list[DocumentedKey] = []
    for field in msgspec.structs.fields(kind):
        if field.name == "options":
            continue
        here = f"{path}.{field.encode_name}" if path else field.encode_name
        inner = _struct(field.type)
        if field.name in said:
            found.append(_documented(here, field, said[field.name]))
        elif inner is None:
            raise ValueError(f"{here}: has no text.")
        if inner is not None:
            many = {tuple: "[i]", dict: ".IDS"}.get(get_origin(field.type), "")
            found += _below(inner, here + many)
    return found


def _documented(path: str, field: msgspec.structs.FieldInfo, text: str) -> DocumentedKey:
    unit = _UNIT.search(text)
    return DocumentedKey(
        path=path,
        type=describe(field.type),
        default="(needed)" if field.required else _shown(field),
        unit=unit[1] if unit else "-",
        about=_UNIT.sub("", text).strip(),
    )


def _texts(kind: type) -> dict[str, str]:
    """Returns the string below each field, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for line, below in zip(body.body, body.body[1:]):
        if (
            isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[line.target.id] = " ".join(str(below.value.value).split())
    return found


def _struct(kind: object) -> type[msgspec.Struct] | None:
    """Returns the section in a field's type, itself or as what a list or mapping holds."""
    for found in (kind, *get_args(kind)):
        if isinstance(found, type) and issubclass(found, msgspec.Struct):
            return found
    return None


def _first(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())


def _shown(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return "[]" if value == () else str(value) or '""'

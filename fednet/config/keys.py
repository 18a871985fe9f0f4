"""Every key of the configuration and option of a part: type, default, unit, and what it does."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass

import msgspec

from fednet import registry
from fednet.config.fit import describe
from fednet.config.parts import SECTIONS, declared_options
from fednet.config.schema import Config, every_key, is_struct

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
    found = []
    for path, section, field in every_key():
        text = _texts(section).get(field.name)
        if text is not None:
            found.append(_document_key(path, field, text))
        elif not is_struct(field.type):
            raise ValueError(f"{path}: has no text.")
    return [k for k in found if not prefix or f"{k.path}.".startswith(f"{prefix}.")]


def options(section: str) -> dict[str, list[DocumentedKey]]:
    """Returns the options of each part that a section of `SECTIONS` may name. Their texts are the
    string in an annotation, or below the field of a class or of one that it extends.
    """
    parts, _ = SECTIONS[section]
    found: dict[str, list[DocumentedKey]] = {}
    for name in parts.names():
        found[name] = []
        declared = declared_options(parts.get(name), parts.kind)
        if declared is None:
            continue
        texts: dict[str, str] = {}
        fields = msgspec.structs.fields(declared)
        for field in fields:
            marks = getattr(field.type, "__metadata__", ())
            texts.update((field.name, mark) for mark in reversed(marks) if isinstance(mark, str))
        for owner in reversed(declared.__mro__):
            if issubclass(owner, msgspec.Struct) and owner is not msgspec.Struct:
                # A class whose source is not in a file has none.
                with contextlib.suppress(OSError, TypeError):
                    texts |= _texts(owner)
        found[name] = [_document_key(f.encode_name, f, texts.get(f.name, "")) for f in fields]
    return found


def sections() -> dict[str, str]:
    """Returns the description of each section, by its path; "" is the whole."""
    kinds = {"": Config} | {f.encode_name: f.type for f in msgspec.structs.fields(Config)}
    return {
        path: registry.first_paragraph(kind.__doc__)
        for path, kind in kinds.items()
        if is_struct(kind)
    }


def _document_key(path: str, field: msgspec.structs.FieldInfo, text: str) -> DocumentedKey:
    unit = _UNIT.search(text)
    value = field.default if field.default is not msgspec.NODEFAULT else None
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    if field.required:
        default = "(needed)"
    elif value is None or isinstance(value, bool):
        default = "null" if value is None else str(value).lower()
    else:
        default = "[]" if value == () else str(value) or '""'
    return DocumentedKey(
        path=path,
        type=describe(field.type),
        default=default,
        unit=unit[1] if unit else "-",
        about=_UNIT.sub("", text).strip(),
    )


@functools.cache
def _texts(kind: type) -> dict[str, str]:
    """Returns the string below each field, in one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for line, below in zip(body.body, body.body[1:]):
        match line, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                found[name] = " ".join(str(text).split())
    return found

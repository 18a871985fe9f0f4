"""The options that a part takes from the configuration: their types, and texts such as
`topk(0.01)`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from fednet.errors import ConfigError

if TYPE_CHECKING:
    from fednet.registry import Registry

_CALL = re.compile(r"\s*([a-z0-9][a-z0-9_-]*)\s*(?:\(([^()]*)\))?\s*")


def options_of(
    part: Callable[..., object], given: Collection[str] = ()
) -> type[msgspec.Struct] | None:
    """Returns the type that a part's options are checked against, from its signature. None: it
    takes any (`**options`).

    given: arguments that fednet fills in itself, which the configuration cannot give. A text in an
    argument's annotation, `Annotated[float, "What it does. [unit]"]`, is shown in lists of options.
    """
    try:
        parameters = inspect.signature(part, eval_str=True).parameters
        resolved = True
    except (NameError, TypeError):  # a user's annotation that cannot be resolved is ignored
        parameters = inspect.signature(part).parameters
        resolved = False
    fields: list[tuple[str, object] | tuple[str, object, object]] = []
    for name, p in parameters.items():
        if p.kind is p.VAR_KEYWORD:
            return None
        if name in given or p.kind not in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD):
            continue
        hint: object = Any  # without an annotation anything is allowed
        if resolved and p.annotation is not p.empty:
            hint = p.annotation
        try:
            msgspec.convert(None, hint)
        except msgspec.ValidationError:
            pass
        except TypeError:  # msgspec cannot check it
            hint = Any
        if p.default is p.empty:
            fields.append((name, hint))
        elif isinstance(p.default, (list, dict, set)):
            fields.append((name, hint, msgspec.field(default_factory=p.default.copy)))
        else:
            fields.append((name, hint, p.default))
    return msgspec.defstruct(
        f"{getattr(part, '__name__', 'Part')}Options",
        fields,
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
    )


def takes(part: Callable[..., object], option: str) -> bool:
    """Returns whether the function, or the class, would take that option."""
    parameters = inspect.signature(part).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call(text: object) -> tuple[str, tuple[int | float, ...]]:
    """Reads `topk(0.01)` as ("topk", (0.01,)). Raises ConfigError for anything but a name with
    numbers.
    """
    if not isinstance(text, str) or not (found := _CALL.fullmatch(text)):
        raise ConfigError(
            f"{text!r}: expected a name, its numbers in parentheses, such as fp16 or topk(0.01)."
        )
    numbers: list[int | float] = []
    for part in (found[2] or "").split(","):
        if not part.strip():
            continue
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ConfigError(f"{text!r}: {part.strip()!r} is not a number.")
        numbers.append(int(value) if value.is_integer() else value)
    return found[1], tuple(numbers)


def instance(parts: Registry, text: object) -> object:
    """Calls the part that `text` names with the numbers in it. Raises ConfigError for an unknown
    name or wrong numbers.
    """
    name, numbers = call(text)
    part: Callable[..., object] = parts.get(name)
    takes = inspect.signature(part)
    try:
        takes.bind(*numbers)
    except TypeError:
        wanted = f"({', '.join(takes.parameters)})" if takes.parameters else ""
        raise ConfigError(f"{parts.kind} {text!r}: expected {name}{wanted}.") from None
    return part(*numbers)

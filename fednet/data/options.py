"""Options of a plain function: its keyword parameters are the names allowed, their annotations the
types.

`def sensors(root, *, window=128): ...` takes `window` from the configuration and nothing else.
Parameters that fednet itself fills (`root`, `download`, `seed`, ...) are not options.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fednet.errors import ConfigError, unknown


def mapping(section: Any) -> dict[str, Any]:
    """A part of the configuration, as a plain dict: a mapping, a msgspec struct, or any object with
    attributes.
    """
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return dict(section)
    if isinstance(section, msgspec.Struct):
        return msgspec.structs.asdict(section)
    return dict(vars(section))


def call(
    part: Callable[..., Any], given: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> Any:
    """part(**given, **options): of `given` only what its signature names; of `options` all, or
    ConfigError.

    where: the configuration key in messages, such as "data (dataset 'sensors')".
    """
    parameters = inspect.signature(part).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [
        n
        for n, p in parameters.items()
        if n not in given and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    for name in options:
        if name not in known and not (free and name not in given):
            wrong = unknown("option", name, known) if known else f"takes no option {name!r}."
            raise ConfigError(f"{where}: {wrong}")
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise ConfigError(f"{where}: option {name!r} is missing.")
    hints = _hints(part)
    values = {
        n: _typed(v, hints[n], f"{where}: option {n!r}") if n in hints else v
        for n, v in options.items()
    }
    return part(**{n: v for n, v in given.items() if n in parameters}, **values)


def takes(part: Callable[..., Any], option: str) -> bool:
    """Whether the function would take that option."""
    parameters = inspect.signature(part).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _hints(part: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(part, include_extras=True)
    except (NameError, TypeError):  # a user's annotation that cannot be resolved tells us nothing
        return {}


def _typed(value: Any, hint: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as wrong:
        raise ConfigError(f"{where}: {str(wrong)[0].lower()}{str(wrong)[1:]}.") from None
    except TypeError:  # an annotation that msgspec does not know, such as a callable
        return value

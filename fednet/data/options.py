"""Options of a plain function: its keyword parameters are the names allowed, their annotations the
types.

`def sensors(root, *, window=128): ...` takes `window` from the configuration and nothing else.
Parameters that fednet itself fills (`root`, `download`, `seed`, ...) are not options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

import msgspec

from fednet.config.fit import fit
from fednet.config.tree import wrap
from fednet.options import options_of
from fednet.plain import JsonMapping

T = TypeVar("T")


def call(part: Callable[..., T], given: JsonMapping, options: JsonMapping, path: str) -> T:
    """part(**given, **options): of `given` only what its signature names; of `options` all, or
    ConfigError.

    path: the configuration key that they stand under, such as `data`.
    """
    parameters = inspect.signature(part).parameters
    declared = options_of(part, given)
    values = dict(options)
    if declared is not None:
        name = getattr(part, "__name__", str(part))
        made = fit(wrap(values, f"the options of {name}"), declared, path)
        values = {
            f.name: getattr(made, f.name)
            for f in msgspec.structs.fields(made)
            if f.encode_name in options
        }
    return part(**{n: v for n, v in given.items() if n in parameters}, **values)

"""What a method's own functions are given and return, held against what it declares. Whoever writes
a method reads here what was expected, and in which of their lines, in place of what went wrong
later.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from types import FunctionType
from typing import TYPE_CHECKING, TypeVar

from fednet.algorithms.state import State
from fednet.errors import ConfigError, FednetError
from fednet.loading import place
from fednet.tensors import Layout, Tensors
from fednet.wire.payload import Payload

if TYPE_CHECKING:
    from fednet.algorithms.base import Algorithm

S = TypeVar("S", bound=State)


class WrongPart(ConfigError):
    """A function of a user's own takes or returns what it cannot; named with its file and line."""


def held(kind: type[Algorithm], base: type[Algorithm]) -> None:
    """Every function of a user's own method, in the place of one of `base`, raises WrongPart from
    now on where it returns what it cannot. Raises it at once for what it takes.
    """
    for name, check in RETURNS.items():
        own = inspect.getattr_static(kind, name)
        users = isinstance(own, FunctionType) and own.__module__.partition(".")[0] != "fednet"
        if users and not hasattr(own, "__wrapped__"):
            _takes(kind, own, getattr(base, name))
            setattr(kind, name, _held(name, own, check))


def _held(name: str, own: FunctionType, check: Check) -> Callable[..., object]:
    @functools.wraps(own)
    def call(method: Algorithm, *given: object, **named: object) -> object:
        found = own(method, *given, **named)
        if (expected := check(method, found)) is not None:
            raise WrongPart(
                f"{name} of {type(method).__name__} ({place(own)}) returned {_shown(found)}, "
                f"expected {expected}"
            )
        return found

    return call


def _takes(kind: type[Algorithm], own: FunctionType, base: Callable[..., object]) -> None:
    expected, found = inspect.signature(base), inspect.signature(own)
    try:
        found.bind(*expected.parameters)
    except TypeError:
        raise WrongPart(
            f"{own.__name__} of {kind.__name__} ({place(own)}) takes "
            f"({', '.join(found.parameters)}), expected ({', '.join(expected.parameters)})"
        ) from None


def _shown(found: object) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(value).__name__ for value in found)})"
    return type(found).__name__


# -- what each function returns: None, or what was expected ----------------------------------------
Check = Callable[["Algorithm", object], "str | None"]


def _a(kind: type | tuple[type, ...], expected: str) -> Check:
    return lambda method, found: None if isinstance(found, kind) else expected


def _state(which: str) -> Check:
    def check(method: Algorithm, found: object) -> str | None:
        kind = getattr(method, which)
        others = {method.Server, method.Client, method.Fold} - {kind}
        if not isinstance(found, State) or type(found) in others:
            return f"{which}(...)"
        field = method.model_field if isinstance(found, method.Server) else None
        if field is not None and not isinstance(getattr(found, field), Tensors | None):
            return f"Tensors as its {field}, not a {type(getattr(found, field)).__name__}"
        return None

    return check


def _pair(method: Algorithm, found: object) -> str | None:
    state, up = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if isinstance(state, method.Client) and isinstance(up, Payload):
        return None
    return (
        f"the client's next state ({method.Client.__name__}; without one, `client` as it came) and "
        f"its Up"
    )


def _refusal(method: Algorithm, found: object) -> str | None:
    pair = isinstance(found, tuple) and list(map(type, found)) == [str, str]
    return None if pair or found is None else "(key, sentence), or None"


_model = _a((Tensors, type(None)), "Tensors of the model, or None")

RETURNS: Mapping[str, Check] = {
    "refusal": _refusal,
    "shared": _a(Layout, "a part of the Layout that it was given"),
    "sizes": _a(Mapping, "a dict: bytes by field"),
    "init_server": _state("Server"),
    "prepare": _state("Server"),
    "init_client": _state("Client"),
    "enroll": _a((Payload, type(None)), "a payload, or None"),
    "enrolled": _state("Client"),
    "broadcast": _a(Payload, "the payload that goes down, Down(...)"),
    "local": _pair,
    "start": _state("Fold"),
    "fold": _state("Fold"),
    "finish": _state("Server"),
    "weight": _a(Real, "a number"),
    "global_model": _model,
    "shared_model": _model,
    "shared_part": _model,
    "with_model": _state("Server"),
    "personal": lambda method, found: (
        None
        if isinstance(found, Tensors) or callable(found)
        else "Tensors of the model, or a function from inputs to outputs"
    ),
    "beside": _a(Mapping, "a dict: tensors by name"),
}


class Diverged(FednetError):
    """A client's training left the finite numbers: it would again, from the same start."""


def finite(up: Payload, exempt: Collection[str]) -> None:
    """Raises Diverged for tensors that are not finite, but in the buffers of these names."""
    for name in up.fields:
        value = getattr(up, name)
        if isinstance(value, Tensors) and not value.is_finite(exempt):
            raise Diverged(
                f"{name} is not finite after training; a smaller train.lr, or train.clip_norm, may "
                f"help"
            )


def first(kind: type[S], calls: str, **values: object) -> S:
    """The first state of a kind, of these values, by a default. Raises ConfigError where the kind
    declares other fields. calls: what takes the default's place.
    """
    fields = dataclasses.fields(kind)
    needed = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if not needed <= set(values) <= {f.name for f in fields}:
        raise ConfigError(
            f"{kind.__qualname__} declares {', '.join(f.name for f in fields) or 'nothing'}, which "
            f"nothing makes yet; write {calls}."
        )
    return kind(**values)

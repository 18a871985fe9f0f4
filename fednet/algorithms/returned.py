"""Checks what a method's functions return against its declarations (`loading.check_returns`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, TypeVar

from fednet.algorithms.state import State
from fednet.errors import ConfigError, FednetError
from fednet.loading import Arguments, Check
from fednet.tensors import Layout, Tensors
from fednet.wire.payload import Payload, tensors_of, value_mismatch

S = TypeVar("S", State, Payload)


# -- checks of each function: None, or what was expected -------------------------------------------
def _a(kind: type | tuple[type, ...], expected: str) -> Check:
    return lambda method, given, found: None if isinstance(found, kind) else expected


def _payload(expected: str) -> Check:
    return lambda method, given, found: (
        value_mismatch(found) if isinstance(found, Payload) else expected
    )


def _state(which: str) -> Check:
    def check(method: Any, given: Arguments, found: object) -> str | None:
        kind = getattr(method, which)
        others = {method.Server, method.Client, method.Accumulator} - {kind}
        if not isinstance(found, State) or type(found) in others:
            return f"{which}(...)"
        field = method.model_field if isinstance(found, method.Server) else None
        if field is not None and not isinstance(getattr(found, field), Tensors | None):
            return f"Tensors as its {field}, not a {type(getattr(found, field)).__name__}"
        return None

    return check


def _pair(method: Any, given: Arguments, found: object) -> str | None:
    state, up = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
    if not isinstance(state, method.Client) or not isinstance(up, Payload):
        return (
            f"the client's next state ({method.Client.__name__}; without one, `client` as it came) "
            f"and its Up"
        )
    if wrong := value_mismatch(up):
        return wrong
    shared: Layout = given[3].shared
    for name, value in tensors_of(up).items():
        if value.layout.parameters == shared.parameters:
            continue
        sent = value.layout.parameters.names
        expected = shared.parameters.names
        lacks = [n for n in expected if n not in sent] or [n for n in sent if n not in expected]
        difference = ", ".join(lacks[:3]) or "in shapes"
        if len(lacks) > 3:
            difference += ", ..."
        return (
            f"the tensors that are sent (host.shared) as {type(up).__qualname__}.{name}; the "
            f"difference is {difference}"
        )
    return None


def _refusal(method: Any, given: Arguments, found: object) -> str | None:
    pair = isinstance(found, tuple) and list(map(type, found)) == [str, str]
    return None if pair or found is None else "(key, sentence), or None"


_model = _a((Tensors, type(None)), "Tensors of the model, or None")
_enrolment = _payload("a payload, or None")

RETURNS: Mapping[str, Check] = {
    "refusal": _refusal,
    "shared": _a(Layout, "a part of the Layout that it was given"),
    "sizes": _a(Mapping, "a dict: bytes by field"),
    "init_server": _state("Server"),
    "prepare": _state("Server"),
    "init_client": _state("Client"),
    "enroll": lambda method, given, found: (
        None if found is None else _enrolment(method, given, found)
    ),
    "receive_enrolment": _state("Client"),
    "broadcast": _payload("the payload that goes down, Down(...)"),
    "client_update": _pair,
    "init_accumulator": _state("Accumulator"),
    "accumulate": _state("Accumulator"),
    "server_update": _state("Server"),
    "weight": _a(Real, "a number"),
    "global_model": _model,
    "shared_model": _model,
    "shared_part": _model,
    "with_model": _state("Server"),
    "personal_model": lambda method, given, found: (
        None
        if isinstance(found, Tensors) or callable(found)
        else "Tensors of the model, or a function from inputs to outputs"
    ),
    "beside": _a(Mapping, "a dict: tensors by name"),
}


class Diverged(FednetError):
    """A client's training gave values that are not finite; from the same start it would again."""


def finite(up: Payload, exempt: Collection[str]) -> None:
    """Raises Diverged if tensors are not finite, except in the buffers of these names."""
    for name, value in tensors_of(up).items():
        if not value.is_finite(exempt):
            raise Diverged(
                f"{name} is not finite after training; a smaller train.lr, or train.clip_norm, may "
                f"help"
            )


def first(kind: type[S], calls: str, **values: object) -> S:
    """Makes a state or a payload by default, of these values. Raises ConfigError if the kind
    declares other fields, or a field of the payload something else. calls: the function to write
    instead of the default.
    """
    try:
        made = kind(**values)
    except TypeError as unlike:
        declared = ", ".join(f.name for f in dataclasses.fields(kind)) or "nothing"
        raise ConfigError(
            f"{kind.__qualname__} declares {declared}, but the default fills "
            f"{', '.join(values) or 'nothing'}; write {calls}."
        ) from unlike
    if isinstance(made, Payload) and (expected := value_mismatch(made)):
        raise ConfigError(f"the default of {calls}: expected {expected}; write {calls}.")
    return made

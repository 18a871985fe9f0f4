"""What a method's own parts return, held against what it declares. Whoever writes a method reads
here what was expected, in place of what went wrong later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar

from fednet.algorithms.state import State
from fednet.errors import ConfigError, FednetError
from fednet.tensors import Tensors
from fednet.wire.payload import Payload, weights_of

if TYPE_CHECKING:
    from fednet.algorithms.base import Algorithm
    from fednet.algorithms.host import ClientHost

S = TypeVar("S", bound=State)


def answered(method: Algorithm, found: object, host: ClientHost) -> tuple[State, Payload]:
    """What `local` returned. Raises TypeError for what cannot be that."""
    pair = found if isinstance(found, tuple) else (found,)
    state, up = pair if len(pair) == 2 else (None, None)
    if not isinstance(state, method.Client) or not isinstance(up, Payload):
        shown = ", ".join(type(value).__name__ for value in pair)
        raise TypeError(
            f"local of {type(method).__name__} returned ({shown}), expected the client's next "
            f"state ({method.Client.__name__}; without one, `client` as it came) and its Up"
        )
    # A training loop of the method's own says by what it sends where it came to.
    sent = weights_of(up)
    if host.trained is None and sent is not None and sent.layout == host.layout:
        host.trained = sent.to(host.device)
    return state, up


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


def stated(method: Algorithm, call: str, kind: str, found: object) -> State:
    """What `fold` or `finish` returned. Raises TypeError for what is no state."""
    if not isinstance(found, State):
        raise TypeError(
            f"{call} of {type(method).__name__} returned {type(found).__name__}, expected "
            f"{kind}(...)"
        )
    return found


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

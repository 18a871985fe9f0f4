"""The weight of a reply that started from an older model than the one it is added to.

tau  updates of the global model since the one that the reply started from: its staleness
s    what the reply counts then, 1 where tau is 0

    constant      s = 1
    poly(a)       s = (1 + tau)^-a
    hinge(a, b)   s = 1 up to tau = b, then 1 / (a (tau - b) + 1)

The three are those of Xie et al., 2019 (arXiv:1903.03934), Section 5.2, as Plato's public
implementation has them; in FLGo's the hinge lacks the + 1. poly(0.5) is the 1 / sqrt(1 + tau) of
Nguyen et al., AISTATS 2022 (arXiv:2106.06639).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from fednet.options import call
from fednet.tensors import Tensors
from fednet.wire.payload import P, tensors_of

_NUMBER = r"\s*[0-9]+\.?[0-9]*\s*"
Staleness = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:constant|poly\({_NUMBER}\)|hinge\({_NUMBER},{_NUMBER}\))\Z",
        description="constant, poly(a) or hinge(a, b)",
    ),
]
BUFFERED = "poly(0.5)"
"""FedBuff's rule, under which a method made for rounds runs without them."""


def weight(rule: str, tau: int) -> float:
    """s(tau) by a rule as a configuration has it."""
    name, numbers = call(rule)
    if name == "poly":
        return float((1 + tau) ** -numbers[0])
    if name == "hinge" and tau > numbers[1]:
        return float(1 / (numbers[0] * (tau - numbers[1]) + 1))
    return 1.0


def rebase(up: P, sent: Tensors | None, now: Tensors | None, tau: int) -> P:
    """Returns a stale reply of a method made for rounds, as if its update, s(tau) of it, had been
    made from the model as it is now. sent: the model that its client was sent.

    A `Delta` is scaled; `Weights` become now + s (weights - sent). Buffers stay as they came.
    """
    if not tau:
        return up
    s = weight(BUFFERED, tau)
    changed = {}
    for name, value in tensors_of(up).items():
        kind = up.fields[name].kind
        if kind == "delta":
            changed[name] = value * s
        elif kind == "state" and now is not None:
            assert sent is not None
            changed[name] = value.with_vector((now + s * (value - sent)).vector)
    return dataclasses.replace(up, **changed)

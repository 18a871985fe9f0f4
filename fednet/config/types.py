"""The types that the sections' keys are declared with, and the base of the sections."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# What a message carries is no larger: see `wire.messages.Seconds`.
Carried = msgspec.Meta(le=1e9)
Below1 = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Taken = Annotated[float, msgspec.Meta(gt=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
RunName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}\Z",
        description="a directory's name of letters, digits and . _ - + = @, at most 100",
    ),
]
Schedule = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(constant|cosine|exponential\(\s*[0-9.eE+-]+\s*\)|step\(\s*[0-9]+\s*,\s*[0-9.eE+-]+\s*\))\Z",
        description="constant, cosine, exponential(factor) or step(rounds, factor)",
    ),
]

_NUMBER = r"\s*[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?\s*"
Drawn = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:lognormal|uniform)\({_NUMBER},{_NUMBER}\)\Z",
        description="lognormal(median, sigma) or uniform(low, high)",
    ),
]
Profile = Literal["3g", "4g", "dsl", "wifi", "lan"]
_NAME = r"(?:3g|4g|dsl|wifi|lan)"
Chosen = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(?:{_NAME}|choice\(\s*{_NAME}\s*(?:,\s*{_NAME}\s*)*\))\Z",
        description="one of 3g, 4g, dsl, wifi, lan or choice(NAME, NAME, ...) of these",
    ),
]


def drawn(text: str) -> tuple[str, float, float]:
    """A distribution in parts: ("lognormal", median, sigma) or ("uniform", low, high)."""
    name, _, inside = text.partition("(")
    first, second = (float(x) for x in inside.rstrip(") ").split(","))
    return name, first, second


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of sections: unknown keys are errors, values never change."""

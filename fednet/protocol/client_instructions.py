"""What the client's side of the protocol answers with."""

from __future__ import annotations

from dataclasses import dataclass

from fednet.wire import messages as m
from fednet.wire.messages import Key


@dataclass(frozen=True, slots=True)
class Out:
    """Send this."""

    message: m.Message
    body: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The server's configuration; the engine prepares data and model, then calls `ready`."""

    welcome: m.Welcome
    again: bool  # of the same run as before: all is prepared


@dataclass(frozen=True, slots=True)
class Given:
    """A task with its whole payload."""

    task: m.Task
    body: memoryview


@dataclass(frozen=True, slots=True)
class Cancelled:
    """This task is not wanted any more."""

    key: Key


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over (or, `over` false, its server stopped and a later one goes on)."""

    over: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The server refused this client for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The server has been silent for too long: connect anew."""


@dataclass(frozen=True, slots=True)
class Booked:
    """The row of this payload is complete. whole: all of it is here."""

    direction: str
    key: Key
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Stray:
    """The message just received belongs to nothing that is under way: it is billed, and not used.
    Comes first.
    """

    reason: str


Instruction = Out | Stray | Welcomed | Given | Cancelled | Ended | TurnedAway | Reconnect | Booked

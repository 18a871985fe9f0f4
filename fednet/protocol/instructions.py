"""What the server's side of the protocol answers an event with."""

from __future__ import annotations

import msgspec

from fednet.plain import JsonDict
from fednet.protocol.tasks import TrackedTask
from fednet.wire.body import Body
from fednet.wire.messages import Direction, Key, Message

# Of a connection's messages in a round that belong to nothing, or cannot be read, so many are
# answered with a reason, and their payloads have rows of their own.
MOST_STRAYS = 16


# There are several for each message, and structs are made faster than dataclasses.
class Send(msgspec.Struct, frozen=True):
    conn: bytes
    message: Message
    body: Body | None = None


class Stray(msgspec.Struct, frozen=True):
    """The message just received belongs to nothing that is under way: its bytes are wasted. Comes
    first.
    """

    reason: str


class Store(msgspec.Struct, frozen=True):
    """A part of a reply's payload, in order: to be appended at `offset`."""

    key: Key
    offset: int
    data: Body


class Arrived(msgspec.Struct, frozen=True):
    """All of the payload of a task's reply is here. The caller checks it, and calls `accept` or
    `reject`.
    """

    task: TrackedTask
    """With the reply, and the connections that both crossed."""
    body: Body | None = None
    """Its payload, where it came in one piece; None: its parts were to be stored."""


class Resolved(msgspec.Struct, frozen=True):
    """A client's task is over. reason: "" if its reply was accepted, else why none was."""

    key: Key
    reason: str = ""


class ClosePayload(msgspec.Struct, frozen=True):
    """Nothing more comes of a payload, and it was not useful, for that reason."""

    conn: bytes
    direction: Direction
    key: Key
    reason: str


class Note(msgspec.Struct, frozen=True):
    """Something for the run's events."""

    event: str
    fields: JsonDict = {}


class HangUp(msgspec.Struct, frozen=True):
    """The connection is of no further use: it is to be ended."""

    conn: bytes


Instruction = Send | Stray | Store | Arrived | Resolved | ClosePayload | Note | HangUp

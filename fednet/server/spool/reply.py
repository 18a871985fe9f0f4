"""A reply that is whole, and how much of such is held in memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from fednet.buffers import lend
from fednet.errors import StateError
from fednet.files import digest, opened
from fednet.pages import pages
from fednet.plain import JsonDict
from fednet.wire.messages import Field, Key
from fednet.wire.payload import Payload

HELD_BYTES = 256 << 20  # of payloads in memory that are not folded yet


class HeldMemory:
    """How much is held of each round's payloads. For several threads."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}  # bytes, by round
        self._lock = threading.Lock()

    def take(self, round: int, size: int) -> bool:
        """Whether there is room for so much more; it counts as held then."""
        with self._lock:
            if sum(self._held.values()) + size > HELD_BYTES:
                return False
            self._held[round] = self._held.get(round, 0) + size
            return True

    def give(self, round: int, size: int) -> None:
        with self._lock:
            if round in self._held:
                self._held[round] -= size

    def clear(self, round: int) -> None:
        """Nobody will ask for what is held of that round."""
        with self._lock:
            self._held.pop(round, None)


@dataclass(slots=True)
class Spooled:
    """A reply that is whole. `path` and `at` say where its payload lies on the disk, once it was
    sealed and the spool flushed; `task`: the digest of what it answers, and the version of the
    client's state that it started from. held: the payload, where it came whole and is small, or
    `payload`, as it was decoded; memory: in which it counts as held, and may stay.
    """

    key: Key
    form: tuple[Field, ...]
    path: str
    check: bytes
    state: str
    kept: bool
    task: tuple[bytes, str]
    seconds: float = 0.0
    worker: JsonDict = field(default_factory=dict)
    split: tuple[float, ...] = ()  # of `seconds`: training, evaluating, encoding
    taken_s: float = 0.0  # from the hand-out to the whole reply
    arrived: float = 0.0  # when, on this process's clock
    reported: dict[str, float] = field(default_factory=dict)  # by the method, of its client
    at: int = 0
    held: memoryview | None = None
    payload: Payload | None = None
    memory: HeldMemory | None = None

    @property
    def size(self) -> int:
        return sum(f.size for f in self.form)

    def body(self) -> memoryview:
        """Its payload, the caller's own: to write to it changes no file, nor what who asks again
        gets.
        """
        if (held := self.let_go()) is not None:
            return held
        if not self.at:  # a file of its own
            return self.view()
        data = lend(self.size).data
        file = opened(self.path, os.O_RDONLY)
        try:
            read = os.preadv(file, [data], self.at)
        finally:
            os.close(file)
        if read != len(data):
            raise StateError(f"{self.path}: {read} bytes could be read of {len(data)}.")
        return data

    def decoded(self) -> Payload | None:
        """Its payload as it was decoded, the caller's own: once, as `body`; None where it has to be
        decoded.
        """
        payload = self.payload
        if payload is not None:
            self.let_go()
        return payload

    def let_go(self) -> memoryview | None:
        """What was held is so no more."""
        held, self.held, self.payload = self.held, None, None
        if self.memory is not None:
            self.memory.give(self.key.round, self.size)
            self.memory = None
        return held

    def intact(self) -> bool:
        """Whether its payload is as it was received: a power cut may have lost it, or left an
        earlier one's bytes in its place.
        """
        if not os.path.exists(self.path):
            return False
        if not self.at and os.path.getsize(self.path) != self.size:  # a file of its own
            return False
        return digest([self.view()]) == self.check

    def view(self) -> memoryview:
        """Its payload as memory or the system has it already: to be let go of at once."""
        if self.held is not None:
            return self.held
        if not self.size:  # which cannot be mapped
            return memoryview(b"")
        whole = pages(self.path)
        if len(whole) < self.at + self.size:
            raise StateError(f"{self.path}: {len(whole)} bytes, {self.at + self.size} were there.")
        return whole[self.at : self.at + self.size]

"""A server's transport on a bad network, which loses, doubles, damages, cuts short and delays
messages, and ends connections, as planned.

A plan is asked about every message and answers with a fault or None. `Script` has faults of
numbered messages, `Chances` of random ones; both repeat themselves exactly for the same messages in
the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fednet.transport.base import Closed, Event, Frame, Frames, Received, ServerTransport

Direction = Literal["up", "down"]
Kind = Literal["drop", "duplicate", "corrupt", "truncate", "delay", "cut"]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one message.

    drop: it is lost. duplicate: it comes twice. corrupt: one of its bytes is another. truncate: its
    last frame is shorter. delay: it, and what follows it, comes `delay_s` later. cut: it is lost
    and the connection ends.
    """

    kind: Kind
    delay_s: float = 0.0


Plan = Callable[[Direction, int], Fault | None]
"""(direction, index of the message in that direction from 0) -> what happens to it."""


class Script:
    """Faults at given messages: `Script({("up", 3): Fault("drop")})`."""

    def __init__(self, faults: Mapping[tuple[Direction, int], Fault]) -> None:
        self._faults = faults

    def __call__(self, direction: Direction, index: int) -> Fault | None:
        return self._faults.get((direction, index))


class Chances:
    """Faults with given probabilities a message, which sum to at most 1. A delay is uniform up to
    `delay_s`.
    """

    def __init__(
        self, rng: np.random.Generator, chances: Mapping[Kind, float], delay_s: float = 1.0
    ) -> None:
        self._rng, self._chances, self._delay_s = rng, chances, delay_s

    def __call__(self, direction: Direction, index: int) -> Fault | None:
        # Two draws a message, used or not: what strikes one does not shift the luck of the next.
        at, delay_s = self._rng.random(), self._rng.random() * self._delay_s
        for kind, p in self._chances.items():
            if at < p:
                return Fault(kind, delay_s if kind == "delay" else 0.0)
            at -= p
        return None


class FaultyServer:
    """`inner` with faults on all its connections; "up" is what it receives. `now` in seconds; `rng`
    says which byte.
    """

    def __init__(
        self,
        inner: ServerTransport,
        plan: Plan,
        now: Callable[[], float],
        rng: np.random.Generator,
    ) -> None:
        self.inner = inner
        self._plan, self._now, self._rng = plan, now, rng
        self._seen: dict[Direction, int] = {"up": 0, "down": 0}
        # Messages on hold, and until when, in the order in which they came.
        self._held: dict[tuple[Direction, bytes], deque[tuple[float, Received]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = [*self._ready("up")]
        dues = [held[0][0] - self._now() for held in self._held.values() if held]
        for event in self.inner.poll(0.0 if events else max(0.0, min([timeout_s, *dues]))):
            if isinstance(event, Received):
                events += self._passing("up", event)
                continue
            if isinstance(event, Closed):
                self._held.pop(("up", event.conn), None)
                self._held.pop(("down", event.conn), None)
            events.append(event)
        # Not before: the connection for which it was meant might have ended.
        for message in self._ready("down"):
            self.inner.send(message.conn, message.frames)
        return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        stands = True
        for message in self._passing("down", Received(conn, tuple(frames))):
            stands = self.inner.send(conn, message.frames) and stands
        return stands

    def drop(self, conn: bytes, hang_up: bool = False) -> None:
        self._held.pop(("down", conn), None)
        self.inner.drop(conn, hang_up)

    def _passing(self, direction: Direction, message: Received) -> list[Received]:
        """What of a message passes now."""
        index = self._seen[direction]
        self._seen[direction] += 1
        fault = self._plan(direction, index) or Fault("delay")  # for no time
        if fault.kind == "cut":
            self.inner.drop(message.conn, hang_up=True)
            return []
        passing = self._mangled(fault, message)
        held = self._held.setdefault((direction, message.conn), deque())
        if not fault.delay_s and not held:
            return passing
        due = self._now() + fault.delay_s
        if held:
            due = max(due, held[-1][0])
        held.extend((due, one) for one in passing)
        return []

    def _mangled(self, fault: Fault, message: Received) -> list[Received]:
        frames = list(message.frames)
        if fault.kind == "drop":
            return []
        if fault.kind == "duplicate":
            return [message, message]
        if fault.kind == "corrupt":
            _corrupt(frames, self._rng)
        elif fault.kind == "truncate" and len(frames[-1]):
            frames[-1] = bytes(frames[-1])[: int(self._rng.integers(len(frames[-1])))]
        return [Received(message.conn, tuple(frames), message.user)]

    def _ready(self, direction: Direction) -> list[Received]:
        found: list[Received] = []
        for (where, _), held in self._held.items():
            while where == direction and held and held[0][0] <= self._now():
                found.append(held.popleft()[1])
        return found


def _corrupt(frames: list[Frame], rng: np.random.Generator) -> None:
    """Changes one byte of all, each as likely as the others, for another value."""
    total = sum(map(len, frames))
    at, by = int(rng.integers(total)), int(rng.integers(1, 256))
    for i, frame in enumerate(frames):
        if at < len(frame):
            damaged = bytearray(frame)
            damaged[at] ^= by
            frames[i] = bytes(damaged)
            return
        at -= len(frame)

"""A transport with faults: it loses, doubles, spoils, cuts short, delays messages, and cuts
connections, as planned.

A plan is asked about every message and answers with a fault or None. `Script` strikes at numbered
messages, `Chances` at random ones; both repeat themselves exactly for the same messages in the same
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fednet.errors import ConfigError, unknown
from fednet.transport.base import (
    ClientTransport,
    Closed,
    Event,
    Frame,
    Frames,
    Received,
    ServerTransport,
)
from fednet.transport.shaped import DelayQueue, wait

Direction = Literal["up", "down"]
Kind = Literal["drop", "duplicate", "corrupt", "truncate", "delay", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one message.

    drop: it is lost. duplicate: it comes twice. corrupt: one of its bytes is another. truncate: its
    last frame is shorter. delay: it, and what follows it, comes `delay_s` later. cut: it is lost
    and the connection ends.
    """

    kind: Kind
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(unknown("fault", self.kind, KINDS))


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has happened, for the records. index: which message in this direction of this
    transport, from 0.
    """

    fault: Fault
    direction: Direction
    conn: bytes
    index: int
    nbytes: int


Plan = Callable[[Direction, int, Frames], Fault | None]
"""(direction, index of the message in that direction from 0, its frames) -> what happens to it."""


class Script:
    """Faults at given messages: `Script({("up", 3): Fault("drop")})`. Each strikes once."""

    def __init__(self, faults: Mapping[tuple[Direction, int], Fault]) -> None:
        self._faults = dict(faults)

    def __call__(self, direction: Direction, index: int, frames: Frames) -> Fault | None:
        return self._faults.pop((direction, index), None)


class Chances:
    """Faults with given probabilities a message, which sum to at most 1. A delay is uniform up to
    `delay_s`.
    """

    def __init__(
        self, rng: np.random.Generator, chances: Mapping[str, float], delay_s: float = 1.0
    ) -> None:
        for kind, p in chances.items():
            if kind not in KINDS:
                raise ConfigError(f"faults.random: {unknown('fault', kind, KINDS)}")
            if not 0 <= p <= 1:
                raise ConfigError(
                    f"faults.random.{kind}: expected a probability from 0 to 1, got {p}."
                )
        if sum(chances.values()) > 1:
            raise ConfigError(
                f"faults.random: the probabilities sum to {sum(chances.values()):g}, expected at "
                f"most 1."
            )
        self._rng, self._chances, self._delay_s = rng, chances, delay_s

    def __call__(self, direction: Direction, index: int, frames: Frames) -> Fault | None:
        # Two draws a message, used or not: what strikes one does not shift the luck of the next.
        at, delay_s = self._rng.random(), self._rng.random() * self._delay_s
        for kind in KINDS:
            p = self._chances.get(kind, 0.0)
            if at < p:
                return Fault(kind, delay_s if kind == "delay" else 0.0)
            at -= p
        return None


class _Faults:
    """The faults of one transport, and the messages on hold."""

    def __init__(
        self,
        plan: Plan,
        now: Callable[[], float],
        rng: np.random.Generator,
        struck: Callable[[Struck], None] | None,
    ) -> None:
        self._plan, self.now, self._rng, self._struck = plan, now, rng, struck
        self._seen: dict[Direction, int] = {"up": 0, "down": 0}
        self.queues: dict[tuple[Direction, bytes], DelayQueue[Received]] = {}

    def strike(
        self, direction: Direction, conn: bytes, message: Received
    ) -> tuple[list[Received], bool]:
        """What of it passes now, and whether the connection is cut."""
        index = self._seen[direction]
        self._seen[direction] += 1
        fault = self._plan(direction, index, message.frames)
        waiting = self.queues.setdefault((direction, conn), DelayQueue())
        passing, delay_s = [message], 0.0
        if fault is not None:
            if self._struck is not None:
                self._struck(Struck(fault, direction, conn, index, sum(map(len, message.frames))))
            if fault.kind == "cut":
                return [], True
            passing, delay_s = self._mangled(fault, message), fault.delay_s
        if not delay_s and not len(waiting):
            return passing, False
        for held in passing:
            waiting.hold(self.now() + delay_s, held)
        return [], False

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

    def ready(self, direction: Direction) -> list[tuple[bytes, Received]]:
        return [
            (conn, message)
            for (where, conn), waiting in self.queues.items()
            if where == direction
            for message in waiting.ready(self.now())
        ]

    def forget(self, conn: bytes) -> None:
        self.queues.pop(("up", conn), None)
        self.queues.pop(("down", conn), None)

    def wait(self, timeout_s: float | None) -> float | None:
        return wait(timeout_s, self.now(), [waiting.due() for waiting in self.queues.values()])


class FaultyClient:
    """`inner` with faults, up and down. `now` in seconds; `rng` says which byte; `struck` is told
    what happened.

    `poll` may return empty before its time is over, when something on hold has left.
    """

    def __init__(
        self,
        inner: ClientTransport,
        plan: Plan,
        now: Callable[[], float],
        rng: np.random.Generator,
        struck: Callable[[Struck], None] | None = None,
    ) -> None:
        self.inner = inner
        self._faults = _Faults(plan, now, rng, struck)
        self._open = False

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def trouble(self) -> str:
        return self.inner.trouble

    def poll(self, timeout_s: float | None) -> list[Event]:
        events: list[Event] = [message for _, message in self._faults.ready("down")]
        for event in self.inner.poll(0.0 if events else self._faults.wait(timeout_s)):
            if isinstance(event, Received):
                passing, cut = self._faults.strike("down", b"", event)
                events += passing
                if cut:
                    self.reconnect()
                continue
            if isinstance(event, Closed):
                self._faults.forget(b"")
            self._open = not isinstance(event, Closed)
            events.append(event)
        self._send_ready()  # not before: the connection for which it was meant might have ended
        return events

    def send(self, frames: Frames) -> bool:
        if not self._open:
            return self.inner.send(frames)
        passing, cut = self._faults.strike("up", b"", Received(b"", tuple(frames)))
        if cut:
            self.reconnect()
        stands = True
        for message in passing:
            stands = self.inner.send(message.frames) and stands
        return stands

    def wake(self) -> None:
        self.inner.wake()

    def reconnect(self, address: str | None = None) -> None:
        self._faults.forget(b"")
        self._open = False
        self.inner.reconnect(address)

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return self.inner.traffic()

    def close(self, linger_s: float = 1.0) -> None:
        self.inner.close(linger_s)

    def _send_ready(self) -> None:
        for _, message in self._faults.ready("up"):
            self.inner.send(message.frames)


class FaultyServer:
    """`inner` with faults on all its connections; "up" is what it receives. See `FaultyClient`."""

    def __init__(
        self,
        inner: ServerTransport,
        plan: Plan,
        now: Callable[[], float],
        rng: np.random.Generator,
        struck: Callable[[Struck], None] | None = None,
    ) -> None:
        self.inner = inner
        self._faults = _Faults(plan, now, rng, struck)

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def keyring(self) -> Any:
        """Of the ZeroMQ transport within; None for one that has no keys."""
        return getattr(self.inner, "keyring", None)

    def listen(self) -> None:
        self.inner.listen()

    def poll(self, timeout_s: float | None) -> list[Event]:
        events: list[Event] = [message for _, message in self._faults.ready("up")]
        for event in self.inner.poll(0.0 if events else self._faults.wait(timeout_s)):
            if isinstance(event, Received):
                passing, cut = self._faults.strike("up", event.conn, event)
                events += passing
                if cut:
                    self.inner.drop(event.conn, hang_up=True)
                continue
            if isinstance(event, Closed):
                self._faults.forget(event.conn)
            events.append(event)
        self._send_ready()  # not before: the connection for which it was meant might have ended
        return events

    def send(self, conn: bytes, frames: Frames) -> bool:
        passing, cut = self._faults.strike("down", conn, Received(conn, tuple(frames)))
        if cut:
            self.inner.drop(conn, hang_up=True)
        stands = True
        for message in passing:
            stands = self.inner.send(conn, message.frames) and stands
        return stands

    def wake(self) -> None:
        self.inner.wake()

    def drop(self, conn: bytes, hang_up: bool = False) -> None:
        self._faults.queues.pop(("down", conn), None)
        self.inner.drop(conn, hang_up)

    def peer(self, conn: bytes) -> str:
        return self.inner.peer(conn)

    def vouch(self, conn: bytes, token: bytes = b"") -> None:
        self.inner.vouch(conn)

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return self.inner.traffic()

    def close(self, linger_s: float = 1.0) -> None:
        self.inner.close(linger_s)

    def _send_ready(self) -> None:
        for conn, message in self._faults.ready("down"):
            self.inner.send(conn, message.frames)


def _corrupt(frames: list[Frame], rng: np.random.Generator) -> None:
    """Changes one byte of all, each as likely as the others, for another value."""
    total = sum(map(len, frames))
    if not total:
        return
    at, by = int(rng.integers(total)), int(rng.integers(1, 256))
    for i, frame in enumerate(frames):
        if at < len(frame):
            spoilt = bytearray(frame)
            spoilt[at] ^= by
            frames[i] = bytes(spoilt)
            return
        at -= len(frame)

"""A slow link in place of a fast one: bandwidth and latency, without ever blocking.

A message leaves the sender when those before it have, takes its bytes over the bandwidth, then
travels for the latency; it is on hold here for that long. `LinkShape.time` computes the same for
simulated time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from fednet.transport.base import ClientTransport, Closed, Event, Frames, Opened, Received
from fednet.transport.framing import framing
from fednet.world.rates import Rates

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """A client's connection. Megabits (10^6) a second, None for unlimited; milliseconds one way.
    rates: down and up, of each second, in place of those that stay the same.
    """

    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_ms: float = 0.0
    rates: tuple[Rates, Rates] | None = None

    def busy(self, nbytes: int, direction: Direction, at: float = 0.0) -> float:
        """Seconds for which `nbytes` occupy the link: the next message waits for so long. at: the
        second at which the first byte leaves, for a rate that changes.
        """
        if self.rates is not None:
            return self.rates[direction == "up"].seconds(nbytes, at)
        rate = self.up_mbps if direction == "up" else self.down_mbps
        return 0.0 if rate is None else nbytes * 8 / (rate * 1e6)

    def time(self, nbytes: int, direction: Direction, at: float = 0.0) -> float:
        """Seconds from the first byte's leaving to the last one's arrival, on an idle link."""
        return self.busy(nbytes, direction, at) + self.latency_ms / 1e3

    def bytes_leaving(self, direction: Direction, at: float, seconds: float) -> float:
        """Bytes that leave from second `at` on within so many seconds; infinite without a limit."""
        if seconds <= 0:
            return 0.0
        if self.rates is not None:
            rates = self.rates[direction == "up"]
            return rates.bytes(at + seconds) - rates.bytes(at)
        rate = self.up_mbps if direction == "up" else self.down_mbps
        return math.inf if rate is None else seconds * rate * 1e6 / 8


@dataclass(slots=True)
class _Direction:
    """One direction of one link. held: messages on hold, and until when, in the order in which they
    came: a connection delays, it does not reorder.
    """

    free_at: float = 0.0
    held: deque[tuple[float, Received]] = field(default_factory=deque)


class ShapedClient:
    """`inner` over a slow link, in both directions.

    `link_of(frames)` names the link of each message, and gives it, where one connection carries
    several clients that have one each. `curve` tells which framing to reckon with. `now` in
    seconds. `poll` may return empty before its time is over, when something on hold has left.
    """

    def __init__(
        self,
        inner: ClientTransport,
        now: Callable[[], float],
        link_of: Callable[[Frames], tuple[Hashable, LinkShape]],
        *,
        curve: bool = False,
        is_open: bool = False,
    ) -> None:
        self.inner = inner
        self._link_of = link_of
        self._now = now
        self._curve = curve
        self._began = now()  # second 0 of rates that change
        self._directions: dict[tuple[Direction, Hashable], _Direction] = {}
        self._open = is_open

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def trouble(self) -> str:
        return self.inner.trouble

    def poll(self, timeout_s: float | None) -> list[Event]:
        events: list[Event] = list(self._ready("down", self._now()))
        # No longer than until the next message is due.
        waits = [one.held[0][0] - self._now() for one in self._directions.values() if one.held]
        if timeout_s is not None:
            waits.append(timeout_s)
        wait = max(0.0, min(waits)) if waits else None
        for event in self.inner.poll(0.0 if events else wait):
            if isinstance(event, Received):
                self._hold("down", event)
                continue
            if isinstance(event, Closed):
                self._directions.clear()  # what was under way is lost with the connection
            self._open = isinstance(event, Opened)
            events.append(event)
        # Not before: the connection for which it was meant might have ended.
        self._send_ready(self._now())
        return [*events, *self._ready("down", self._now())]

    def send(self, frames: Frames) -> bool:
        if not self._open:
            return False
        self._hold("up", Received(b"", tuple(frames)))
        self._send_ready(self._now())
        return True

    def wake(self) -> None:
        self.inner.wake()

    def reconnect(self, address: str | None = None) -> None:
        self._directions.clear()
        self._open = False
        self.inner.reconnect(address)

    def bytes_read(self) -> int:
        return self.inner.bytes_read()

    def traffic(self) -> dict[bytes | int, tuple[int, int]]:
        return self.inner.traffic()

    def close(self, linger_s: float = 1.0) -> None:
        """What is on hold leaves at once: a run that is over need not wait for an emulated link."""
        self._send_ready(math.inf)
        self.inner.close(linger_s)

    def _hold(self, direction: Direction, message: Received) -> None:
        name, link = self._link_of(message.frames)
        one = self._directions.setdefault((direction, name), _Direction())
        nbytes = framing(*map(len, message.frames), curve=self._curve)
        begins = max(self._now(), one.free_at)
        one.free_at = begins + link.busy(nbytes, direction, begins - self._began)
        one.held.append((one.free_at + link.latency_ms / 1e3, message))

    def _ready(self, direction: Direction, by: float) -> list[Received]:
        """Takes out what is due by then."""
        due = []
        for (where, _), one in self._directions.items():
            while where == direction and one.held and one.held[0][0] <= by:
                due.append(one.held.popleft()[1])
        return due

    def _send_ready(self, by: float) -> None:
        for message in self._ready("up", by):
            self.inner.send(message.frames)

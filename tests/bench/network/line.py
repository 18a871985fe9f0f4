"""One direction of a bad link, packet by packet: when each arrives, if it does. No clock, no
device.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import numpy as np

QUEUE_S = 0.5  # of waiting packets, at the rate, before the next one is dropped
LEAST_QUEUE = 32_768  # bytes of them that there is always room for
TCP = 6


@dataclass(frozen=True, slots=True)
class Bad:
    """latency_s: one way; jitter_s: added at random, so that packets overtake one another; loss:
    share of packets; rate: bytes a second, None without limit.
    """

    latency_s: float = 0.0
    loss: float = 0.0
    rate: float | None = None
    jitter_s: float = 0.0


@dataclass(slots=True)
class PacketCounts:
    """How many packets came to the link, and how many bytes of TCP's payload were in them."""

    packets: int = 0
    payload: int = 0
    lost: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Line:
    bad: Bad
    rng: np.random.Generator
    counts: PacketCounts = field(default_factory=PacketCounts)
    _free_at: float = 0.0
    _order: int = 0
    _held: list[tuple[float, int, bytes]] = field(default_factory=list)

    def offer(self, packet: bytes, now: float) -> None:
        """A packet comes to the link."""
        bad, counts = self.bad, self.counts
        counts.packets += 1
        counts.payload += payload(packet)
        if bad.rate is not None:
            waiting = max(0.0, self._free_at - now) * bad.rate
            if waiting + len(packet) > max(LEAST_QUEUE, QUEUE_S * bad.rate):
                counts.dropped += 1
                return
            self._free_at = max(now, self._free_at) + len(packet) / bad.rate
        if bad.loss and self.rng.random() < bad.loss:
            counts.lost += 1
            return
        jitter = bad.jitter_s * float(self.rng.random()) if bad.jitter_s else 0.0
        self._order += 1
        due = max(now, self._free_at) + bad.latency_s + jitter
        heapq.heappush(self._held, (due, self._order, packet))

    def ready(self, now: float) -> list[bytes]:
        """What has arrived."""
        out = []
        while self._held and self._held[0][0] <= now:
            out.append(heapq.heappop(self._held)[2])
        return out

    def due(self) -> float | None:
        return self._held[0][0] if self._held else None


def payload(packet: bytes) -> int:
    """Bytes of TCP's payload in an IPv4 packet; 0 where it is another."""
    if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != TCP:
        return 0
    header = 4 * (packet[0] & 15)
    return max(0, int.from_bytes(packet[2:4], "big") - header - 4 * (packet[header + 12] >> 4))


def total(lines: Iterable[Line]) -> PacketCounts:
    """The counts of both directions together."""
    counts = [line.counts for line in lines]
    return PacketCounts(*(sum(getattr(c, f.name) for c in counts) for f in fields(PacketCounts)))

"""The virtual clock: nothing sleeps; each message takes its bytes over its client's link, training its steps.

All clients of a phase start together, so who is late depends on the configuration alone and is the same in every
repetition.
"""

from __future__ import annotations

from collections.abc import Mapping

from fednet import seeds
from fednet.config import Config


class VirtualClock:
    def __init__(self, config: Config) -> None:
        self.config = config

    def seconds(self, client: int, round: int, steps: int, down: int, up: int, slow: float = 1.0, delay: float = 0.0) -> float:
        """Seconds from the hand-out to the whole reply, for one client in one phase. down, up: bytes of the payloads;
        slow, delay: planned faults."""
        link = self.config.link.of(client)
        total = steps * slow * (link.step_ms or 0.0) / 1e3 + delay
        total += down * 8 / (link.down_mbps * 1e6) if link.down_mbps else 0.0
        total += up * 8 / (link.up_mbps * 1e6) if link.up_mbps else 0.0
        total += 2 * (link.latency_ms or 0.0) / 1e3
        if link.jitter_ms:
            draw = seeds.rng(self.config.seed, "jitter", round, client)
            total += float(draw.random() + draw.random()) * link.jitter_ms / 1e3
        return total

    def late(self, times: Mapping[int, float]) -> dict[int, str]:
        """Who does not count: beyond the deadline, or not among the first k (ties to the smaller id)."""
        section = self.config.round
        late = {c: "deadline" for c, t in times.items() if section.deadline is not None and t > section.deadline}
        if section.first is not None:
            order = sorted((c for c in times if c not in late), key=lambda c: (times[c], c))
            late |= dict.fromkeys(order[section.first:], f"not among the first {section.first}")
        return late

    def span(self, times: Mapping[int, float], lost: bool = False) -> float:
        """How long the phase took: until the last that counts, or until the deadline if somebody missed it; a client
        that was lost is awaited until the deadline, or for as long as a lost one may take to come back."""
        section, late = self.config.round, self.late(times)
        last = max((t for c, t in times.items() if c not in late), default=0.0)
        if section.first is not None and len(times) - len(late) >= section.first:
            return last
        if section.deadline is not None and "deadline" in late.values():
            return section.deadline
        patience = [s for s in (section.deadline, section.lost.closed) if s is not None]
        return max(last, min(patience)) if lost and patience else last

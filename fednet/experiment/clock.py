"""The virtual clock: nothing sleeps; each message takes its bytes over its client's link, training
its steps.

All clients of a phase start together, so who is late depends on the configuration alone and is the
same in every repetition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fednet import seeds
from fednet.config import Config
from fednet.experiment import links
from fednet.transport.framing import framing
from fednet.wire import messages as m


class VirtualClock:
    def __init__(self, config: Config) -> None:
        self.config = config
        self._links = {
            c: (links.shape(config, c), float(links.of(config, c).step_ms or 0.0))
            for c in range(config.clients)
        }

    def seconds(
        self,
        client: int,
        round: int,
        steps: int,
        down: int,
        up: int,
        slow: float = 1.0,
        delay: float = 0.0,
    ) -> dict[str, float]:
        """From the hand-out to the whole reply, for one client in one phase: sending, both ways,
        and training. down, up: all bytes of the messages, as the ledger has them; slow, delay:
        planned faults.
        """
        link, step_ms = self._links[client]
        draw = seeds.rng(
            self.config.seed if self.config.link.seed is None else self.config.link.seed,
            "jitter",
            round,
            client,
        )
        return {
            "sending": link.time(down, "down", draw) + link.time(up, "up", draw),
            "training": steps * slow * step_ms / 1e3 + delay,
        }

    def late(self, times: Mapping[int, float]) -> dict[int, str]:
        """Who does not count: beyond the deadline, or not among the first k (ties to the smaller
        id).
        """
        section = self.config.round
        late = {
            c: "deadline"
            for c, t in times.items()
            if section.deadline is not None and t > section.deadline
        }
        if section.first is not None:
            order = sorted((c for c in times if c not in late), key=lambda c: (times[c], c))
            late |= dict.fromkeys(order[section.first :], f"not among the first {section.first}")
        return late

    def span(self, times: Mapping[int, float], lost: bool = False) -> float:
        """How long the phase took: until the last that counts, or until the deadline if somebody
        missed it; a client that was lost is awaited until the deadline, or for as long as a lost
        one may take to come back.
        """
        section, late = self.config.round, self.late(times)
        last = max((t for c, t in times.items() if c not in late), default=0.0)
        if section.first is not None and len(times) - len(late) >= section.first:
            return last
        if section.deadline is not None and "deadline" in late.values():
            return section.deadline
        patience = [s for s in (section.deadline, section.lost.closed) if s is not None]
        return max(last, min(patience)) if lost and patience else last

    def split(
        self, parts: Mapping[int, Mapping[str, float]], times: Mapping[int, float], span: float
    ) -> dict[str, float]:
        """What a phase's span went into: training and sending of the last client that counts; the
        rest is waiting.
        """
        late = self.late(times)
        last = max((c for c in times if c not in late), key=lambda c: (times[c], -c), default=None)
        found = dict(parts[last]) if last is not None else {"sending": 0.0, "training": 0.0}
        return {**found, "waiting": max(0.0, span - sum(found.values()))}


def crossing(message: m.Task | m.Reply) -> int:
    """All bytes of a payload on its way, as the ledger bills them without CURVE: the header, and
    the body beside it or in parts with a header each. Other traffic, such as the pulls that ask for
    the parts, is small and takes no time here.
    """
    total = framing(len(m.encode(message)))
    for index in range(-(-message.size // m.PART)):
        size = min(m.PART, message.size - index * m.PART)
        total += framing(size)
        if message.size > m.PART:
            total += framing(
                len(
                    m.encode(m.Part(run=message.run, inc=message.inc, key=message.key, index=index))
                )
            )
    return total


def task_bytes(
    run: str,
    key: m.Key,
    form: Sequence[m.Field],
    size: int,
    check: bytes,
    start: str,
    state: str,
    keep: str,
    enrol: int,
    judge: bool,
) -> int:
    """Of a task as the first server of the run hands it out for the first time."""
    return crossing(
        m.Task(
            run=run,
            inc=1,
            key=key,
            form=list(form),
            size=size,
            check=check,
            start=start,
            state=state,
            keep=keep,
            enrol=enrol,
            judge=judge,
        )
    )

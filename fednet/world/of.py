"""The world that a configuration names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fednet.config import Config
from fednet.errors import ConfigError
from fednet.world import models, reading, shipped
from fednet.world.pace import Pace
from fednet.world.presence import Presence, joined
from fednet.world.rates import Rates

AVAILABILITY = ("phones",)
DEVICES = ("phones",)


@dataclass(frozen=True, slots=True)
class World:
    """What the traces say, by client: presence, None where all are always there; pace, None where
    no trace says how long a step takes. start: the second of the trace at which the run begins.
    """

    presence: tuple[Presence, ...] | None = None
    pace: tuple[Pace, ...] | None = None
    start: float = 0.0

    def here(self, t: float) -> list[bool] | None:
        """Who is there at second t of the run; None: all."""
        if self.presence is None:
            return None
        return [p.until(t + self.start) is not None for p in self.presence]

    def until(self, client: int, t: float) -> float | None:
        """The second of the run at which a client that is there at t leaves (infinite: never); None
        where it is not there.
        """
        if self.presence is None:
            return math.inf
        end = self.presence[client].until(t + self.start)
        return None if end is None else end - self.start

    def comes(self, client: int, t: float) -> float:
        """The first second of the run from t on at which it is there; infinite: never again."""
        if self.presence is None or self.until(client, t) is not None:
            return t
        at = self.presence[client].next(t + self.start) - self.start
        while math.isfinite(at) and self.until(client, at) is None:
            at = math.nextafter(at, math.inf)  # of a difference, the last bit
        return at

    def when(self, wanted: int, t: float) -> float:
        """The first second of the run from t on at which so many clients are there; infinite where
        so many never are.
        """
        if self.presence is None or sum(self.here(t) or ()) >= wanted:
            return t
        at = t
        while math.isfinite(at := self._arrival(at)):
            if sum(self.here(at) or ()) >= wanted:
                return at
            if at > t + self._longest():
                return math.inf
        return at

    def _arrival(self, t: float) -> float:
        """The first arrival after t of someone who is not there at t."""
        found = math.inf
        for p in self.presence or ():
            end = p.until(t + self.start)
            gone = t + self.start if end is None else end
            if math.isfinite(gone):
                found = min(found, p.next(gone) - self.start)
        return found

    def _longest(self) -> float:
        """After so long all that can be met was met, near enough: every trace came four times."""
        ends = [p.period or (p.spells or ((0, 0),))[-1][1] for p in self.presence or ()]
        return 4 * max((e for e in ends if math.isfinite(e)), default=0.0)


def of(config: Config) -> World:
    """Raises ConfigError for a trace that is none."""
    section = config.availability
    return World(
        presence=None if section.trace is None else tuple(_presence(config)),
        pace=None if config.devices.trace is None else tuple(_paces(config)),
        start=section.start,
    )


def _presence(config: Config) -> list[Presence]:
    section, name = config.availability, str(config.availability.trace)
    if name in AVAILABILITY:
        return shipped.assigned(shipped.phones(), config.clients, config.seed)
    text = reading.text(name, "availability.trace", AVAILABILITY)
    found = reading.availability(text, name, config.clients)
    if isinstance(found, tuple):  # devices of no number of ours
        return shipped.assigned(found, config.clients, config.seed)
    if section.repeat is None:
        return found
    late = max((p.spells[-1][1] for p in found if p.spells), default=0.0)
    if late > section.repeat:
        raise ConfigError(
            f"availability.repeat: {section.repeat:g} s is before the end of {name}, {late:g} s."
        )
    return [Presence(joined(p.spells), section.repeat) for p in found]


def _paces(config: Config) -> Iterator[Pace]:
    name = str(config.devices.trace)
    if name in DEVICES:
        yield from (models.pace(config.seed, c) for c in range(config.clients))
        return
    text = reading.text(name, "devices.trace", DEVICES)
    yield from reading.paces(text, name, config.clients, config.train.batch_size)


def links(config: Config, client: int) -> tuple[Rates, Rates] | None:
    """The rates of a client's link over time, (down, up); None where `link.trace` is not given."""
    given = config.link.trace
    if given is None:
        return None
    seed = config.seed if config.link.seed is None else config.link.seed
    if isinstance(given, str) and given in models.LINKS:
        return models.link(given, seed, client)
    paths = (given, given) if isinstance(given, str) else given
    return reading.link(paths, seed, client, config.clients)


def kind(trace: str) -> str:
    """What a trace is of: availability, devices or link; of a file, by its first line."""
    if trace in models.LINKS:
        return "link"
    if trace in AVAILABILITY:
        return "availability"
    known = (*AVAILABILITY, *models.LINKS)
    head = next((s for s in reading.text(trace, "world", known).splitlines() if s.strip()), "")
    if head.lstrip()[:1] == "{":
        text = reading.text(trace, "world", known)
        return "devices" if '"computation"' in text else "availability"
    if "," not in head or "mbps" in head:
        return "link"
    return "devices" if "step_ms" in head else "availability"


def clients(trace: str, kind: str) -> int:
    """How many clients the trace tells of; 100 for one that is drawn."""
    if trace in AVAILABILITY:
        return len(shipped.phones())
    if trace in models.LINKS:
        return 100
    return reading.clients(reading.text(trace, "world", AVAILABILITY), trace)

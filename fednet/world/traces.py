"""The traces that a configuration names, and the clients that never train."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fednet import seeds
from fednet.config import Config
from fednet.world import reading, shipped
from fednet.world.presence import Presence
from fednet.world.rates import Rates

AVAILABILITY = ("phones",)
DEVICES = ("phones",)


@dataclass(frozen=True, slots=True)
class World:
    """A run's traces, by client. presence: None if all clients are always available.
    step_s: seconds of a training step; None if no trace says how long it takes.
    """

    presence: tuple[Presence, ...] | None = None
    step_s: tuple[float, ...] | None = None

    def here(self, t: float) -> list[bool] | None:
        """Returns which clients are available at second t of the run; None: all."""
        if self.presence is None:
            return None
        return [p.until(t) is not None for p in self.presence]

    def until(self, client: int, t: float) -> float | None:
        """Returns the second of the run at which a client that is available at t leaves (infinite:
        never); None if it is not available.
        """
        if self.presence is None:
            return math.inf
        return self.presence[client].until(t)

    def comes(self, client: int, t: float) -> float:
        """Returns the first second of the run from t on at which it is available; infinite: never
        again.
        """
        return t if self.presence is None else self.presence[client].next(t)

    def when(self, wanted: int, t: float) -> float:
        """Returns the first second of the run from t on at which so many clients are available;
        infinite if there never are so many.
        """
        if self.presence is None or sum(self.here(t) or ()) >= wanted:
            return t
        # When every trace has repeated four times: what has not occurred by then hardly will.
        ends = [p.period or (p.spells or ((0, 0),))[-1][1] for p in self.presence]
        last = t + 4 * max((e for e in ends if math.isfinite(e)), default=0.0)
        at = t
        while math.isfinite(at := self._next_arrival(at)):
            if sum(self.here(at) or ()) >= wanted:
                return at
            if at > last:
                return math.inf
        return at

    def _next_arrival(self, t: float) -> float:
        """Returns the first arrival after t of a client that is not available at t, or leaves."""
        found = math.inf
        for p in self.presence or ():
            end = p.until(t)
            gone = t if end is None else end
            if math.isfinite(gone):
                found = min(found, p.next(gone))
        return found


def of(config: Config) -> World:
    """Returns a run's traces. Raises ConfigError for one that cannot be used."""
    seed = config.seed
    clients = range(config.clients)
    presence: tuple[Presence, ...] | None = None
    if (name := config.availability.trace) is not None:
        found: Sequence[Presence]
        if name in AVAILABILITY:
            found = shipped.phones()
        else:
            text = reading.text(name, "availability.trace", AVAILABILITY)
            found = reading.availability(text, name, config.clients)
        if isinstance(found, tuple):  # devices with ids of their own
            found = shipped.assign_traces(found, config.clients, seed)
        # A client that is held out is never available to train.
        left_out = held_out(config)
        presence = tuple(Presence(()) if c in left_out else found[c] for c in clients)
    step_s: tuple[float, ...] | None = None
    if (name := config.devices.trace) in DEVICES:
        step_s = tuple(shipped.step_s(seed, c) for c in clients)
    elif name is not None:
        text = reading.text(name, "devices.trace", DEVICES)
        batches = [config.train_of(c).batch_size for c in clients]
        step_s = tuple(reading.steps_s(text, name, batches))
    return World(presence, step_s)


def links(config: Config, client: int) -> tuple[Rates, Rates] | None:
    """Returns the rates (down, up) of a client's link; None without `link.trace`."""
    given = config.link.trace
    if given is None:
        return None
    if isinstance(given, str) and given in shipped.LINKS:
        return shipped.link(given, config.seed, client)
    paths = (given, given) if isinstance(given, str) else given
    return reading.link(paths, config.seed, client, config.clients)


def kind(trace: str) -> str:
    """Returns what a trace is of: availability, devices or link; of a file, by its first line."""
    if trace in shipped.LINKS:
        return "link"
    if trace in AVAILABILITY:
        return "availability"
    text = reading.text(trace, "world", (*AVAILABILITY, *shipped.LINKS))
    if reading.is_json(text):
        return "devices" if '"computation"' in text else "availability"
    head = next((line for line in text.splitlines() if line.strip()), "")
    if "," not in head or "mbps" in head:
        return "link"
    return "devices" if "step_ms" in head else "availability"


def clients(trace: str) -> int:
    """Returns how many clients the trace has; 100 for one that is drawn."""
    if trace in AVAILABILITY:
        return len(shipped.phones())
    if trace in shipped.LINKS:
        return 100
    return reading.clients(reading.text(trace, "world", AVAILABILITY), trace)


# -- clients that never train and only evaluate (`evaluate.held_out`) ------------------------------
@functools.cache
def _divide_held_out(
    seed: int, clients: int, training: int
) -> tuple[frozenset[int], tuple[int, ...]]:
    drawn = seeds.rng(seed, "held_out").choice(clients, clients - training, replace=False)
    left_out = frozenset(int(client) for client in drawn)
    return left_out, tuple(client for client in range(clients) if client not in left_out)


def held_out(config: Config) -> frozenset[int]:
    """Returns the clients of a run that never train, drawn from its seed."""
    return _divide_held_out(config.seed, config.clients, config.training_clients)[0]


def training(config: Config) -> tuple[int, ...]:
    """Returns the clients that may train, ascending."""
    return _divide_held_out(config.seed, config.clients, config.training_clients)[1]

"""The traces that fednet has. `data/SOURCES.md` says where the measurements come from.

    phones  availability: 710 phones, one to ten days each. A phone is available while it is locked,
            charging and on WiFi
            devices: a training step of a ResNet on about 950 phone models: lognormal, median
            172 ms, sigma 0.7 (5th and 95th percentile 59 and 572 ms), drawn once a client
    wifi    the links of 19 phones, mean and deviation up and down, drawn once a client; each second
            normal about the mean, cut off at a tenth of it
    lte, umts, evdo
            cellular links while driving, second by second: the logarithm of the rate as an
            autoregression of order one, capped, with outages of lognormal length

Only the phones' availability is a copy of measurements, in `data/phones.bin`: compressed by zlib,
whole numbers of seven bits a byte, the lowest first: how many phones; for each one the days that
its trace lasts, the second of the day at which it begins, how many spells it has, and for each
spell the seconds from the end of the last one and its length. All others are models fitted to
measurements.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fednet import seeds
from fednet.world.presence import Presence, cyclic
from fednet.world.rates import Rates

ABOUT = {
    "phones": "when 710 phones are available, over one to ten days; of devices: their speed",
    "wifi": "links of devices on WiFi",
    "lte": "cellular links while driving, LTE",
    "umts": "cellular links while driving, UMTS",
    "evdo": "cellular links while driving, EV-DO",
}

FOLDER = Path(__file__).with_name("data")
DAY = 86_400


# -- availability ----------------------------------------------------------------------------------
@functools.cache
def phones() -> tuple[Presence, ...]:
    """Returns the phones' availability. Second 0 is midnight; each trace repeats after its days."""
    numbers = _numbers(zlib.decompress((FOLDER / "phones.bin").read_bytes()))
    found = []
    for _ in range(next(numbers)):
        days = next(numbers)
        at = next(numbers)
        count = next(numbers)
        spells = []
        for _ in range(count):
            start = at + next(numbers)
            at = start + next(numbers)
            spells.append((float(start), float(at)))
        found.append(cyclic(spells, float(days * DAY)))
    return tuple(found)


def _numbers(packed: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0


def assign_traces(traces: tuple[Presence, ...], clients: int, seed: int) -> list[Presence]:
    """Draws a trace for each client without replacement. If there are more clients than traces,
    all are drawn again, each shifted by a drawn number of days.
    """
    rng = seeds.rng(seed, "world/presence")
    out: list[Presence] = []
    while len(out) < clients:
        again = bool(out)
        for number in rng.permutation(len(traces)):
            trace = traces[int(number)]
            days = int(rng.integers(1, 7)) if again else 0
            if again and trace.period is not None:
                shift = days * DAY
                spells = [(start + shift, end + shift) for start, end in trace.spells]
                trace = cyclic(spells, trace.period)
            out.append(trace)
    return out[:clients]


# -- devices and links -----------------------------------------------------------------------------
SECONDS = 900  # of a drawn link, which then repeats
STEP_MEDIAN_S = 0.172
STEP_SIGMA = 0.7


@dataclass(frozen=True, slots=True)
class Radio:
    """A cellular link in one direction."""

    mu: float
    """Mean of the logarithm of the rate in Mbit/s."""
    sigma: float
    """Deviation of the same."""
    memory: float
    """Correlation of a second with the next."""
    cap: float
    """Mbit/s."""
    outage: float
    """Probability that an outage begins in a second."""
    dead: float
    """Median length of an outage in seconds."""
    spread: float
    """Deviation of the length's logarithm."""


LONGEST_S = 117  # of an outage
# (down, up); fitted to 9, 2 and 2 series.
RADIOS = {
    "lte": (
        Radio(1.66, 1.22, 0.64, 46.1, 0.005, 2.8, 0.88),
        Radio(0.27, 1.24, 0.65, 27.6, 0.015, 2.0, 1.09),
    ),
    "umts": (
        Radio(0.29, 1.23, 0.84, 7.0, 0.026, 1.6, 0.60),
        Radio(-0.21, 0.79, 0.80, 1.5, 0.017, 1.9, 0.71),
    ),
    "evdo": (
        Radio(-1.05, 1.10, 0.85, 2.4, 0.018, 2.8, 0.84),
        Radio(-0.30, 0.76, 0.80, 1.5, 0.012, 2.6, 0.80),
    ),
}
# Of 19 phones, kB/s: mean and deviation of what comes down, and of what goes up.
WIFI = (
    (7491, 3369, 4935, 2767),
    (4055, 1820, 3006, 890),
    (2370, 1388, 2774, 1097),
    (9913, 1551, 6635, 1460),
    (4209, 1482, 2974, 833),
    (3778, 2843, 2632, 1576),
    (3473, 1277, 5141, 2277),
    (4668, 613, 3205, 419),
    (3298, 771, 2337, 1610),
    (4284, 1561, 3642, 1495),
    (3658, 1316, 2547, 1089),
    (7214, 3363, 4040, 2189),
    (8885, 1999, 6279, 489),
    (5125, 2088, 3730, 461),
    (7271, 1914, 5743, 1964),
    (4318, 1265, 3286, 1018),
    (6708, 6738, 665, 312),
    (17333, 11182, 5641, 2550),
    (3177, 1838, 431, 158),
)
LINKS = ("wifi", *RADIOS)


def step_s(seed: int, client: int) -> float:
    """Draws the seconds of a training step on a client's phone."""
    drawn = seeds.rng(seed, "world/step", 0, client).standard_normal()
    return STEP_MEDIAN_S * math.exp(STEP_SIGMA * drawn)


def link(name: str, seed: int, client: int) -> tuple[Rates, Rates]:
    """Draws a client's link. Returns the rates (down, up)."""
    rng = seeds.rng(seed, f"world/{name}", 0, client)
    if name != "wifi":
        down_radio, up_radio = RADIOS[name]
        return _cellular(rng, down_radio), _cellular(rng, up_radio)
    figures = WIFI[int(rng.integers(len(WIFI)))]
    ways = []
    for mean, sigma in (figures[:2], figures[2:]):
        kilobytes = np.maximum(mean / 10, mean + sigma * rng.standard_normal(SECONDS))
        ways.append(Rates(np.round(kilobytes * 8e-3, 3)))
    return ways[0], ways[1]


def _cellular(rng: np.random.Generator, radio: Radio) -> Rates:
    noise = rng.standard_normal(SECONDS) * math.sqrt(1 - radio.memory**2)
    begins = rng.random(SECONDS)
    lengths = np.exp(radio.spread * rng.standard_normal(SECONDS)) * radio.dead
    level = float(rng.standard_normal())
    dead = 0
    out = np.zeros(SECONDS)
    for t in range(SECONDS):
        level = radio.memory * level + float(noise[t])
        if not dead and begins[t] < radio.outage:
            dead = min(LONGEST_S, max(1, round(float(lengths[t]))))
        if dead:
            dead -= 1
        else:
            out[t] = min(radio.cap, math.exp(radio.mu + radio.sigma * level))
    return Rates(np.round(out, 3))

"""Each client's link, by the configuration.

A figure that is to be drawn is drawn once a client, from (seed, figure, client). So it is the same
whatever else the configuration says, in the emulation and on the virtual clock.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable
from typing import Any

from fednet import ids, seeds, world
from fednet.config import ClientLinkSection, Config, parse_distribution
from fednet.transport.base import ClientTransport, Frames
from fednet.transport.shaped import LinkShape, ShapedClient
from fednet.wire.frames import client_of

# Wraps a transport in its clients' emulated links; also gets whether its connection is open.
Shaper = Callable[[ClientTransport, bool], ClientTransport]


PROFILES = {
    # WebPageTest's connectivity profiles of these names (down/up, round trip): 1.6/0.768 Mbit/s,
    # 300 ms;
    "3g": ClientLinkSection(up_mbps=0.768, down_mbps=1.6, latency_ms=150.0),
    # 9/9 Mbit/s, 170 ms;
    "4g": ClientLinkSection(up_mbps=9.0, down_mbps=9.0, latency_ms=85.0),
    # 1.5/0.384 Mbit/s, 50 ms.
    "dsl": ClientLinkSection(up_mbps=0.384, down_mbps=1.5, latency_ms=25.0),
    # Chrome's former "WiFi" preset: 30/15 Mbit/s, 2 ms.
    "wifi": ClientLinkSection(up_mbps=15.0, down_mbps=30.0, latency_ms=1.0),
    # Gigabit Ethernet through one switch.
    "lan": ClientLinkSection(up_mbps=1000.0, down_mbps=1000.0, latency_ms=0.1),
}


def of(config: Config, client: int) -> ClientLinkSection:
    """Returns the link of one client, in figures: its own values, else those of its own profile,
    else those of `link`, else those of the profile there. A rate of None has no limit.
    """
    section = config.link
    profile = section.profile or ""
    if profile.startswith("choice("):
        names = [name.strip() for name in profile.removeprefix("choice(")[:-1].split(",")]
        rng = seeds.rng(config.seed, "link/profile", 0, client)
        profile = names[int(rng.integers(len(names)))]
    own = ids.own(section.per_client, client, config.clients) or ClientLinkSection()
    mine = PROFILES.get(own.profile or "", ClientLinkSection())
    named = PROFILES.get(profile, ClientLinkSection())
    figures = {}
    for key in ("up_mbps", "down_mbps", "latency_ms", "step_ms"):
        general = getattr(section, key)  # a delay of 0 counts as not given
        given = getattr(own, key), getattr(mine, key), general or None, getattr(named, key)
        value = next((value for value in given if value is not None), general)
        if isinstance(value, str):
            rng = seeds.rng(config.seed, f"link/{key}", 0, client)
            name, first, second = parse_distribution(value)
            if name == "lognormal":
                value = first * math.exp(second * rng.standard_normal())
            else:
                value = float(rng.uniform(first, second))
        figures[key] = value
    return ClientLinkSection(**figures)


def shape(config: Config, client: int) -> LinkShape:
    """Returns the link of one client, for the transport."""
    link: Any = of(config, client)  # all numbers: `of` has drawn the figures given as text
    rates = world.links(config, client)
    return LinkShape(link.up_mbps, link.down_mbps, link.latency_ms or 0.0, rates)


def shaper(config: Config) -> Shaper | None:
    """Emulates the links of `config.link`; None if there is nothing to emulate."""
    free = LinkShape()
    if config.link.clock != "real" or all(
        shape(config, client) == free for client in range(config.clients)
    ):
        return None
    return lambda transport, is_open: ShapedClient(
        transport, time.monotonic, chooser(config), curve=config.security.curve, is_open=is_open
    )


def chooser(config: Config) -> Callable[[Frames], tuple[Hashable, LinkShape]]:
    """Finds the link that a message takes: its client's. Messages of a process, such as joins and
    heartbeats, take none.
    """
    shape_of = functools.cache(functools.partial(shape, config))

    def link_of(frames: Frames) -> tuple[Hashable, LinkShape]:
        client = client_of(frames[0])
        return client, LinkShape() if client is None else shape_of(client)

    return link_of

"""Each client's link, by the configuration.

A figure that is to be drawn is drawn once a client, from (seed, figure, client). So it is the same
whatever else the configuration says, in the emulation and on the virtual clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from fednet import seeds, world
from fednet.config import ClientLinkSection, Config, drawn
from fednet.transport.base import ClientTransport, Frames
from fednet.transport.shaped import LinkShape, ShapedClient
from fednet.wire.frames import client_of

# Wraps a transport in its clients' emulated links; also gets whether its connection is open.
Shaper = Callable[[ClientTransport, bool], ClientTransport]


def of(config: Config, client: int) -> ClientLinkSection:
    """Returns the link of one client, in figures."""
    section = config.link
    profile = section.profile
    if profile is not None and profile.startswith("choice("):
        names = [name.strip() for name in profile.removeprefix("choice(")[:-1].split(",")]
        rng = seeds.rng(config.seed, "link/profile", 0, client)
        section = msgspec.structs.replace(section, profile=names[int(rng.integers(len(names)))])
    found = section.of(client, config.clients)
    figures = {}
    for key in found.__struct_fields__:
        value = getattr(found, key)
        if key != "profile" and isinstance(value, str):
            rng = seeds.rng(config.seed, f"link/{key}", 0, client)
            name, first, second = drawn(value)
            if name == "lognormal":
                figures[key] = first * math.exp(second * rng.standard_normal())
            else:
                figures[key] = float(rng.uniform(first, second))
    return msgspec.structs.replace(found, profile=None, **figures)


def shape(config: Config, client: int) -> LinkShape:
    """Returns the link of one client, for the transport."""
    link = of(config, client)
    # They are all numbers, which the types do not say: `of` has drawn those given as text.
    figures: Any = (
        link.up_mbps,
        link.down_mbps,
        link.latency_ms or 0.0,
        world.links(config, client),
    )
    return LinkShape(*figures)


def shaper(config: Config) -> Shaper | None:
    """Emulates the links of `config.link`; None if there is nothing to emulate."""
    free = LinkShape()
    if config.link.clock != "real" or all(
        shape(config, client) == free for client in range(config.clients)
    ):
        return None
    return lambda transport, is_open: ShapedClient(
        transport,
        time.monotonic,
        chooser(config),
        curve=config.security.curve,
        is_open=is_open,
    )


def chooser(config: Config) -> Callable[[Frames], tuple[Hashable, LinkShape]]:
    """Finds the link that a message takes: its client's. Messages of a process, such as joins and
    heartbeats, take none.
    """
    links: dict[int, LinkShape] = {}
    free = LinkShape()

    def link_of(frames: Frames) -> tuple[Hashable, LinkShape]:
        client = client_of(frames[0])
        if client is None:
            return None, free
        if client not in links:
            links[client] = shape(config, client)
        return client, links[client]

    return link_of

"""The clients' surroundings over time: who is available, how fast devices and links are.

A trace is one that fednet has, by NAME (`shipped`), or a user's FILE (`reading`). `of(config)`
returns what a run needs (`traces`). Nothing here reads a clock: the caller passes the second.
"""

from __future__ import annotations

from fednet.world.presence import Presence
from fednet.world.rates import Rates
from fednet.world.traces import World, clients, held_out, kind, links, of, training

__all__ = [
    "Presence",
    "Rates",
    "World",
    "clients",
    "held_out",
    "kind",
    "links",
    "of",
    "training",
]

"""The clients' surroundings over time: who is available, how fast devices and links are.

A trace is one that fednet has, by NAME (`shipped`), or a user's FILE (`reading`). `of(config)`
returns what a run needs (`traces`). Nothing here reads a clock: the caller passes the second.
"""

from __future__ import annotations

from fednet.world.presence import Presence as Presence
from fednet.world.rates import Rates as Rates
from fednet.world.traces import World as World
from fednet.world.traces import clients as clients
from fednet.world.traces import held_out as held_out
from fednet.world.traces import kind as kind
from fednet.world.traces import links as links
from fednet.world.traces import of as of
from fednet.world.traces import training as training

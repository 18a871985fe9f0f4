"""Rules about the world around a run: links, who is there, and planned faults."""

from __future__ import annotations

import math
from typing import get_args

from fednet import ids
from fednet.config.schema import (
    Config,
    FaultKind,
    drawn,
)
from fednet.config.tree import Refuse
from fednet.errors import ConfigError, unknown

NEEDS = {"crash": "rounds", "delay": "seconds", "slow": "factor", "server_crash": "at"}
AVAILABILITY = {"always": (), "bernoulli": ("p",), "markov": ("up", "down"), "trace": ("path",)}


def check(c: Config, refuse: Refuse) -> None:
    """refuse(key, sentence): the error for a key."""
    _links(c, refuse)
    _availability(c, refuse)
    _faults(c, refuse)


def _links(c: Config, refuse: Refuse) -> None:
    for key in ("up_mbps", "down_mbps", "profile") if c.link.trace is not None else ():
        links = {
            "link": c.link,
            **{f"link.per_client.{k}": v for k, v in c.link.per_client.items()},
        }
        for where, link in links.items():
            if getattr(link, key) is not None:
                raise refuse(f"{where}.{key}", "link.trace gives the rates; keep one of them.")
    for pattern in c.link.per_client:
        try:
            ids.parse(pattern, "the clients").resolve(c.clients)
        except ConfigError as wrong:
            said = str(wrong).removeprefix(f"the clients {pattern}: ")
            raise refuse(f"link.per_client.{pattern}", said) from None
    for where, link in (
        ("link", c.link),
        *((f"link.per_client.{k}", v) for k, v in c.link.per_client.items()),
    ):
        for key in ("up_mbps", "down_mbps", "latency_ms", "jitter_ms", "step_ms"):
            figure = getattr(link, key)
            if isinstance(figure, str):
                name, first, second = drawn(figure)
                unbounded = not 0 < first < math.inf or not second < math.inf
                if unbounded or (name == "uniform" and second < first):
                    raise refuse(
                        f"{where}.{key}",
                        f"{figure}: expected a finite median above 0, or two finite figures above "
                        f"0 in ascending order.",
                    )


def _availability(c: Config, refuse: Refuse) -> None:
    _trace(c, refuse)
    needs = AVAILABILITY[c.availability.model]
    for key in ("p", "up", "down", "path"):
        given = getattr(c.availability, key) is not None
        if given and key not in needs:
            raise refuse(
                f"availability.{key}",
                f"does not belong to {c.availability.model}, which has "
                f"{', '.join(needs) or 'no options'}.",
            )
        if not given and key in needs:
            raise refuse("availability", f"{c.availability.model} needs {' and '.join(needs)}.")


def _trace(c: Config, refuse: Refuse) -> None:
    section, kinds = c.availability, {f.kind for f in c.faults.schedule} | {*c.faults.random}
    if section.trace is None:
        for key in ("start", "repeat"):
            if getattr(section, key):
                raise refuse(
                    f"availability.{key}", "belongs to availability.trace, which is not given."
                )
        return
    if section.model != "always":
        raise refuse(
            "availability.trace", f"the model {section.model} is given too; keep one of them."
        )
    if "crash" in kinds:
        raise refuse(
            "faults",
            "a crash counts the rounds that a client stays away, and availability.trace the "
            "seconds; keep one of them.",
        )


def _faults(c: Config, refuse: Refuse) -> None:
    kinds = get_args(FaultKind)
    for kind in c.faults.random:
        if kind not in kinds:
            raise refuse(f"faults.random.{kind}", unknown("kind of fault", kind, kinds))
    for i, fault in enumerate(c.faults.schedule):
        here = "faults.schedule"
        if fault.kind != "server_crash" and fault.client is None:
            raise refuse(here, f"number {i + 1}, {fault.kind}, needs a client.")
        if fault.kind == "server_crash" and fault.client is not None:
            raise refuse(here, f"number {i + 1}, server_crash, has no client.")
        if fault.client is not None and fault.client >= c.clients:
            raise refuse(
                here,
                f"number {i + 1}: there is no client {fault.client}; ids go from 0 to "
                f"{c.clients - 1}.",
            )
        needed = NEEDS.get(fault.kind)
        if needed and getattr(fault, needed) is None:
            raise refuse(here, f"number {i + 1}, {fault.kind}, needs {needed}.")

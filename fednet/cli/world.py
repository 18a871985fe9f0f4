"""Show a trace: availability of clients, speed of devices or of links, and what it means for a
configuration.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fednet.cli.common import CONFIG, common_arguments, configured, table
from fednet.errors import ConfigError

if TYPE_CHECKING:
    from fednet.config import Config

KINDS = ("availability", "devices", "link")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="FILE|NAME",
        help="a trace that fednet has (phones, wifi, lte, umts, evdo), or a file",
    )
    common_arguments(parser, CONFIG, out=False)
    parser.add_argument(
        "--as",
        dest="kind",
        choices=KINDS,
        help="what to read from the trace [phones: availability; wifi, lte, umts, "
        "evdo: link; a file: by its columns]",
    )


def run(args: argparse.Namespace) -> int:
    from fednet import world

    kind = args.kind or world.kind(args.trace)
    key = {"link": "link.trace"}.get(kind, f"{kind}.trace")
    given = args.config is not None or any(s.startswith("clients=") for s in args.set)
    if not given:
        args.set.append(f"clients={world.clients(args.trace)}")
    config = configured(args)
    from fednet.config import from_mapping, to_mapping

    mapping = to_mapping(config)
    section = dict(mapping[key.partition(".")[0]]) | {"trace": args.trace}
    config = from_mapping({**mapping, key.partition(".")[0]: section})
    {"availability": _availability, "devices": _devices, "link": _links}[kind](config)
    return 0


def _availability(config: Config) -> None:
    from fednet import world
    from fednet.report import traces

    made = world.of(config)
    assert made.presence is not None
    import numpy as np

    lengths = [b - a for p in made.presence for a, b in p.spells]
    if not lengths:
        raise ConfigError("no client of the trace is ever available.")
    found = traces.expected(made.presence, config.asked)
    p25, median, p75, p95 = np.quantile(lengths, [0.25, 0.5, 0.75, 0.95])
    shares = [p.share() for p in made.presence]
    rows = [
        ("clients", f"{config.clients}"),
        ("mean availability", f"{100 * np.mean(shares):.1f} %"),
        ("session length (quartiles, 95th percentile)", f"{p25:g}, {median:g}, {p75:g}, {p95:g} s"),
        ("clients available at once", f"{found.here:.1f} (from {found.least:g} to {found.most:g})"),
        ("clients selected per round", f"{found.asked:.1f} of {config.asked} requested"),
    ]
    rows += [
        (f"of these still available after {seconds:g} s", f"{count:.1f}")
        for seconds, count in found.stay
    ]
    table(("what", "how much"), rows)


def _devices(config: Config) -> None:
    from fednet import world

    made = world.of(config)
    assert made.pace is not None
    import numpy as np

    steps = [1e3 * p.step_s for p in made.pace]
    names = ("minimum", "5 %", "median", "95 %", "maximum")
    values = np.quantile(steps, [0, 0.05, 0.5, 0.95, 1])
    table(("training step", "ms"), [(n, f"{v:.3g}") for n, v in zip(names, values)])


def _links(config: Config) -> None:
    from fednet import world

    pairs = [pair for c in range(config.clients) if (pair := world.links(config, c)) is not None]
    import numpy as np

    rows = []
    for name, which in (("down", 0), ("up", 1)):
        mbps = np.concatenate([pair[which].mbps for pair in pairs])
        p5, median, p95 = np.quantile(mbps, [0.05, 0.5, 0.95])
        silent = max(pair[which].longest_silence() for pair in pairs)
        figures = (mbps.mean(), p5, median, p95)
        rows.append((name, *(f"{v:.3g}" for v in figures), f"{silent} s"))
    table(("way", "mean Mbit/s", "5 %", "median", "95 %", "longest silence"), rows)

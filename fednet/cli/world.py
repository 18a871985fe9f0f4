"""Show a trace: availability of clients, speed of devices or of links, and what it means for a
configuration.
"""

from __future__ import annotations

import argparse
import json

from fednet.cli.common import CONFIG, common_arguments, configured, table
from fednet.errors import ConfigError


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
        choices=("availability", "devices", "link"),
        help="what to read from the trace [phones: availability; wifi, lte, umts, "
        "evdo: link; a file: by its columns]",
    )


def run(args: argparse.Namespace) -> None:
    from fednet import world

    kind = args.kind or world.kind(args.trace)
    if args.config is None and not any(text.startswith("clients=") for text in args.set):
        args.set = [*args.set, f"clients={world.clients(args.trace)}"]
    args.set = [*args.set, f"{kind}.trace={json.dumps(args.trace)}"]
    config = configured(args)
    import numpy as np

    from fednet.world.presence import available

    made = world.of(config)
    if kind == "availability":
        assert made.presence is not None
        lengths = [b - a for p in made.presence for a, b in p.spells]
        if not lengths:
            raise ConfigError("no client of the trace is ever available.")
        here = available(made.presence)
        p25, median, p75, p95 = np.quantile(lengths, [0.25, 0.5, 0.75, 0.95])
        share = np.mean([p.share() for p in made.presence])
        quartiles = f"{p25:g}, {median:g}, {p75:g}, {p95:g} s"
        at_once = f"{here.mean():.1f} (from {here.min()} to {here.max()})"
        selected = np.minimum(here, config.asked).mean()
        rows = [
            ("clients", f"{config.clients}"),
            ("mean availability", f"{100 * share:.1f} %"),
            ("session length (quartiles, 95th percentile)", quartiles),
            ("clients available at once", at_once),
            ("clients selected per round", f"{selected:.1f} of {config.asked} requested"),
        ]
        table(("what", "how much"), rows)
    elif kind == "devices":
        assert made.step_s is not None
        steps = [1e3 * step_s for step_s in made.step_s]
        names = ("minimum", "5 %", "median", "95 %", "maximum")
        values = np.quantile(steps, [0, 0.05, 0.5, 0.95, 1])
        table(("training step", "ms"), [(n, f"{v:.3g}") for n, v in zip(names, values)])
    else:
        pairs = [p for c in range(config.clients) if (p := world.links(config, c)) is not None]
        ways = []
        for name, which in (("down", 0), ("up", 1)):
            mbps = np.concatenate([pair[which].mbps for pair in pairs])
            figures = (mbps.mean(), *np.quantile(mbps, [0.05, 0.5, 0.95]))
            silent = max(pair[which].longest_silence() for pair in pairs)
            ways.append((name, *(f"{v:.3g}" for v in figures), f"{silent} s"))
        table(("way", "mean Mbit/s", "5 %", "median", "95 %", "longest silence"), ways)

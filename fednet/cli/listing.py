"""List algorithms, models, datasets, partitions, compressors, tasks, traces of the world or the
configuration's keys. Algorithms come with what they send and their paper, keys with type, default
and meaning, and one trace with its figures.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from fednet import registry
from fednet.cli.common import common_arguments, config_of, table
from fednet.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fednet.config.keys import DocumentedKey


def add(parser: argparse.ArgumentParser) -> None:
    kinds = [*registry.ALL, "world", "keys"]
    parser.add_argument("what", choices=sorted(kinds), metavar="WHAT", help=" | ".join(kinds))
    common_arguments(
        parser,
        "for algorithms: a YAML configuration; with it, or with --set, their cost is in MB; for "
        "keys: a section such as train, a key, or a method such as algorithm.fedprox; for world: a "
        "trace, by its name or file, whose figures are shown",
        out=False,
    )


def run(args: argparse.Namespace) -> None:
    from fednet import loading

    loading.load_parts(args.load)
    if args.what == "keys":
        _keys(args.config or "")
    elif args.what == "algorithms":
        _algorithms(args)
    elif args.what == "world":
        _world(args)
    else:
        entries = registry.ALL[args.what].entries()
        table(("name", "what it is"), [(e.name, e.summary) for e in entries])
        if not entries and not args.quiet:
            print(f"fednet has no {args.what} of its own; --load FILE.py lists those of a file.")


def _algorithms(args: argparse.Namespace) -> None:
    from fednet.config import load
    from fednet.tools.costs import cost

    sized = bool(args.config or args.set)
    config = load(args.config, args.set, args.load) if sized else None
    rows = []
    for entry in registry.algorithm.entries():
        try:
            method = registry.algorithm.get(entry.name)()
        except ConfigError as broken:  # of another package
            rows.append((entry.name, *[""] * (6 if sized else 5), str(broken)))
            continue
        sent = method.sends()
        if config is not None:
            sizes = cost(config, entry.name).values()
            sent = tuple(f"{size / 1e6:.3f}{'+' if more else ''}" for size, more in sizes)
        model = "personal" if method.personalised else "global"
        about = method.paper or entry.summary
        rows.append((entry.name, model, *sent, *method.keeps(), about))
    costs = ("down MB", "up MB", "once MB") if sized else ("down", "up")
    right = (2, 3, 4) if sized else ()
    table(("name", "model", *costs, "server keeps", "client keeps", "paper"), rows, right)
    if args.quiet:
        return
    if sized:
        print(
            "a client and a round, before compression, without protocol overhead; once: with a "
            "client's first task; +: plus data whose size depends on the client."
        )
    else:
        print("a client and a round; |w|: the model's parameters. With CONFIG or --set: in MB.")


def _world(args: argparse.Namespace) -> None:
    """Prints the traces that fednet has, or the figures of one: of availability, devices or links,
    for as many clients as the trace has, or as --set clients says.
    """
    if args.config is None:
        from fednet.world.shipped import ABOUT

        table(("name", "what it is"), list(ABOUT.items()))
        return
    from fednet import world

    trace = args.config
    args.config = None
    kind = world.kind(trace)
    if not any(text.startswith("clients=") for text in args.set):
        args.set = [*args.set, f"clients={world.clients(trace)}"]
    args.set = [*args.set, f"{kind}.trace={json.dumps(trace)}"]
    config = config_of(args)
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
        every = [world.links(config, client) for client in range(config.clients)]
        pairs = [pair for pair in every if pair is not None]
        ways = []
        for name, which in (("down", 0), ("up", 1)):
            mbps = np.concatenate([pair[which].mbps for pair in pairs])
            figures = (mbps.mean(), *np.quantile(mbps, [0.05, 0.5, 0.95]))
            silent = max(pair[which].longest_silence() for pair in pairs)
            ways.append((name, *(f"{v:.3g}" for v in figures), f"{silent} s"))
        table(("way", "mean Mbit/s", "5 %", "median", "95 %", "longest silence"), ways)


def _keys(prefix: str) -> None:
    """Prints the keys at and below a prefix, the argument that is CONFIG for other lists."""
    from fednet.config.keys import keys, options
    from fednet.config.parts import SECTIONS

    found = {key.path: key for key in keys(prefix)}
    section, _, name = prefix.rpartition(".")
    parts: dict[str, list[DocumentedKey]] = {}
    if not found and section in SECTIONS:
        parts = options(section)
    if name in parts:  # such as algorithm.fedprox
        found = {option.path: option for option in parts[name]}
        if not found:
            print(f"{name} has no options of its own")
    elif not found:
        top = prefix.partition(".")[0]
        known = {k.path for k in keys(top)} or {k.path.partition(".")[0] for k in keys()}
        raise ConfigError(unknown("key", prefix, known | {f"{section}.{p}" for p in parts}))
    for path, key in found.items():
        _print_key(path, key)
    if prefix in SECTIONS:
        print(f"\nin {prefix}, options of one part alone:")
        for part, own in options(prefix).items():
            for option in own:
                _print_key(f"{part}.{option.path}", option)


def _print_key(path: str, key: DocumentedKey) -> None:
    unit = "" if key.unit == "-" else f" [{key.unit}]"
    print(f"{path}: {key.type}; default {key.default}{unit}")
    if key.about:
        print(f"    {key.about}")

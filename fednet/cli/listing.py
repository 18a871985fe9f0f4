"""List algorithms, models, datasets, partitions, compressors, tasks or the configuration's keys.
Algorithms come with what they send and their paper, keys with type, default and meaning.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fednet import registry
from fednet.cli.common import common_arguments, table
from fednet.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fednet.config.keys import DocumentedKey


def add(parser: argparse.ArgumentParser) -> None:
    kinds = [*registry.ALL, "keys"]
    parser.add_argument("what", choices=sorted(kinds), metavar="WHAT", help=" | ".join(kinds))
    common_arguments(
        parser,
        "for algorithms: a YAML configuration; with it, or with --set, their cost is in MB; for "
        "keys: a section such as train, a key, or a method such as algorithm.fedprox",
        out=False,
    )


def run(args: argparse.Namespace) -> None:
    from fednet import loading

    loading.load_parts(args.load)
    if args.what == "keys":
        _keys(args.config or "")
    elif args.what == "algorithms":
        _algorithms(args)
    else:
        entries = registry.ALL[args.what].entries()
        table(("name", "what it is"), [(e.name, e.summary) for e in entries])


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
            sent = tuple(f"{size / 1e6:.3f}{'+' * more}" for size, more in sizes)
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

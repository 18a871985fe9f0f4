"""What there is: algorithms, models, datasets, partitions, compressors, tasks, one line each, with
paper and cost.
"""

from __future__ import annotations

import argparse
from typing import Any

from fednet import registry
from fednet.cli.common import everywhere, table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=sorted(registry.ALL), metavar="WHAT", help=" | ".join(registry.ALL)
    )
    everywhere(parser, config=True)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="algorithms: their cost in MB for this model (or for that of CONFIG)",
    )


def run(args: argparse.Namespace) -> int:
    from fednet import loading

    loading.load_parts(args.load)
    entries = registry.ALL[args.what].entries()
    if args.what != "algorithms":
        table(("name", "what it is"), [(e.name, e.summary) for e in entries])
        return 0
    sized = bool(args.config or args.model or args.set)
    sizes = _sizes(args) if sized else {}
    rows = []
    for e in entries:
        down, up = _pair(e.facts.get("cost"), "|w|")
        if sized:
            down, up = sizes.get(e.name, ("?", "?"))
        server, client = _pair(e.facts.get("keeps"), "-")
        judged = "personal" if e.facts.get("personalised") else "global"
        rows.append(
            (e.name, judged, down, up, server, client, str(e.facts.get("paper") or e.summary))
        )
    unit = " MB" if sized else ""
    table(
        ("name", "model", f"down{unit}", f"up{unit}", "server keeps", "client keeps", "paper"),
        rows,
        right=(2, 3) if sized else (),
    )
    if not args.quiet:
        print(
            "a client and a round"
            + (
                ", before compression, framing aside; + what depends on the client's data."
                if sized
                else "; |w|: the model's parameters. With CONFIG or --model: in MB."
            )
        )
    return 0


def _pair(value: Any, default: str) -> tuple[str, str]:
    return (
        (str(value[0]), str(value[1]))
        if isinstance(value, (tuple, list)) and len(value) == 2
        else (default, default)
    )


def _sizes(args: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """MB down and up of each algorithm for the configured model, from its declared payloads."""
    sets = [*args.set, *([f"model={{name: {args.model}}}"] if args.model else [])]
    from fednet.config import load

    config = load(args.config, sets, args.load)
    from fednet.tools.costs import payload_bytes

    found = {}
    for e in registry.algorithm.entries():
        down, up, is_open = payload_bytes(config, e.name)
        found[e.name] = (
            f"{down / 1e6:.3f}{'+' if is_open[0] else ''}",
            f"{up / 1e6:.3f}{'+' if is_open[1] else ''}",
        )
    return found

"""Who holds what: samples per client per class, as a table and a bubble chart."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli.common import configured, everywhere


def add(parser: argparse.ArgumentParser) -> None:
    everywhere(parser, config=True)
    # --out is a picture here, as the manual has it; the runs' directory has no meaning for this verb.
    for action in parser._actions:
        if action.dest == "out":
            action.default, action.metavar, action.help = None, "FILE.png", "draw the bubble chart into this file"
    parser.add_argument("--export", type=Path, metavar="FILE.json", help="write the partition: each client's indices")


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    from fednet.report import partition

    text = partition.show(config, picture=args.out, export=args.export)
    if not args.quiet:
        print(text)
    return 0

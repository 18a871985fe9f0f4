"""The contract suite run over a part of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.py")
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    from fednet.errors import complain
    from fednet.tools import check

    for line in check.check(args.file, lambda wrong: complain(f"fednet check: {wrong}")):
        if not args.quiet:
            print(line, flush=True)
    return 0

"""The contract suite run over a part of one's own."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli.common import path_argument


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.py")
    path_argument(parser, "--data", "where the files of your data sets are")
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    from fednet.errors import complain
    from fednet.tools import check

    def say(wrong: str) -> None:
        complain(f"fednet check: {wrong}")

    for line in check.check(args.file, say, args.data):
        if not args.quiet:
            print(line, flush=True)
    return 0

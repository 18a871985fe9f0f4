"""Test your own part: that it is deterministic, resumable and declares what it sends."""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.common import add_flags, path_argument


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=values.path, metavar="FILE.py", help="the file with your part")
    path_argument(parser, "--data", "folder of your datasets' files")
    add_flags(parser, "--set", "--quiet")


def run(args: argparse.Namespace) -> None:
    from fednet.tools import check

    for line in check.check(args.file, args.data, args.set):
        if not args.quiet:
            print(line, flush=True)

"""The first round and the first tensor in which two runs differ, or that they are the same to the
bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="RUN")
    parser.add_argument("b", type=Path, metavar="RUN")
    parser.add_argument(
        "--quiet", action="store_true", help="say it by the exit status alone: 0 the same, 1 not"
    )


def run(args: argparse.Namespace) -> int:
    from fednet.report import open_run, verify

    verdict = verify.compare(open_run(args.a), open_run(args.b))
    if not args.quiet:
        print(verdict.text)
    return 0 if verdict.same else 1

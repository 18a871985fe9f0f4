"""Check whether two runs are bit-identical; else name the first round and tensor in which they
differ.
"""

from __future__ import annotations

import argparse

from fednet.cli import values


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=values.path, metavar="RUN", help="a run's directory, OUT/NAME")
    parser.add_argument("b", type=values.path, metavar="RUN", help="the run to compare with")
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing; exit status 0: identical, 1: different"
    )


def run(args: argparse.Namespace) -> int:
    from fednet.report import open_run, verify

    verdict = verify.compare(open_run(args.a), open_run(args.b))
    if not args.quiet:
        print(verdict.text)
    return 0 if verdict.same else 1

"""Stops a run of a `fednet serve`, or takes it out of the queue."""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.serve import queued, served


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", type=values.at_least_one, metavar="N", help="see fednet queue")
    served(parser)


def run(args: argparse.Namespace) -> int:
    entry = queued(args.at).cancel(args.number)
    print(f"run {entry.number}: {entry.name} will not be gone on with")
    return 0

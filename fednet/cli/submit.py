"""Puts a run at the end of the queue of a `fednet serve`; it is checked first."""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.common import CONFIG, configured, everywhere
from fednet.cli.serve import queued, served
from fednet.errors import ConfigError


def add(parser: argparse.ArgumentParser) -> None:
    everywhere(parser, CONFIG, out=False)
    parser.add_argument(
        "--resume",
        type=values.at_least_one,
        metavar="N",
        help="instead of a new one, run N, which failed: it goes on from its checkpoint",
    )
    served(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.serve.queue import Queue

    if args.resume is None:
        entry = Queue(args.at).submit(configured(args))
    elif args.config is not None or args.set or args.load:
        raise ConfigError(
            "--resume: a run goes on as it was submitted, without CONFIG, --set or --load."
        )
    else:
        entry = queued(args.at).again(args.resume)
    print(f"{entry.number}" if args.quiet else f"run {entry.number}: {entry.name} is submitted")
    return 0

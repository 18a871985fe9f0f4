"""Puts a run at the end of the queue of a `fednet serve`; it is checked first."""

from __future__ import annotations

import argparse

from fednet.cli.common import CONFIG, configured, everywhere
from fednet.cli.serve import served


def add(parser: argparse.ArgumentParser) -> None:
    everywhere(parser, CONFIG, out=False)
    served(parser)


def run(args: argparse.Namespace) -> int:
    config = configured(args)
    from fednet.serve.queue import Queue

    entry = Queue(args.at).submit(config)
    print(f"{entry.number}" if args.quiet else f"run {entry.number}: {entry.name} is submitted")
    return 0

"""What was submitted to a `fednet serve`, and how far it is."""

from __future__ import annotations

import argparse

from fednet.cli.common import table
from fednet.cli.serve import queued, served


def add(parser: argparse.ArgumentParser) -> None:
    served(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.serve.queue import OPEN
    from fednet.serve.queue import table as rows

    queue = queued(args.at)
    entries = queue.entries()
    table(("run", "name", "state", "said"), rows(entries))
    if any(entry.state in OPEN for entry in entries) and not queue.served:
        print(f"nobody serves {args.at}: fednet serve {args.at} goes on with what is open")
    return 0

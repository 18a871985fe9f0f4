"""What was submitted to a `fednet serve`, and how far it is."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli.common import table
from fednet.cli.serve import place


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--at",
        type=Path,
        default=place(),
        metavar="DIR",
        help="the folder that is served [FEDNET_SERVE, else serve]",
    )


def run(args: argparse.Namespace) -> int:
    from fednet.serve.queue import OPEN, Queue
    from fednet.serve.queue import table as rows

    queue = Queue(args.at)
    entries = queue.entries()
    table(("run", "name", "state", "said"), rows(entries))
    if any(entry.state in OPEN for entry in entries) and not queue.served:
        print(f"nobody serves {args.at}: fednet serve {args.at} goes on with what is open")
    return 0

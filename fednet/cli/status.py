"""Show what a run is doing: its round, the clients it waits for, the replies so far, and the
deadline.
"""

from __future__ import annotations

import argparse

from fednet.cli import values


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=values.path, metavar="RUN", help="a run's directory, OUT/NAME")
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> None:
    from fednet.report import status

    print(status.show(args.run, args.json))

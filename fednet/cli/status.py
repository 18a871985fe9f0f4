"""What a live or dead run is doing: the round, whom it waits for, what has arrived, what the
deadline will do.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory, OUT/NAME")
    parser.add_argument(
        "--watch", action="store_true", help="show it again whenever it changes, until the run ends"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object a line")


def run(args: argparse.Namespace) -> int:
    from fednet.report import status

    for text in status.show(args.run, watch=args.watch, json=args.json):
        print(text, flush=True)
    return 0

"""Show what a run is doing: its round, the clients it waits for, the replies so far, and the
deadline.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory, OUT/NAME")
    parser.add_argument(
        "--watch", action="store_true", help="print again at each change, until the run ends"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run(args: argparse.Namespace) -> int:
    from fednet.cli.display import redrawn
    from fednet.report import status

    if args.watch and not args.json and redrawn():
        return watch(args.run)
    for i, text in enumerate(status.show(args.run, watch=args.watch, json=args.json)):
        print("" if args.json or i == 0 else "\n", text, sep="", flush=True)
    return 0


def watch(run: Path) -> int:
    """Shows it at a terminal in one place, with running seconds."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from fednet.report import status

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        for text in status.show(run, watch=True, ages=True):
            live.update(Text(text), refresh=True)
    return 0

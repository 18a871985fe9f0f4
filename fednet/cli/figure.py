"""One figure fit for a paper: PDF with embedded TrueType, colour-blind safe, distinct in grey."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli.report import runs_argument


def add(parser: argparse.ArgumentParser) -> None:
    runs_argument(parser)
    parser.add_argument(
        "--x", choices=["mb", "rounds", "seconds"], default="rounds", help="[rounds]"
    )
    parser.add_argument("--y", default="accuracy", metavar="Y", help="what is drawn [accuracy]")
    parser.add_argument(
        "--bytes",
        choices=["total", "up", "down"],
        default="total",
        help="which bytes MB counts [total]",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.pdf")
    parser.add_argument("--width", default="3.4in", metavar="W", help="3.4in, 86mm [3.4in]")


def run(args: argparse.Namespace) -> int:
    from fednet.report import open_run, plots

    runs = [open_run(r) for r in args.runs]
    print(plots.figure(runs, args.out, x=args.x, y=args.y, width=args.width, bytes=args.bytes))
    return 0

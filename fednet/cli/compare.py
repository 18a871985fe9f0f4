"""Print a table with a row for each method: its accuracies, and the rounds, MB and seconds to each
target. Runs that differ only in the seed are in one row, with their mean.
"""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.report import counted_and_labelled, opened, runs_argument


def add(parser: argparse.ArgumentParser) -> None:
    runs_argument(parser)
    parser.add_argument(
        "--target",
        type=values.numbers,
        default=[],
        metavar="A,B",
        help="target accuracies, such as 0.6,0.7",
    )
    parser.add_argument(
        "--by", choices=["mb", "rounds", "seconds"], help="show costs to targets in this unit only"
    )
    counted_and_labelled(parser)
    parser.add_argument(
        "--format", choices=["table", "csv"], default="table", help="format of the table [table]"
    )


def run(args: argparse.Namespace) -> None:
    from fednet.report import tables

    runs = opened(args.runs)
    made = tables.table(runs, args.target, args.by, args.bytes, args.label)
    print(tables.as_csv(made) if args.format == "csv" else tables.as_text(made))

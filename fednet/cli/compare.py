"""Print a table with a row for each method: its accuracies, and the rounds, MB and seconds to each
target. Runs that differ only in the seed are in one row, with their mean.
"""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.report import counted_and_labelled, open_runs, runs_argument


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
        "--format",
        choices=["table", "csv", "markdown", "latex"],
        default="table",
        help="format of the table; markdown and latex are for papers [table]",
    )


def run(args: argparse.Namespace) -> None:
    from fednet.report import publishing, tables

    runs = open_runs(args.runs)
    made = tables.table(runs, args.target, args.by, args.bytes, args.label)
    forms = {
        "table": tables.as_text,
        "csv": tables.as_csv,
        "markdown": publishing.as_markdown,
        "latex": publishing.as_latex,
    }
    print(forms[args.format](made))

"""Run the cells of a paper's table and print them next to the printed figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from fednet.cli import values
from fednet.cli.common import add_flags, common_arguments


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table",
        nargs="?",
        default="",
        metavar="PAPER/TABLE",
        help="such as fedpdc/table2; --list shows them",
    )
    common_arguments(parser)
    parser.add_argument("--list", action="store_true", help="list the papers and their tables")
    parser.add_argument(
        "--gather",
        action="store_true",
        help="print the table of the finished runs, and run nothing",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what would run and how long it may take, and stop",
    )
    parser.add_argument(
        "--grid",
        type=Path,
        metavar="DIR",
        help="write the grid that the paper searched for each cell as a sweep file, and stop",
    )
    parser.add_argument("--dataset", metavar="D", help="only the cells of this dataset")
    parser.add_argument("--only", type=values.names, metavar="M,...", help="only these methods")
    parser.add_argument(
        "--setting",
        metavar="TEXT",
        help="only cells whose setting has these words, such as alpha=0.2 or E1",
    )
    parser.add_argument(
        "--scale",
        choices=["full", "mini"],
        default="full",
        help="mini: small enough for a laptop [full]",
    )
    add_flags(parser, "--seeds", "--jobs", "--device")


def run(args: argparse.Namespace) -> int:
    from fednet.papers.reproduce import main

    return main(args)

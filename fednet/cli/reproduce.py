"""The runs behind one table of a paper, the paper's figure beside ours."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from fednet.cli import values
from fednet.cli.common import device_argument, everywhere

if TYPE_CHECKING:
    from fednet.papers.job import Request


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "table", nargs="?", metavar="PAPER/TABLE", help="such as fedpdc/table2; --list shows them"
    )
    everywhere(parser)
    parser.add_argument("--list", action="store_true", help="the papers and their tables")
    parser.add_argument(
        "--gather",
        action="store_true",
        help="start nothing: the table of the runs that are done, the others marked as not run",
    )
    parser.add_argument(
        "--plan", action="store_true", help="say what would run and how long it may take"
    )
    _cells(parser)
    parser.add_argument(
        "--scale",
        choices=["full", "mini"],
        default="full",
        help="mini: small enough for a laptop [full]",
    )
    parser.add_argument(
        "--jobs", type=values.at_least_one, default=1, metavar="J", help="runs at a time [1]"
    )
    device_argument(parser)
    _search(parser)


def _cells(parser: argparse.ArgumentParser) -> None:
    """Which runs of a table."""
    parser.add_argument("--dataset", metavar="D", help="only this dataset's part of the table")
    parser.add_argument("--only", type=values.names, metavar="M,...", help="only these methods")
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="NAME",
        help="a method beside the paper's; may be repeated",
    )
    parser.add_argument(
        "--open",
        action="store_true",
        help="also the paper's method under the choices that the paper leaves open, and its "
        "ablations",
    )
    parser.add_argument(
        "--seeds",
        type=values.seeds,
        metavar="0,1,2",
        help="a run of each cell with each of these [0]",
    )
    parser.add_argument(
        "--setting",
        metavar="TEXT",
        help="only cells with these words in their setting, such as alpha=0.2 or E1",
    )


def _search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search",
        action="store_true",
        help="first search the paper's grids, at a quarter of the rounds, on a validation split",
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="with --search: these values of KEY instead of the paper's",
    )


def run(args: argparse.Namespace) -> int:
    from fednet.papers.reproduce import main

    return main(request(args))


def request(args: argparse.Namespace) -> Request:
    """The command line as a value."""
    from fednet.papers.job import Request

    given = {f.name: getattr(args, f.name) for f in fields(Request)}
    return Request(**{**given, "table": args.table or ""})

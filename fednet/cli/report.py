"""One self-contained HTML page about one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fednet.cli import values
from fednet.cli.common import add_flags

if TYPE_CHECKING:
    from fednet.report.read import Run


def runs_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=values.path,
        metavar="RUN",
        help="a run's directory, OUT/NAME, or a sweep's, for all its cells",
    )


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """The named runs; of a sweep's folder, all its cells that are done."""
    from fednet.report import open_run
    from fednet.sweep import order

    return [open_run(run) for path in paths for run in order.finished_runs(path) or [path]]


def counted_and_labelled(parser: argparse.ArgumentParser) -> None:
    """--bytes and --label, of the commands that compare runs."""
    parser.add_argument(
        "--bytes",
        choices=["total", "up", "down", "useful"],
        default="total",
        help="which bytes count as MB: all, those of one direction, or those of messages that "
        "were used, each counted once [total]",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="TEXT",
        help="name of a method; once for each, in the order of their first runs",
    )


def add(parser: argparse.ArgumentParser) -> None:
    runs_argument(parser)
    parser.add_argument(
        "--out",
        type=values.new_file("html"),
        metavar="FILE.html",
        help="file to write [the run's report.html; report.html for several]",
    )
    add_flags(parser, "--quiet")


def run(args: argparse.Namespace) -> None:
    from fednet.report import page

    runs = open_runs(args.runs)
    out = args.out or (runs[0].dir / "report.html" if len(runs) == 1 else Path("report.html"))
    page.write(runs, out)
    if not args.quiet:
        print(out)

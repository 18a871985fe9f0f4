"""Every combination of settings, paired by seed, resumable; several such processes on one output share the cells."""

from __future__ import annotations

import argparse
import re

from fednet.cli import values
from fednet.cli.common import everywhere


def add(parser: argparse.ArgumentParser) -> None:
    everywhere(parser, config=True)
    parser.add_argument("--grid", action="append", default=[], nargs="+", metavar="KEY=A,B", help="values of one key, such as train.lr=0.1,0.01")
    parser.add_argument("--seeds", type=values.whole_numbers, metavar="0,1,2", help="run each cell with each of these seeds")
    parser.add_argument("--plan", action="store_true", help="say what would run, and what is done already")
    parser.add_argument("--cell", type=cell, metavar="I/N", help="only the I-th of N shares of the cells, from 1")
    parser.add_argument("--workers", type=values.at_least_one, metavar="W", help="worker processes of each run")
    parser.add_argument("--device", default="auto", metavar="D")
    parser.add_argument("--in-process", action="store_true", help="each run in one process with no sockets")


def cell(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, such as 2/8, got {text!r}")
    return int(found[1]), int(found[2])


def run(args: argparse.Namespace) -> int:
    from fednet.engine import sweep

    args.grid = [g for group in args.grid for g in group]
    return int(sweep.main(args))

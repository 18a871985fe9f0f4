"""Orchestration cost against the floor measured in the same run."""

from __future__ import annotations

import argparse

from fednet.cli.common import everywhere


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["transport", "round", "scale"], default="round", metavar="WHAT",
                        help="transport | round | scale [round]")
    everywhere(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.engine import bench

    return int(bench.main(args))

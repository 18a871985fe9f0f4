"""Orchestration cost against the floor measured in the same run."""

from __future__ import annotations

import argparse

from fednet.cli import values
from fednet.cli.common import everywhere


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=["transport", "round", "scale", "methods", "curve", "pack"],
        default="round",
        metavar="WHAT",
        help="transport | round | scale | methods | curve | pack [round]",
    )
    parser.add_argument(
        "--workload",
        metavar="W1,...",
        help="round, curve: W1 to W5, Q [W1,W2,W3; W2,Q]; scale: P8 to P128, N100 to N10000 "
        "[all]; "
        "methods, pack: cnn, mlp [all; cnn]",
    )
    parser.add_argument(
        "--repeat",
        type=values.at_least_one,
        default=3,
        metavar="R",
        help="how often both are run in turn: what is measured, and what it is measured against "
        "[3]",
    )
    parser.add_argument(
        "--method", metavar="A,...", help="methods: whose halves [all that are registered]"
    )
    parser.add_argument(
        "--half", choices=["server", "client"], help="methods: this half alone [both]"
    )
    parser.add_argument(
        "--replies",
        type=values.at_least_one,
        default=10,
        metavar="M",
        help="methods: participants of the server's round [10]",
    )
    parser.add_argument(
        "--clients",
        type=values.at_least_one,
        default=10,
        metavar="N",
        help="pack: clients that are trained as one [10]",
    )
    parser.add_argument(
        "--device", default="auto", metavar="D", help="pack: auto, cpu, cuda or cuda:0 [auto]"
    )
    parser.add_argument(
        "--workers",
        type=values.at_least_one,
        metavar="W",
        help="worker processes, and of the floor [one a core]",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    everywhere(parser)


def run(args: argparse.Namespace) -> int:
    from fednet.bench import command as bench

    return int(bench.main(args))

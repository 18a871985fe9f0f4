"""Orchestration cost against the floor measured in the same run."""

from __future__ import annotations

import argparse

from fednet.cli import values


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=[
            "transport",
            "round",
            "scale",
            "curve",
            "pack",
            "replies",
            "secagg",
            "network",
        ],
        default="round",
        metavar="WHAT",
        help="transport | round | scale | curve | pack | replies | secagg | network [round]",
    )
    parser.add_argument(
        "--workload",
        metavar="W1,...",
        help="round, curve: W1 to W5, Q [W1,W2,W3; W2,Q]; scale: P8 to P128, N100 to N10000 "
        "[all]; "
        "pack: cnn, mlp, convnet [cnn]",
    )
    parser.add_argument(
        "--repeat",
        type=values.count(1000),
        default=3,
        metavar="R",
        help="how often both are run in turn: what is measured, and what it is measured against "
        "[3]",
    )
    _of_some(parser)
    _sizes(parser)


def _of_some(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients",
        type=values.counts(10_000),
        metavar="N,...",
        help="pack: clients that are trained as one [10]; secagg: of a round [10,50,200]",
    )
    parser.add_argument(
        "--connections",
        type=values.counts(20_000),
        metavar="N,...",
        help="replies: clients, each with a connection of its own [100,500,2000,5000]",
    )
    parser.add_argument(
        "--device", default="auto", metavar="D", help="pack: auto, cpu, cuda or cuda:0 [auto]"
    )


def _sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=values.count(1000),
        metavar="W",
        help="worker processes, and of the floor [one a core]",
    )
    parser.add_argument(
        "--json",
        type=values.new_file("json"),
        metavar="FILE.json",
        help="write the figures there too",
    )
    _secagg(parser)
    _network(parser)


def _secagg(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("secagg")
    more.add_argument(
        "--dropout",
        type=values.shares,
        default=[0.0, 0.1, 0.3],
        metavar="SHARE,...",
        help="of the clients, lost before their vectors come [0,0.1,0.3]",
    )
    more.add_argument(
        "--machines", action="store_true", help="no runs with processes beside the machines"
    )


def _network(parser: argparse.ArgumentParser) -> None:
    more = parser.add_argument_group("network (as root: it makes network namespaces)")
    more.add_argument(
        "--part",
        type=values.names,
        metavar="P,...",
        help="latency (with loss), rate, dropout [all of them]",
    )
    more.add_argument(
        "--setting", choices=["default", "wide", "both"], default="both", help="[both]"
    )
    more.add_argument(
        "--latency", type=values.lengths, metavar="S,...", help="seconds one way [0.1 to 10]"
    )
    more.add_argument(
        "--loss", type=values.shares, metavar="SHARE,...", help="of packets [0 to 0.6]"
    )
    more.add_argument(
        "--limit", type=values.seconds, default=180.0, metavar="T", help="of a cell [3m]"
    )
    more.add_argument(
        "--jobs", type=values.count(1000), default=4, metavar="J", help="cells at a time [4]"
    )
    more.add_argument(
        "--picture",
        type=values.new_file("svg", "pdf", "png"),
        metavar="FILE.svg",
        help="draw the map there",
    )


def run(args: argparse.Namespace) -> int:
    from fednet.bench import command as bench

    return int(bench.main(args))
